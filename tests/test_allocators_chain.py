"""Chains of two to four spans on a byte array: capacity against brute force, floats that move with their bytes."""

import functools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from suite.errors import InvariantError
from suite.kernels.allocators.chain import Chain
from suite.kernels.allocators.multi_ended import Growth, Span
from suite.kernels.pools.layout import SpanPlan

SIZES = {2: (24, 7), 3: (24, 7, 10), 4: (24, 7, 5, 10)}  # page bytes, low to high: no common grid
SINK, TOTAL = 24, 300


@dataclass
class Bytes:
    """Stands for the pool: moves envelopes of one byte array, where every page is filled with its stamp."""

    sizes: dict[str, int]
    buffer: np.ndarray = field(default_factory=lambda: np.zeros(TOTAL, dtype=np.int64))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    poison: bool = True

    def page(self, kind: str, page: int) -> np.ndarray:
        return self.buffer[page * self.sizes[kind] : (page + 1) * self.sizes[kind]]

    def zero_pages(self, kind: str, pages: torch.Tensor) -> None:
        for page in pages.tolist():
            self.page(kind, page)[:] = 0

    def poison_pages(self, kind: str, pages: torch.Tensor) -> None:
        for page in pages.tolist():
            self.page(kind, page)[:] = -1

    def move_pages(self, kind: str, sources: torch.Tensor, targets: torch.Tensor) -> None:
        assert not set(sources.tolist()) & set(targets.tolist())
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.page(kind, target)[:] = self.page(kind, source)


class Rig:
    def __init__(self, count: int) -> None:
        sizes = {f"span {at}": size for at, size in enumerate(SIZES[count])}
        self.pool = Bytes(sizes)
        growth = [Growth.UP, *[Growth.BOTH] * (count - 2), Growth.DOWN]
        self.spans = [
            Span(
                self.pool,
                SpanPlan(kind=kind, page_bytes=size, num_pages=TOTAL // size, min_page=-(-SINK // size)),
                grows,
                200,
            )
            for (kind, size), grows in zip(sizes.items(), growth, strict=True)
        ]
        self.chain = Chain(self.spans, SINK, TOTAL)
        self.live: list[list[int]] = [[] for _ in self.spans]
        self.free = [list(range(1, 200)) for _ in self.spans]

    def bind(self, wants: list[int]) -> bool:
        """Bind `wants`, as an allocator would; whether floats had to make room."""
        reach, shifted = self.chain.reach(wants), False
        if reach is None:
            for span in self.spans:
                span.pack(keep=frozenset(), forward_in_flight=False)
            reach = self.chain.reach(wants)
        if reach is None:
            reach, shifted = self.chain.make_room(wants), True
        for at, (span, want) in enumerate(zip(self.spans, wants, strict=True)):
            if want == 0:
                continue
            pages, self.free[at] = self.free[at][:want], self.free[at][want:]
            span.bind(pages, reach[at])
            self.live[at] += pages
            for page in pages:
                place = self.pool.page(span.kind, span.map.host[page])
                assert not place.any()
                place[:] = page + 1000 * at
        self.check()
        return shifted

    def unbind(self, at: int, pages: list[int]) -> None:
        self.spans[at].unbind(pages, frozenset())
        self.live[at] = [page for page in self.live[at] if page not in pages]
        self.free[at] += pages

    def check(self) -> None:
        self.chain.check()
        for at, (span, live) in enumerate(zip(self.spans, self.live, strict=True)):
            span.check()
            assert span.live == len(live)
            for page in live:
                assert (self.pool.page(span.kind, span.map.host[page]) == page + 1000 * at).all()

    def could_hold(self, totals: list[int]) -> bool:
        """By trying every first byte: is there a place for `totals` pages of every span, in order, past the sink?"""

        @functools.cache
        def place(at: int, low: int) -> bool:
            if at == len(self.spans):
                return low <= TOTAL
            size, pages = self.spans[at].page_bytes, totals[at]
            if pages == 0:
                return place(at + 1, low)
            grid = range(0, TOTAL - pages * size + 1, size)
            firsts = [first for first in grid if first >= low]
            if self.spans[at].growth is Growth.DOWN:
                firsts = [first for first in firsts if first + pages * size == TOTAL // size * size]
            return any(place(at + 1, first + pages * size) for first in firsts)

        return place(0, SINK)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_capacity_is_what_brute_force_finds_and_every_byte_moves_along(count, seed):
    dice, rig, shifts = random.Random(seed), Rig(count), 0
    for _ in range(60):
        units = dice.choice([[1, *[0] * (count - 1)], [0, *[1] * (count - 1)], [1] * count, [0] * (count - 1) + [1]])
        most = rig.chain.most(units, rig.chain.fits)
        live = [len(pages) for pages in rig.live]
        assert rig.could_hold([n + most * unit for n, unit in zip(live, units, strict=True)])
        assert not rig.could_hold([n + (most + 1) * unit for n, unit in zip(live, units, strict=True)])
        count_now = dice.choice([most, most, most // 2, min(1, most)])
        shifts += rig.bind([count_now * unit for unit in units])
        for at, pages in enumerate(rig.live):
            rig.unbind(at, [page for page in pages if dice.random() < dice.choice([0, 0.2, 0.6, 1])])
        rig.check()
    assert shifts or count < 3, "no float ever moved"


def test_a_float_starts_in_the_middle_and_grows_into_the_larger_gap():
    rig = Rig(3)
    rig.bind([0, 4, 0])
    low, high = rig.spans[1].bytes_of((rig.spans[1].start, rig.spans[1].end))
    assert abs((low - SINK) - (TOTAL - high)) <= 7
    rig.bind([4, 0, 0])
    start = rig.spans[1].start
    rig.bind([0, 2, 0])
    assert rig.spans[1].start == start, "grew into the smaller gap"
    rig.bind([0, 0, 10])
    end = rig.spans[1].end
    rig.bind([0, 1, 0])
    assert (rig.spans[1].start, rig.spans[1].end) == (start - 1, end)


def test_making_room_moves_the_fewest_pages_or_leaps():
    rig = Rig(3)
    rig.bind([0, 12, 0])
    span = rig.spans[1]
    want = (span.bytes_of((span.start, span.end))[0] - SINK) // 24 + 1
    over = SINK + want * 24 - span.bytes_of((span.start, span.end))[0]
    rig.bind([want, 0, 0])
    assert span.pages_moved == -(-over // 7) < 12
    rig = Rig(3)
    rig.bind([0, 3, 0])
    before = rig.spans[1].start
    rig.bind([8, 0, 0])
    assert rig.spans[1].pages_moved == 3 <= rig.spans[1].start - before


def test_an_empty_span_is_transparent():
    rig = Rig(3)
    rig.bind([0, 0, 27])  # 27 pages of 10 bytes: all but the sink, past where the float would lie
    rig.unbind(2, rig.live[2][5:])
    assert not rig.bind([9, 0, 0]), "nothing stood in the way"
    assert (
        rig.chain.most([0, 1, 0], rig.chain.fits) == (250 - 240) // 7 - 1
    )  # on its own grid: bytes 245 to 252 do not fit


def test_misuse_is_named():
    rig = Rig(3)
    rig.bind([2, 3, 2])
    with pytest.raises(InvariantError, match=r"chain: wants \[99, 0, 0\] do not fit beside live \[2, 3, 2\]"):
        rig.chain.make_room([99, 0, 0])
    with pytest.raises(InvariantError, match="chain: growth"):
        Chain(rig.spans[1:], SINK, TOTAL)
    rig.unbind(1, rig.live[1][1:2])
    with pytest.raises(InvariantError, match="span 1: live 2 != span 3: shift needs it packed"):
        rig.spans[1].shift(1)
    rig.spans[1].start, rig.spans[1].end = 0, 3
    with pytest.raises(InvariantError, match="span 0 span ends at byte 72 > 28, where the span 1 span starts"):
        rig.chain.check()
