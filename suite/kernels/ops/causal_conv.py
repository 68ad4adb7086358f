"""Depthwise causal convolution with state, then SiLU: one kernel for decode, prefill and verify.

Every output needs its own input and those of its ancestors. Going back from a token, the next ancestor is the
token before it, or with a draft tree its parent; past the first token of the batch the ancestors are in the
request's window of earlier *inputs*, newest last. A window is [dim, width] or [width, dim]: two strides.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from suite.errors import InputError
from suite.kernels.ops.interpreter import INTERPRETED

TOKENS_PER_PROGRAM = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvBatch:
    """Whose tokens are whose. cu_query_lens: int32 [batch + 1]; slots: [batch], the row of each request's window
    in what is read, negative: skipped, its outputs are 0. parents: int32 [batch, draft_tokens] or None."""

    cu_query_lens: torch.Tensor
    max_query_len: int
    slots: torch.Tensor
    parents: torch.Tensor | None = None


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    batch: ConvBatch,
    *,
    taps_first: bool,
    out_windows: torch.Tensor,
    out_rows: torch.Tensor,
    every_token: bool,
) -> torch.Tensor:
    """Convolve x [tokens, dim] with weight [dim, width + 1]; returns x's shape and dtype.

    windows: [slots, dim, width], with taps_first [slots, width, dim]; only rows `batch.slots` are read. The window
    after a request's last token goes to `out_windows[out_rows[r]]`, or with every_token the one after its token j
    to `out_windows[out_rows[r], j]`. For one token per request out_windows may be windows itself. Raises
    InputError for shapes that do not fit. On CUDA one launch and no synchronisation.
    """
    width = weight.shape[1] - 1
    shape = (width, x.shape[1]) if taps_first else (x.shape[1], width)
    if windows.shape[1:] != shape or out_windows.shape[-2:] != shape:
        raise InputError("windows", (tuple(windows.shape), tuple(out_windows.shape)), f"rows of {shape}")
    convolve = causal_conv_triton if x.is_cuda else causal_conv_torch
    return convolve(
        x,
        weight,
        windows,
        batch,
        taps_first=taps_first,
        out_windows=out_windows,
        out_rows=out_rows,
        every_token=every_token,
    )


def causal_conv_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    batch: ConvBatch,
    *,
    taps_first: bool,
    out_windows: torch.Tensor,
    out_rows: torch.Tensor,
    every_token: bool,
) -> torch.Tensor:
    """The same in plain torch, for CPU tensors and for tests."""
    width, out = weight.shape[1] - 1, torch.zeros_like(x)
    bounds = batch.cu_query_lens.tolist()
    for request, slot in enumerate(batch.slots.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        if slot < 0 or begin == end:
            continue
        window = windows[slot] if taps_first else windows[slot].T
        history = torch.cat([window.to(x.dtype), x[begin:end]])  # [width + tokens, dim]
        back = _ancestors(end - begin, width, None if batch.parents is None else batch.parents[request].tolist())
        taps = history[back.to(x.device)]  # [tokens, width + 1, dim], oldest first
        mixed = (taps.float() * weight.float().T).sum(1)
        out[begin:end] = (mixed * mixed.sigmoid()).to(x.dtype)
        after = taps[:, 1:].to(windows.dtype)
        after = after if taps_first else after.transpose(1, 2)
        if every_token:
            out_windows[int(out_rows[request]), : end - begin] = after
        else:
            out_windows[int(out_rows[request])] = after[-1]
    return out


def _ancestors(tokens: int, width: int, parents: list[int] | None) -> torch.Tensor:
    """[tokens, width + 1] indices into window + tokens: the token itself last, its ancestors before it."""
    rows = []
    for token in range(tokens):
        at, row = token, [token + width]
        for _ in range(width):
            at = at - 1 if at < 0 or parents is None else parents[at]
            row.insert(0, at + width)
        rows.append(row)
    return torch.tensor(rows)


def causal_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    batch: ConvBatch,
    *,
    taps_first: bool,
    out_windows: torch.Tensor,
    out_rows: torch.Tensor,
    every_token: bool,
) -> torch.Tensor:
    """The same as one Triton launch."""
    dim, width = x.shape[1], weight.shape[1] - 1
    x = x if x.stride(1) == 1 else x.contiguous()
    # the interpreter truncates fp32 to bf16, torch rounds
    out = torch.empty(x.shape, dtype=torch.float32 if INTERPRETED else x.dtype, device=x.device)
    block_t = min(TOKENS_PER_PROGRAM, triton.next_power_of_2(batch.max_query_len))
    block_d = min(2048 if INTERPRETED else 128, triton.next_power_of_2(dim))
    window_strides = windows.stride()
    _causal_conv_kernel[(triton.cdiv(batch.max_query_len, block_t), triton.cdiv(dim, block_d), batch.slots.numel())](
        x,
        x.stride(0),
        weight,
        windows,
        window_strides[0],
        batch.cu_query_lens,
        batch.slots,
        batch.parents,
        0 if batch.parents is None else batch.parents.stride(0),
        out,
        out_windows,
        out_windows.stride(0),
        out_windows.stride(1) if every_token else 0,
        out_rows,
        dim,
        CHANNEL_STRIDE=window_strides[2] if taps_first else window_strides[1],
        TAP_STRIDE=window_strides[1] if taps_first else window_strides[2],
        WIDTH=width,
        EVERY_TOKEN=every_token,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out.to(x.dtype)


@triton.jit
def _causal_conv_kernel(
    x,
    x_stride,
    weight,
    windows,
    window_stride,
    cu_query_lens,
    slots,
    parents,
    parents_stride,
    out,
    out_windows,
    out_row_stride,
    out_token_stride,
    out_rows,
    dim,
    CHANNEL_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(2)
    begin = tl.load(cu_query_lens + request).to(tl.int64)
    length = (tl.load(cu_query_lens + request + 1).to(tl.int64) - begin).to(tl.int32)
    first = tl.program_id(0) * BLOCK_T
    if first >= length:
        return
    token = first + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = (token < length)[:, None] & (channel < dim)[None, :]
    at_out = (begin + token)[:, None] * dim + channel[None, :]
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:
        tl.store(out + at_out, tl.zeros([BLOCK_T, BLOCK_D], out.dtype.element_ty), mask=real)
        return
    window = windows + slot * window_stride + channel * CHANNEL_STRIDE
    row = tl.load(out_rows + request).to(tl.int64)
    after = out_windows + row * out_row_stride + (token * out_token_stride)[:, None] + channel[None, :] * CHANNEL_STRIDE
    kept = real
    if not EVERY_TOKEN:
        kept = real & (token == length - 1)[:, None]

    mixed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for tap in tl.static_range(WIDTH + 1):
        at = token
        for _ in tl.static_range(WIDTH - tap):
            if parents is not None:
                inside = (at >= 0) & (token < length)
                parent = tl.load(parents + request * parents_stride + at, mask=inside, other=-1)
                at = tl.where(at >= 0, parent, at - 1)
            else:
                at = at - 1
        inside = at >= 0
        new = tl.load(x + (begin + at)[:, None] * x_stride + channel[None, :], mask=real & inside[:, None], other=0.0)
        # at = -1 is the newest input of the window
        held = tl.load(window[None, :] + (at + WIDTH)[:, None] * TAP_STRIDE, mask=real & (at < 0)[:, None], other=0.0)
        value = tl.where(inside[:, None], new.to(tl.float32), held.to(tl.float32))
        scale = tl.load(weight + channel * (WIDTH + 1) + tap, mask=channel < dim, other=0.0)
        mixed += value * scale.to(tl.float32)[None, :]
        if tap > 0:
            # oldest first: where window and out_windows are one, a tap is overwritten once everybody has read it
            tl.debug_barrier()
            tl.store(after + (tap - 1) * TAP_STRIDE, value.to(out_windows.dtype.element_ty), mask=kept)
    result = mixed / (1.0 + tl.exp(-mixed))
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=real)
