"""Rows past 2^31 elements: where a row offset in int32 wraps around and reads somebody else's."""

import torch

from suite.kernels.ops.decode_attention import decode_attention
from suite.kernels.ops.extend_attention import extend_attention
from suite.kernels.ops.write_kv import write_kv_triton
from tests.attention_rig import dense, plain_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = (8, 128)


def test_every_kernel_addresses_a_large_pool():
    rows = 2**31 // 1024 + 64
    # on a CPU only the pages of the rows below are ever touched; one view serves as K and V
    view = torch.empty(rows, *WIDTH, dtype=torch.float16, device=DEVICE)
    assert view.numel() > 2**31
    ids = torch.tensor([rows - 1, rows - 40, 7, rows - 3], device=DEVICE)
    kv = torch.randn(4, *WIDTH, device=DEVICE).half()
    write_kv_triton(view, view, ids, kv, kv)
    assert torch.equal(view[ids], kv)

    layer = plain_layer(q_heads=8, kv_heads=8, head_dim=128)
    q = torch.randn(2, *WIDTH, device=DEVICE).half()
    exact = dense(q, kv, kv, layer, torch.float64)
    allowed = 2 * (dense(q, kv, kv, layer, torch.float16) - exact).abs().max() + torch.finfo(q.dtype).eps
    indptr, indices = torch.tensor([0, 4], device=DEVICE).int(), ids.int()
    for splits in (1, 2):
        out = decode_attention(q[1:], view, view, indptr, indices, layer.scale, None, splits)
        assert (out - exact[1:]).abs().max() <= allowed
    lens, start = torch.tensor([4], device=DEVICE).int(), torch.tensor([0], device=DEVICE).int()
    cu_query_lens = torch.tensor([0, 2], device=DEVICE).int()
    out = extend_attention(
        q, view, view, cu_query_lens, lens, start, indptr, indices, layer.scale, None, None, max_query_len=2
    )
    assert (out - exact).abs().max() <= allowed
