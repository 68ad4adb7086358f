"""Metadata on a unified pool, mapped back through its page maps, is the static pool's, byte for byte.

For every backend and page size, eager and captured, decode, extend and verify, at lengths around a page, two
pages and the window, together in one ragged batch. A windowed rig has both kinds of layers, so it stands for
full attention as well.
"""

import pytest
import torch

from suite.kernels.attention.base import Metadata
from suite.kernels.attention.csr import window_start
from suite.kernels.attention.reference import rows_of
from suite.kernels.attention.support import SUPPORT
from suite.kernels.batch import ForwardMode
from suite.kernels.ids import KVKind
from tests.attention_rig import Rig
from tests.mla_rig import LatentRig
from tests.test_attention_metadata import tensors

W, DRAFT_TOKENS = 20, 3
CASES = [
    (family, name, size)
    for name, line in SUPPORT.items()
    for family in ("SWA", "MLA")
    for size in (1, 12, 16, 64)
    if family in line.families and any(pages.admit(size) for pages in line.pages(family))
]
TRANSLATED = ("write_ids.ids", "window_write_ids.ids", "full.indices", "window.indices", "fused_write_ids.")
TABLES = ("page_table.", "window_page_table.")


def lengths(page_size: int) -> list[int]:
    return [page_size + 1, page_size, max(1, page_size - 1), 2 * page_size + 1, W - 1, W, W + 1, 47]


def planned(rig: Rig, mode: ForwardMode, captured: bool) -> Metadata:
    """Metadata of a forward after which the requests have `lengths`, pages having moved apart before it."""
    goals = lengths(rig.page_size)
    decoy = len(goals) + 1
    each = {ForwardMode.DECODE: 1, ForwardMode.VERIFY: DRAFT_TOKENS}
    news = {row: min(goal, each.get(mode, row)) for row, goal in enumerate(goals, 1)}
    news = {row: new for row, new in news.items() if mode is not ForwardMode.VERIFY or new == DRAFT_TOKENS}
    rig.attention.capture(decoy, DRAFT_TOKENS)
    rig.batch({decoy: 40} | {row: goals[row - 1] - new for row, new in news.items() if goals[row - 1] > new})
    rig.evict(news)
    if captured:
        rig.attention.replay(rig.batch({decoy: each[mode]}, mode))  # what stands in the buffers from before
    rig.release(decoy)
    assert (rig.move() > 0) is (rig.mode != "static")
    batch = rig.batch(news, mode, pad_to=len(news) + 1 if captured else 0)
    return (rig.attention.replay if captured else rig.attention.plan)(batch)


def virtual_rows(rig: Rig, kind: KVKind, rows: torch.Tensor) -> list[int]:
    """Rows of a kernel's view -> the virtual ids whose rows they are; any row of the sink page is 0."""
    page_map, multiplier = rig.translator.read_map(kind)
    if page_map is None:
        return [row if row >= rig.page_size else 0 for row in rows.tolist()]
    virtual_of = {physical * multiplier: page for page, physical in enumerate(page_map.tolist()) if physical >= 0}
    assert kind is KVKind.WINDOW or rig.mode == "static" or any(a != b for a, b in virtual_of.items()), (
        "an identity map"
    )
    size = rig.page_size
    found = [virtual_of[row // size] * size + row % size for row in rows.tolist()]
    return [row if row >= size else 0 for row in found]


def granted(rig: Rig, metadata: Metadata, kind: KVKind) -> list[list[int]]:
    """Virtual ids of every position that each request reads."""
    found = []
    queries = metadata.cu_query_lens.diff().tolist()
    for request, (seq_len, query_len) in enumerate(zip(metadata.seq_lens.tolist(), queries, strict=True)):
        first = 0 if kind is KVKind.FULL else window_start(seq_len, query_len, W)
        found.append(virtual_rows(rig, kind, rows_of(metadata, kind, request, first, seq_len)))
    return found


@pytest.mark.parametrize(("family", "backend", "page_size"), CASES, ids=["-".join(map(str, case)) for case in CASES])
@pytest.mark.parametrize("pool", ["unified", "unified_token_major"])
def test_metadata_mapped_back_is_the_static_pools(family, backend, page_size, pool):
    make = Rig if family == "SWA" else LatentRig
    window = {"window": W} if family == "SWA" else {}
    for mode, captured in (
        (ForwardMode.EXTEND, False),
        (ForwardMode.DECODE, False),
        (ForwardMode.DECODE, True),
        (ForwardMode.VERIFY, False),
        (ForwardMode.VERIFY, True),
    ):
        context = max(96, 4 * page_size)
        rigs = [make(each, backend, "reference", page_size, context=context, requests=9, poison=False, **window)
                for each in ("static", pool)]  # fmt: skip
        metadata = [planned(rig, mode, captured) for rig in rigs]
        what = f"{mode}, {'captured' if captured else 'eager'}"
        assert rigs[0].pages == rigs[1].pages, "the arms differ before any translation"
        for kind in [each.kind for each in rigs[0].pool.geometry.pools]:
            reads = [granted(rig, one, kind) for rig, one in zip(rigs, metadata, strict=True)]
            assert reads[0] == reads[1], f"{what}: {kind} reads"
            assert len(reads[0]) == metadata[0].seq_lens.numel()
            written = [
                virtual_rows(rig, kind, one.write_ids_of(kind).tensor) for rig, one in zip(rigs, metadata, strict=True)
            ]
            assert written[0] == written[1], f"{what}: {kind} writes"
        one, other = (tensors(each) for each in metadata)
        assert one.keys() - {"fused_write_ids."} == other.keys() - {"fused_write_ids."}
        for name in one.keys() & other.keys():
            assert (one[name].shape, one[name].dtype) == (other[name].shape, other[name].dtype), f"{what}: {name}"
            if name in TABLES:
                live = -(-metadata[0].seq_lens // page_size)
                past = torch.arange(one[name].shape[1]) >= live[:, None]
                if not captured or backend.startswith("trtllm"):  # elsewhere a captured tail is stale
                    assert torch.equal(one[name][past], other[name][past]), f"{what}: the tail of {name}"
            elif name not in TRANSLATED:
                assert torch.equal(one[name], other[name]), f"{what}: {name}"
