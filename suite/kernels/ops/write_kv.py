"""New K and V rows -> a layer's views, one launch for both.

The two views share one id space, so each token's id is read once. Padding tokens all carry id 0: they
race for the sink row, which nobody reads.

Into fp8 rows (e4m3fn) goes the row divided by its tensor's scale, rounded to nearest and held within +-448: past
that the format has only NaN. Rows that are fp8 already are stored as they are.
"""

import torch
import triton
import triton.language as tl

from suite.errors import InputError
from suite.kernels.geometry import FP8

FP8_MAX = 448.0


def write_kv(
    k_view: torch.Tensor,
    v_view: torch.Tensor | None,
    kernel_ids: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store k, v [tokens, kv_heads, head_dim] at rows `kernel_ids` [tokens] of the views.

    Views are [rows, kv_heads, head_dim]; they, k and v may stride over their first dimension. v_view and v are
    None for latent rows. The scales are of fp8 views. Raises InputError for shapes or dtypes that differ from the
    view's. On CUDA one launch and no synchronisation.
    """
    for name, view, new in (("k", k_view, k), ("v", v_view, v)):
        _check(name, view, new, kernel_ids.numel())
    if k_view.is_cuda:
        write_kv_triton(k_view, v_view, kernel_ids, k, v, k_scale, v_scale)
    else:
        write_kv_torch(k_view, v_view, kernel_ids, k, v, k_scale, v_scale)


def write_kv_torch(
    k_view: torch.Tensor,
    v_view: torch.Tensor | None,
    kernel_ids: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The same in plain torch, for CPU tensors and for tests."""
    _store(k_view, kernel_ids, k, k_scale)
    if v_view is not None and v is not None:
        _store(v_view, kernel_ids, v, v_scale)


def _store(view: torch.Tensor, kernel_ids: torch.Tensor, new: torch.Tensor, scale: float) -> None:
    if view.dtype is FP8 and new.dtype is not FP8:
        new = (new.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    if view.dtype.itemsize == 1:  # torch has no index copy of fp8, only of bytes
        view, new = view.view(torch.uint8), new.view(torch.uint8)
    view.index_copy_(0, kernel_ids.long(), new)


def write_kv_triton(
    k_view: torch.Tensor,
    v_view: torch.Tensor | None,
    kernel_ids: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The same as one Triton launch."""
    k_width, v_width = k_view[0].numel(), 0 if v_view is None else v_view[0].numel()
    if (tokens := kernel_ids.numel()) == 0:
        return
    _write_kv_kernel[(tokens,)](
        k_view,
        k_view.stride(0),
        v_view,
        0 if v_view is None else v_view.stride(0),
        kernel_ids,
        k,
        k.stride(0),
        v,
        0 if v is None else v.stride(0),
        k_scale,
        v_scale,
        SCALED=k_view.dtype is FP8 and k.dtype is not FP8,
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        BLOCK=triton.next_power_of_2(max(k_width, v_width)),
    )


@triton.jit
def _write_kv_kernel(
    k_view,
    k_view_stride,
    v_view,
    v_view_stride,
    kernel_ids,
    k,
    k_stride,
    v,
    v_stride,
    k_scale,
    v_scale,
    SCALED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(kernel_ids + token).to(tl.int64)  # row * stride passes 2^31 in a large pool
    at = tl.arange(0, BLOCK)
    new_k = tl.load(k + token * k_stride + at, mask=at < K_WIDTH)
    if SCALED:
        new_k = tl.clamp(tl.div_rn(new_k.to(tl.float32), k_scale), -448.0, 448.0).to(k_view.dtype.element_ty)
    tl.store(k_view + row * k_view_stride + at, new_k, mask=at < K_WIDTH)
    if V_WIDTH > 0:
        new_v = tl.load(v + token * v_stride + at, mask=at < V_WIDTH)
        if SCALED:
            new_v = tl.clamp(tl.div_rn(new_v.to(tl.float32), v_scale), -448.0, 448.0).to(v_view.dtype.element_ty)
        tl.store(v_view + row * v_view_stride + at, new_v, mask=at < V_WIDTH)


def _check(name: str, view: torch.Tensor | None, new: torch.Tensor | None, tokens: int) -> None:
    if view is None or new is None:
        if (view is None) != (new is None) or name == "k":
            raise InputError(
                name, "a tensor" if new is not None else None, "rows for every view, and a view for all rows"
            )
        return
    if not view[:1].is_contiguous():
        raise InputError(f"{name}_view", view.stride(), "contiguous heads and elements")
    if new.shape != (tokens, *view.shape[1:]):
        raise InputError(name, tuple(new.shape), f"({tokens}, {', '.join(map(str, view.shape[1:]))})")
    if new.dtype != view.dtype and not (view.dtype is FP8 and new.is_floating_point()):
        raise InputError(f"{name}.dtype", new.dtype, f"{view.dtype}, as the pool")
    if not new[:1].is_contiguous():
        raise InputError(f"{name}.stride", new.stride(), "contiguous heads and elements")
