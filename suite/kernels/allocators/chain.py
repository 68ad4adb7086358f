"""The spans of one buffer, low to high: what fits between them, and how floats make room.

Whatever is asked is asked of all spans at once, as one number of pages each: the bytes between two spans can
serve either of them but not both. An empty span is transparent to its neighbours.
"""

from collections.abc import Callable, Sequence

from suite.errors import InvariantError
from suite.kernels.allocators.multi_ended import Growth, Reach, Span

Wants = Sequence[int]  # pages to bind, one number per span


class Chain:
    """`spans` low to high: the last grows down, the first of several grows up, all between them float."""

    def __init__(self, spans: Sequence[Span], sink_bytes: int, buffer_bytes: int) -> None:
        growth = [span.growth for span in spans]
        wanted = [Growth.UP, *[Growth.BOTH] * (len(spans) - 2), Growth.DOWN] if len(spans) > 1 else [Growth.DOWN]
        if growth != wanted:
            raise InvariantError(f"chain: growth {[g.value for g in growth]} != {[g.value for g in wanted]}")
        self.spans, self.sink_bytes, self.buffer_bytes = tuple(spans), sink_bytes, buffer_bytes

    def reach(self, wants: Wants) -> list[Reach] | None:
        """The ranks of every span once `wants` are bound, without a move; None when that needs one.

        A float grows into its larger gap first, and starts in the middle of the room it has.
        """
        reach = [(span.start, span.end) for span in self.spans]
        for at in (0, len(self.spans) - 1, *range(1, len(self.spans) - 1)):  # floats see where the ends will be
            span = self.spans[at]
            if (fresh := span.fresh(wants[at])) == 0:
                continue
            room = self._room(at, reach)
            if span.growth is not Growth.BOTH:
                grown = (0, span.end + fresh)
            elif span.length == 0:
                start = room[0] + (room[1] - room[0] - fresh) // 2
                grown = (start, start + fresh)
            else:
                below, above = max(0, span.start - room[0]), max(0, room[1] - span.end)
                down = min(fresh, below) if below > above else fresh - min(fresh, above)
                grown = (span.start - down, span.end + fresh - down)
            if grown[0] < room[0] or grown[1] > room[1]:
                return None
            reach[at] = grown
        return reach

    def fits(self, wants: Wants, *, empty: bool = False) -> bool:
        """Whether `wants` could be bound once every span is packed and every float moved out of the way.

        `empty`: in a buffer that holds nothing else.
        """
        return self._first_pages(wants if empty else self._with_live(wants)) is not None

    def most(self, units: Wants, fits: Callable[[Wants], bool]) -> int:
        """The largest n for which `fits(n * units)`, units being 0 or 1 of each span."""
        low, high = 0, min(span.ranks for span, unit in zip(self.spans, units, strict=True) if unit)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits([middle * unit for unit in units]) else (low, middle - 1)
        return low

    def make_room(self, wants: Wants) -> list[Reach]:
        """Shift floats, by the fewest pages, until `wants` can be bound; returns the ranks of every span then.

        Every span must be packed and no forward in flight. InvariantError when `wants` does not fit at all.
        """
        totals = self._with_live(wants)
        lowest = self._first_pages(totals)
        if lowest is None:
            raise InvariantError(f"chain: wants {list(wants)} do not fit beside live {[s.live for s in self.spans]}")
        reach = self._nearest(totals, lowest)
        starts = {}
        for span, (start, end) in zip(self.spans, reach, strict=True):
            if span.growth is Growth.BOTH and span.length:
                starts[span] = min(max(span.start, start), end - span.length)
        # what moves up goes first from the top, what moves down from the bottom: each finds its place empty
        for span in reversed(starts):
            if starts[span] > span.start:
                span.shift(starts[span])
        for span in starts:
            if starts[span] < span.start:
                span.shift(starts[span])
        return reach

    def check(self) -> None:
        """Raise InvariantError when two spans overlap, or one the sink."""
        below, name = self.sink_bytes, "sink"
        for span in self.spans:
            if span.length:
                low, high = span.bytes_of((span.start, span.end))
                if low < below:
                    raise InvariantError(f"{name} ends at byte {below} > {low}, where the {span.kind} span starts")
                below, name = high, f"{span.kind} span"
        if below > self.buffer_bytes:
            raise InvariantError(f"{name} ends at byte {below} > {self.buffer_bytes}, the buffer")

    # -- inside ----------------------------------------------------------------------------------

    def _room(self, at: int, reach: list[Reach]) -> Reach:
        """The ranks [start, end) that span `at` could use with all others at `reach`."""
        span, low, high = self.spans[at], self.sink_bytes, self.buffer_bytes
        for other, (start, end) in zip(self.spans[:at], reach[:at], strict=True):
            low = other.bytes_of((start, end))[1] if end > start else low
        for other, (start, end) in zip(reversed(self.spans[at + 1 :]), reversed(reach[at + 1 :]), strict=True):
            high = other.bytes_of((start, end))[0] if end > start else high
        first, last = -(-low // span.page_bytes), high // span.page_bytes
        if span.growth is Growth.DOWN:
            return 0, min(span.ranks, span.plan.num_pages - first)
        return max(0, first - span.plan.min_page), min(span.ranks, last - span.plan.min_page)

    def _with_live(self, wants: Wants) -> list[int]:
        return [span.live + want for span, want in zip(self.spans, wants, strict=True)]

    def _first_pages(self, totals: Wants) -> list[int] | None:
        """The lowest first page of every span with `totals` pages in each; None when they do not fit."""
        low, firsts = self.sink_bytes, []
        for span, pages in zip(self.spans, totals, strict=True):
            first = max(span.plan.min_page, -(-low // span.page_bytes))
            if span.growth is Growth.DOWN:
                first = span.plan.num_pages - pages
            firsts.append(first)
            if pages:
                if first * span.page_bytes < low or first < span.plan.min_page or first + pages > span.plan.num_pages:
                    return None
                low = (first + pages) * span.page_bytes
        return firsts

    def _nearest(self, totals: Wants, lowest: list[int]) -> list[Reach]:
        """Ranks with room for `totals`, each float as near as possible to where it is."""
        highest, bound = list(lowest), self.buffer_bytes
        for at in reversed(range(len(self.spans))):
            span = self.spans[at]
            if totals[at] and span.growth is Growth.BOTH:
                highest[at] = min(bound // span.page_bytes, span.plan.num_pages) - totals[at]
            if totals[at]:
                bound = highest[at] * span.page_bytes
        reach, low = [], self.sink_bytes
        for span, pages, top in zip(self.spans, totals, highest, strict=True):
            start = 0
            if span.growth is Growth.BOTH and pages:
                first = max(-(-low // span.page_bytes), span.plan.min_page)
                here = span.plan.min_page + span.start if span.live else (first + top) // 2
                start = min(max(here, first), top) - span.plan.min_page
            reach.append((start, start + pages))
            low = span.bytes_of(reach[-1])[1] if pages else low
        return reach
