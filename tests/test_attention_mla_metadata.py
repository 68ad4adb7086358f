"""The index side of the MLA backends: what metadata grants, tables, tails, fp8 ids."""

import pytest
import torch

from suite.errors import InputError, InvariantError
from suite.kernels.attention.reference import rows_of
from suite.kernels.attention.trtllm_mla import table_width
from suite.kernels.ids import KVKind
from tests.mla_rig import LatentRig, absorbed
from tests.test_attention_mla import ALL_MODES, BACKENDS, CASES, ORACLE, rig_of


@BACKENDS
@ALL_MODES
@pytest.mark.parametrize("work", [{1: 3, 2: 1}, {1: 1, 2: 1}], ids=["extend", "decode"])
def test_nothing_but_granted_rows_is_read(backend, launcher, page_size, mode, work):
    rig = rig_of(mode, backend, launcher, page_size)
    rig.step({1: 17, 2: page_size, 3: 9})
    step = rig.step(work)
    layer = rig.layers[1]
    view = rig.pool.k_view(layer.index)
    granted = torch.zeros(view.shape[0], dtype=torch.bool)
    for request, row in enumerate(work):
        granted[rows_of(step.metadata, KVKind.FULL, request, 0, rig.lengths[row])] = True
    saved = view.clone()
    view.fill_(torch.nan)  # on the page-major pool these are the other layers' rows as well
    view[granted] = saved[granted]
    out = rig.attention.forward(layer, step.q[layer.index], saved[step.metadata.write_ids.tensor], None, step.metadata)
    assert torch.equal(out, step.out[layer.index])


@BACKENDS
def test_a_stale_tail_is_not_read(backend, launcher, page_size):
    rig = rig_of("unified", backend, launcher, page_size, depth=1)
    rig.attention.capture(3)
    rig.step({1: 13, 2: 60, 3: 50})
    rig.step({2: 1, 3: 1, 1: 1}, replay=True)
    rig.release(3)  # its pages are poisoned, and the captured buffers still name them
    rig.release(2)
    rig.step({2: 3})
    step = rig.step({1: 1, 2: 1}, replay=True, pad_to=3)
    step.assert_earned()
    assert not step.metadata.write_ids.tensor[2:].any()


@pytest.mark.parametrize("backend", [name for name in dict.fromkeys(case[0] for case in CASES) if name != ORACLE])
def test_captures_refuse_what_they_cannot_hold(backend):
    rig = LatentRig("static", backend, ORACLE, 64, context=128)
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


@pytest.mark.parametrize("page_size", [32, 64])
@ALL_MODES
def test_trtllm_tables_have_their_own_width_and_tail(page_size, mode):
    rig = LatentRig(mode, "trtllm_mla", ORACLE, page_size, context=4200)
    step = 4096 // page_size  # lcm(128 / 32, 4096 / 32) = 128 blocks, lcm(128 / 64, 4096 / 64) = 64
    assert [table_width(tokens, page_size) // step for tokens in (1, 4096, 4097)] == [1, 1, 2]
    rig.attention.capture(3)
    rig.step({1: 3 * page_size + 1, 2: page_size - 1})
    for captured in (False, True):
        make = rig.attention.replay if captured else rig.attention.plan
        for work in ({1: 1, 2: 1}, {2: 1, 1: 1}):  # the shorter request takes the longer one's row
            batch = rig.batch(work)
            table = make(batch).page_table
            assert table.dtype == torch.int32
            assert table.shape == (2, 2 * step if captured else step)
            for request, row in enumerate(work):
                live = -(-rig.lengths[row] // page_size)
                assert (table[request, :live] > 0).all()
                assert (table[request, live:] == -1).all(), "a fill that went past its prefix"


@ALL_MODES
def test_the_fused_fp8_write_loc(mode):
    rig = LatentRig(mode, "trtllm_mla", ORACLE, 32, depth=1)
    fused = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        rig = LatentRig(mode, "trtllm_mla", ORACLE, 32, depth=1, dtype=dtype, poison=False)
        rig.attention.capture(3)
        for name, make in (("eager", rig.attention.plan), ("captured", rig.attention.replay)):
            metadata = make(rig.batch({1: 1, 2: 1}))
            fused[dtype, name] = metadata.fused_write_ids, metadata.write_ids.tensor
        if dtype is torch.float8_e4m3fn:
            assert fused[dtype, "captured"][0].data_ptr() == rig.attention.captured.write_ids.data_ptr()
    assert fused[torch.bfloat16, "eager"][0] is fused[torch.bfloat16, "captured"][0] is None
    ids, written = fused[torch.float8_e4m3fn, "eager"]
    assert ids is (written if mode == "static" else None)


def test_a_fused_write_stores_what_an_unfused_one_does():
    rig = LatentRig("unified", "trtllm_mla", ORACLE, 32, depth=1, dtype=torch.float8_e4m3fn, poison=False)
    rig.attention.capture(2)
    metadata = rig.attention.replay(rig.batch({1: 1, 2: 1}))
    rows = torch.randn(2, 1, rig.head_dim).bfloat16()
    rig.attention._write(rig.layers[0], rows, None, metadata)
    view = rig.pool.latent_view(0).view(torch.uint8)
    assert torch.equal(view[metadata.fused_write_ids], rows[:, 0].to(torch.float8_e4m3fn).view(torch.uint8))
    view[metadata.fused_write_ids] = 0
    assert not view.any(), "rows that were written elsewhere"


@ALL_MODES
def test_an_fp8_pool_is_served(mode):
    """Both ways of writing: the rows attend as their fp8 casts would in a pool of fp32."""
    rig = LatentRig(mode, "trtllm_mla", ORACLE, 32, depth=2, dtype=torch.float8_e4m3fn, poison=False)
    rig.attention.capture(2)
    layer = rig.layers[1]
    for work, make in (({1: 40, 2: 3}, rig.attention.plan), ({2: 1, 1: 1}, rig.attention.replay)):
        batch = rig.batch(work)
        q, k = (torch.randn(sum(work.values()), heads, rig.head_dim).bfloat16() for heads in (rig.q_heads, 1))
        out = rig.attention.forward(layer, q, k, None, make(batch))
        assert out.dtype == torch.bfloat16
        at = 0
        for row, new in work.items():
            mine = slice(at, at + new)
            at += new
            cast = torch.cat([rig.memory[1, row].float(), k[mine, 0].to(torch.float8_e4m3fn).float()])
            rig.memory[1, row] = cast
            exact, rough = (absorbed(q[mine], cast, layer, dtype) for dtype in (torch.float64, torch.bfloat16))
            floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
            assert (out[mine] - exact).abs().max() <= 2 * (rough - exact).abs().max() + floor
