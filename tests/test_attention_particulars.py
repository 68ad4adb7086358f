"""Particulars of the upstream design that users of it will look for, one test each."""

import pytest
import torch

from suite.kernels import translator as translator_module
from suite.kernels.batch import ForwardMode
from suite.kernels.ids import KVKind
from tests.attention_rig import Rig
from tests.test_attention_metadata import MODES, tensors

D = 3
MODE_OF = {1: ForwardMode.DECODE, D: ForwardMode.VERIFY}
NEWS = pytest.mark.parametrize("new", [1, D], ids=["decode", "verify"])


def rig_of(mode: str, backend: str) -> Rig:
    rig = Rig(mode, backend, page_size=16, window=20)
    rig.attention.capture(3, D)
    rig.step({1: 13, 2: 40, 3: 30})
    rig.release(3)
    rig.move()
    return rig


def forbid_translation(monkeypatch, rig: Rig) -> None:
    """From here on every door of the translator raises."""

    def closed(*_: object, **__: object) -> None:
        raise AssertionError("a translation inside the graph")

    doors = ("fill_read_table", "fill_read_stream", "build_index_table", "index_table_for_batch", "write_loc")
    for door in (*doors, "sliding_window_write_loc_for", "read_map"):
        monkeypatch.setattr(rig.translator, door, closed)


@MODES
@NEWS
@pytest.mark.parametrize("backend", ["fa3", "fa4", "trtllm_mha", "flashinfer", "triton"])
def test_a_captured_step_translates_nothing(monkeypatch, backend, mode, new):
    """Replay fills page tables, streams and window write ids; the step after it reads them and changes none."""
    rig = rig_of(mode, backend)
    batch = rig.batch({1: new, 2: new}, MODE_OF[new], pad_to=3)
    metadata = rig.attention.replay(batch)
    before = {name: tensor.clone() for name, tensor in tensors(metadata).items()}
    forbid_translation(monkeypatch, rig)
    for layer in rig.layers:
        q, k, v = (rig.randn(batch.input_ids.numel(), heads) for heads in (rig.q_heads, rig.kv_heads, rig.kv_heads))
        assert rig.attention.forward(layer, q, k, v, metadata).isfinite().all()
    for name, tensor in tensors(metadata).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("mode", ["unified", "unified_token_major"])
@NEWS
def test_fa3_takes_the_plans_table_eagerly_and_its_own_when_captured(mode, new):
    rig = rig_of(mode, "fa3")
    batch = rig.batch({1: new, 2: new}, MODE_OF[new])
    table = rig.translator.index_table_for_batch(batch)
    eager, captured = rig.attention.plan(batch), rig.attention.replay(batch)
    assert eager.page_table is table.full.ids
    assert eager.window_page_table is table.window.ids
    stable = rig.attention.captured.tables
    assert captured.page_table.data_ptr() == stable.full.data_ptr() != table.full.ids.data_ptr()
    assert captured.window_page_table.data_ptr() == stable.window.data_ptr()


@MODES
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_streams_come_from_the_index_table_by_its_entry_page_size(monkeypatch, backend, mode):
    """Translated once, into the table: what gathers it multiplies and adds, and never asks a page map."""
    rig = rig_of(mode, backend)
    batch = rig.batch({1: 1, 2: 1})
    table = rig.translator.index_table_for_batch(batch)
    seen, gather = [], translator_module.read_stream

    def read_stream(out, ids, row_ids, entry_page_size, *rest):
        seen.append((ids, entry_page_size))
        gather(out, ids, row_ids, entry_page_size, *rest)

    monkeypatch.setattr(translator_module, "read_stream", read_stream)
    monkeypatch.setattr(translator_module, "read_table", lambda *_: pytest.fail("translated again"))
    rig.attention.plan(batch)
    expected = [table.full, table.window]
    assert [size for _, size in seen] == [source.entry_page_size for source in expected]
    assert [size for _, size in seen] == ([1, 16] if mode == "static" else [16, 16])
    assert all(ids is source.ids for (ids, _), source in zip(seen, expected, strict=True))


@MODES
@NEWS
@pytest.mark.parametrize("backend", ["fa3", "fa4", "trtllm_mha", "flashinfer", "triton", "reference"])
def test_a_capture_batch_writes_to_the_sink_only(backend, mode, new):
    """What a graph is captured on: padding requests. Their window write ids are zeros, as all their ids are."""
    rig = Rig(mode, backend, page_size=16, window=20)
    rig.attention.capture(3, D)
    metadata = rig.attention.replay(rig.batch({}, MODE_OF[new], pad_to=3, draft_tokens=new))
    for kind in KVKind:
        ids = metadata.write_ids_of(kind).tensor
        assert ids.shape == (3 * new,)
        assert not ids.any()
    assert metadata.seq_lens.tolist() == [new] * 3
