"""Rows of recurrent state from one place to another: gather, scatter, snapshot and commit are all this copy.

A row is one slot's state of one layer, dense in itself; layers and rows may stride. A negative row number on
either side skips the pair: freed slots translate to -1, and a write there would land on the last slot.
"""

import torch
import triton
import triton.language as tl

from suite.errors import InputError

BLOCK = 4096


def copy_rows(target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor) -> None:
    """`target[l, target_rows[i]] = source[l, source_rows[i]]` for every layer l and pair i.

    target, source: [layers, rows, width] of one dtype, elements of a row dense. target_rows, source_rows: integers
    [pairs]; pairs with a negative member are skipped. Rows read must not be written. Raises InputError for shapes,
    strides or dtypes that do not fit. On CUDA one launch and no synchronisation.
    """
    _check(target, target_rows, source, source_rows)
    if target.is_cuda:
        copy_rows_triton(target, target_rows, source, source_rows)
    else:
        copy_rows_torch(target, target_rows, source, source_rows)


def gather_rows(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Contiguous copies of `source[rows]`, [pairs, ...]; zeros for a negative row, whatever the source holds.

    source: [rows, ...] with dense rows.
    """
    out = torch.zeros(rows.numel(), *source.shape[1:], dtype=source.dtype, device=source.device)
    copy_rows(_flat(out), torch.arange(rows.numel(), device=rows.device), _flat(source), rows)
    return out


def scatter_rows(target: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
    """`target[rows[i]] = new[i]`, negative rows skipped. target: [rows, ...] with dense rows, new: [pairs, ...]."""
    copy_rows(_flat(target), rows, _flat(new), torch.arange(rows.numel(), device=rows.device))


def copy_rows_torch(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """The same in plain torch, for CPU tensors and for tests."""
    kept = (target_rows >= 0) & (source_rows >= 0)
    target[:, target_rows[kept].long()] = source[:, source_rows[kept].long()]


def copy_rows_triton(
    target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor
) -> None:
    """The same as one Triton launch."""
    layers, _, width = target.shape
    if (pairs := target_rows.numel()) == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    _copy_rows_kernel[(triton.cdiv(width, block), pairs, layers)](
        target,
        target.stride(0),
        target.stride(1),
        target_rows,
        source,
        source.stride(0),
        source.stride(1),
        source_rows,
        width,
        BLOCK=block,
    )


@triton.jit
def _copy_rows_kernel(
    target,
    target_layer_stride,
    target_row_stride,
    target_rows,
    source,
    source_layer_stride,
    source_row_stride,
    source_rows,
    width,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    to_row = tl.load(target_rows + pair).to(tl.int64)
    from_row = tl.load(source_rows + pair).to(tl.int64)
    if (to_row < 0) | (from_row < 0):
        return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(source + layer * source_layer_stride + from_row * source_row_stride + at, mask=inside)
    tl.store(target + layer * target_layer_stride + to_row * target_row_stride + at, values, mask=inside)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """[rows, ...] -> [1, rows, width]; never a copy."""
    return rows.view(rows.shape[0], -1)[None]


def _check(target: torch.Tensor, target_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor) -> None:
    if target.ndim != 3 or source.ndim != 3:
        raise InputError("rows", (target.ndim, source.ndim), "target and source of 3 dims: [layers, rows, width]")
    for name, tensor in (("target", target), ("source", source)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise InputError(f"{name}.stride", tensor.stride(), "dense rows")
    for field in ("layers", "width"):
        axis = 0 if field == "layers" else 2
        if target.shape[axis] != source.shape[axis]:
            raise InputError(field, source.shape[axis], f"{target.shape[axis]}, as the target")
    if target.dtype != source.dtype:
        raise InputError("dtype", source.dtype, f"{target.dtype}, as the target")
    if target_rows.shape != source_rows.shape or target_rows.ndim != 1:
        raise InputError("source_rows", tuple(source_rows.shape), f"{tuple(target_rows.shape)}, one per target row")
