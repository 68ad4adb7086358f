"""The fused K and V store: kernel (interpreted) and twin, strided tokens, and shapes that do not belong."""

import pytest
import torch

from suite.errors import InputError
from suite.kernels.ops.write_kv import write_kv, write_kv_torch, write_kv_triton


def views(dtype=torch.float32, rows=9, heads=2, dim=12):
    """NaN everywhere, so that a row written too much or too little shows."""
    return [torch.full((rows, heads, dim), torch.nan, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("store", [write_kv, write_kv_torch, write_kv_triton])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_stores_exactly_its_rows(store, dtype, index_dtype):
    k_view, v_view = views(dtype)
    packed = torch.randn(3, 8, 12).to(dtype)  # q, k and v of one projection: tokens are strided
    k, v = packed[:, 4:6], packed[:, 6:]
    ids = torch.tensor([7, 1, 4], dtype=index_dtype)
    store(k_view, v_view, ids, k, v)
    assert torch.equal(k_view[ids], k)
    assert torch.equal(v_view[ids], v)
    others = [0, 2, 3, 5, 6, 8]
    assert k_view[others].isnan().all()
    assert v_view[others].isnan().all()


@pytest.mark.parametrize("store", [write_kv, write_kv_torch, write_kv_triton])
def test_rows_of_k_and_v_may_differ_in_width(store):
    k_view, v_view = torch.zeros(5, 2, 12), torch.zeros(5, 2, 4)
    k, v = torch.randn(2, 2, 12), torch.randn(2, 2, 4)
    store(k_view, v_view, torch.tensor([4, 2]), k, v)
    assert torch.equal(k_view[[4, 2]], k)
    assert torch.equal(v_view[[4, 2]], v)
    assert not v_view[[0, 1, 3]].any()


@pytest.mark.parametrize("store", [write_kv, write_kv_torch, write_kv_triton])
def test_no_tokens_write_nothing(store):
    k_view, v_view = views()
    store(k_view, v_view, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 12), torch.empty(0, 2, 12))
    assert k_view.isnan().all()
    assert v_view.isnan().all()


def test_bad_input_is_named():
    k_view, v_view = views()
    ids, k = torch.tensor([1, 2]), torch.zeros(2, 2, 12)
    with pytest.raises(InputError, match=r"v: got \(1, 2, 12\), expected \(2, 2, 12\)"):
        write_kv(k_view, v_view, ids, k, k[:1])
    with pytest.raises(InputError, match=r"k.dtype: got torch.bfloat16, expected torch.float32"):
        write_kv(k_view, v_view, ids, k.bfloat16(), k)
    with pytest.raises(InputError, match="k_view: got"):
        write_kv(k_view[:, :, ::2], v_view, ids, k[:, :, ::2].contiguous(), k)
    with pytest.raises(InputError, match=r"v.stride: got"):
        write_kv(k_view, v_view, ids, k, torch.zeros(2, 12, 2).transpose(1, 2))
