"""The index side of every backend: what metadata grants, captured buffers, and metadata that does not fit."""

import dataclasses

import pytest
import torch

from suite.errors import InputError, InvariantError
from suite.kernels.attention.base import CsrMetadata, Metadata
from suite.kernels.attention.reference import execute, rows_of
from suite.kernels.ids import KVKind
from tests.attention_rig import Rig

PAIRS = [
    ("reference", "reference"),
    ("triton", "interpreter"),
    ("fa3", "reference"),
    ("fa4", "reference"),
    ("flashinfer", "reference"),
]
BACKENDS = pytest.mark.parametrize(("backend", "launcher"), PAIRS, ids=[name for name, _ in PAIRS])
MODES = pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])


def tensors(metadata: Metadata) -> dict[str, torch.Tensor]:
    """Every tensor of the metadata, by name."""
    found = {}
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        inner = {"": value} if isinstance(value, torch.Tensor) else getattr(value, "__dict__", {})
        if hasattr(value, "kind"):
            inner = {"ids": value.tensor}
        found |= {f"{field.name}.{name}": one for name, one in inner.items() if isinstance(one, torch.Tensor)}
    return found


@BACKENDS
@MODES
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_oracle_executes_any_metadata(backend, launcher, mode, page_size):
    rig = Rig(mode, backend, launcher, page_size)
    rig.step({3: 20, 1: 16, 2: 31})
    rig.release(3)
    rig.move()
    for work in ({1: 5, 2: 1}, {2: 1, 1: 1}):
        step = rig.step(work, evict=False)
        for layer in rig.layers:
            step.out[layer.index] = execute(step.metadata, layer, step.q[layer.index], rig.pool)
        step.assert_earned()
        rig.evict(work)


@BACKENDS
@MODES
@pytest.mark.parametrize("work", [{1: 3, 2: 1}, {1: 1, 2: 1}], ids=["extend", "decode"])
def test_nothing_but_granted_rows_is_read(backend, launcher, mode, work):
    rig = Rig(mode, backend, launcher)
    rig.step({1: 17, 2: 40, 3: 9})
    step = rig.step(work, evict=False)
    for layer in rig.layers:
        granted = torch.zeros(rig.pool.k_view(layer.index).shape[0], dtype=torch.bool)
        for request, (seq_len, new) in enumerate((rig.lengths[row], new) for row, new in work.items()):
            first = 0 if layer.window is None else max(0, seq_len - new - layer.window + 1)
            granted[rows_of(step.metadata, layer.kind, request, first, seq_len)] = True
        views = rig.pool.k_view(layer.index), rig.pool.v_view(layer.index)
        saved = [view.clone() for view in views]
        for view in views:  # on the unified pool they overlap: one's spare rows are the other's, or another layer's
            view.fill_(torch.nan)
        for view, mine in zip(views, saved, strict=True):
            view[granted] = mine[granted]
        q = step.q[layer.index]
        ids = step.metadata.write_ids_of(layer.kind).tensor
        out = rig.attention.forward(layer, q, saved[0][ids], saved[1][ids], step.metadata)
        assert torch.equal(out, step.out[layer.index])
        for view, mine in zip(views, saved, strict=True):
            view.copy_(mine)


@BACKENDS
@MODES
def test_captured_equals_eager_in_buffers_that_stay(backend, launcher, mode):
    rig = Rig(mode, backend, launcher)
    eager = Rig(mode, backend, launcher)
    rig.attention.capture(4)
    for one in (rig, eager):
        one.step({1: 13, 2: 40, 3: 8, 4: 22})
    addresses = {}
    for work in ({1: 1, 2: 1, 3: 1, 4: 1}, {2: 1, 1: 1, 3: 1}, {3: 1, 1: 1}, {1: 1, 2: 1, 3: 1}):
        step = rig.step(work, pad_to=4 if len(work) > 2 else 2, replay=True)
        expected = eager.step(work, pad_to=4 if len(work) > 2 else 2)
        step.assert_earned()
        for layer in step.out:
            assert torch.equal(step.out[layer], expected.out[layer]), f"layer {layer}"
        known = addresses.setdefault(step.batch.size, tensors(step.metadata))
        for name, now in tensors(step.metadata).items():
            assert now.data_ptr() == known[name].data_ptr(), f"{name} was rebound"
            assert now.shape == known[name].shape, f"{name} changed its shape"
        for one in (rig, eager):
            if 4 in work:
                one.release(4)
            one.move()


@BACKENDS
def test_a_stale_tail_is_not_read(backend, launcher):
    rig = Rig("unified", backend, launcher)
    rig.attention.capture(3)
    rig.step({1: 13, 2: 60, 3: 50})
    rig.step({2: 1, 3: 1, 1: 1}, replay=True)
    rig.release(3)  # its pages are poisoned, and the captured tables still name them
    rig.release(2)
    rig.step({2: 3})
    step = rig.step({1: 1, 2: 1}, replay=True, pad_to=3)
    step.assert_earned()
    assert not step.metadata.write_ids.tensor[2:].any()


def test_a_smaller_batch_leaves_no_write_ids_behind():
    rig = Rig("unified", "fa3")
    rig.attention.capture(3)
    rig.step({1: 4, 2: 5, 3: 6})
    large = rig.step({1: 1, 2: 1, 3: 1}, replay=True).metadata
    assert large.write_ids.tensor.all()
    rig.step({1: 1}, replay=True)
    for ids in (large.write_ids.tensor, large.window_write_ids.tensor):
        assert ids[0] > 0
        assert not ids[1:].any()


def test_streams_hold_exactly_what_a_request_may_see():
    rig = Rig("unified", "reference", window=10)
    rig.step({1: 30, 2: 4})
    metadata = rig.attention.plan(rig.batch({1: 3, 2: 1}))
    assert isinstance(metadata, CsrMetadata)
    assert metadata.full.starts.tolist() == [0, 0]
    assert metadata.full.indptr.tolist() == [0, 33, 38]
    assert metadata.window.starts.tolist() == [21, 0]  # position 30 sees 21 to 30
    assert metadata.window.indptr.tolist() == [0, 12, 17]
    for stream in (metadata.full, metadata.window):
        assert stream.indices.dtype == torch.int32
        assert stream.indices.numel() == stream.indptr[-1]
        assert (stream.indices >= rig.page_size).all(), "a visible position lies in the sink"


def test_fa3_takes_the_translators_table_as_it_is():
    for mode in ("static", "unified", "unified_token_major"):
        rig = Rig(mode, "fa3")
        rig.step({1: 13, 2: 21})
        batch = rig.batch({2: 1, 1: 1})
        metadata, table = rig.attention.plan(batch), rig.translator.index_table_for_batch(batch)
        assert metadata.window_page_table is table.window.ids
        assert (metadata.page_table is table.full.ids) is (mode != "static")
        assert metadata.page_table.shape == (2, 6)
        assert metadata.page_table.dtype == torch.int32


def test_the_oracle_names_metadata_that_falls_short():
    rig = Rig("static", "reference")
    rig.step({1: 20})
    metadata = rig.attention.plan(rig.batch({1: 1}))
    short = dataclasses.replace(metadata.full, indptr=torch.tensor([0, 20], dtype=torch.int32))
    layer, q = rig.layers[0], rig.randn(1, 4)
    with pytest.raises(InvariantError, match=r"stream \[0, 20\) does not hold \[0, 21\)"):
        execute(dataclasses.replace(metadata, full=short), layer, q, rig.pool)
    fa3 = Rig("static", "fa3")
    fa3.step({1: 20})
    table = fa3.attention.plan(fa3.batch({1: 1}))
    with pytest.raises(InvariantError, match="5 columns \\* page size 4 < 21 tokens"):
        execute(dataclasses.replace(table, page_table=table.page_table[:, :5]), layer, q, fa3.pool)
    with pytest.raises(TypeError, match="no window indices"):
        execute(dataclasses.replace(metadata, window=None), rig.layers[1], q, rig.pool)
    bare = Metadata(**{field.name: getattr(metadata, field.name) for field in dataclasses.fields(Metadata)})
    with pytest.raises(TypeError, match="known index layout, got Metadata"):
        rows_of(bare, KVKind.FULL, 0, 0, 1)


@BACKENDS
def test_captures_refuse_what_they_cannot_hold(backend, launcher):
    rig = Rig("static", backend, launcher)
    rig.step({1: 3, 2: 3, 3: 3})
    with pytest.raises(InvariantError, match=f"{backend}: replay before capture"):
        rig.attention.replay(rig.batch({1: 1}))
    with pytest.raises(InputError, match="max_batch: got 0"):
        rig.attention.capture(0)
    rig.attention.capture(2)
    with pytest.raises(InputError, match=r"batch\.mode: got 'extend'"):
        rig.attention.replay(rig.batch({1: 2}))
    with pytest.raises(InputError, match=r"batch\.size: got 3, expected at most 2"):
        rig.attention.replay(rig.batch({1: 1, 2: 1, 3: 1}))
