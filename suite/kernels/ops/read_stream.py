"""A read source -> CSR stream of one batch, one launch.

`out[indptr[r] + i]` becomes the kernel id of position `starts[r] + i` of request r. The source is a page
table (`entry_page_size` tokens an entry) or `req_to_token` itself (1). A negative entry and a position
past the source's width read the sink page.
"""

import torch
import triton
import triton.language as tl

from suite.errors import InputError

PROGRAMS = 1024  # the grid follows the batch, not the lengths, so a captured launch stays cheap at short ones
BLOCK = 512


def read_stream(
    out: torch.Tensor,
    ids: torch.Tensor,
    row_ids: torch.Tensor,
    entry_page_size: int,
    starts: torch.Tensor,
    indptr: torch.Tensor,
    max_seq_len: int,
) -> None:
    """Fill `out[: indptr[-1]]` in place; on CUDA one launch and no synchronisation.

    out: [capacity] int32 or int64; a stream longer than it is cut, what lies past indptr[-1] is kept.
    ids: [rows, columns] entries. row_ids, starts: [batch]. indptr: [batch + 1], not decreasing.
    max_seq_len: bound of the streams' lengths known to the host; it sizes the grid and never the result.
    Raises InputError for shapes that do not belong together.
    """
    _check(out, ids, row_ids, entry_page_size, starts, indptr)
    if out.is_cuda:
        read_stream_triton(out, ids, row_ids, entry_page_size, starts, indptr, max_seq_len)
    else:
        read_stream_torch(out, ids, row_ids, entry_page_size, starts, indptr)


def read_stream_torch(
    out: torch.Tensor,
    ids: torch.Tensor,
    row_ids: torch.Tensor,
    entry_page_size: int,
    starts: torch.Tensor,
    indptr: torch.Tensor,
) -> None:
    """The same in plain torch, for CPU tensors and for tests."""
    total = min(int(indptr[-1]), out.numel())
    at = torch.arange(total, device=out.device)
    request = torch.searchsorted(indptr[1:].long(), at, right=True)
    position = at - indptr[request] + starts[request]
    column = position // entry_page_size
    inside = column < ids.shape[1]
    entry = ids[row_ids[request], torch.where(inside, column, 0)].long()
    entry = torch.where(inside, entry.clamp(min=0), 0)
    out[:total] = (entry * entry_page_size + position % entry_page_size).to(out.dtype)


def read_stream_triton(
    out: torch.Tensor,
    ids: torch.Tensor,
    row_ids: torch.Tensor,
    entry_page_size: int,
    starts: torch.Tensor,
    indptr: torch.Tensor,
    max_seq_len: int,
) -> None:
    """The same as one Triton launch."""
    batch = row_ids.numel()
    grid = (batch, max(1, min(triton.cdiv(max_seq_len, BLOCK), triton.cdiv(PROGRAMS, batch))))
    _read_stream_kernel[grid](
        out,
        out.numel(),
        ids,
        ids.stride(0),
        ids.shape[1],
        row_ids,
        starts,
        indptr,
        ENTRY_PAGE_SIZE=entry_page_size,
        BLOCK=BLOCK,
    )


@triton.jit
def _read_stream_kernel(
    out,
    capacity,
    ids,
    ids_stride,
    columns,
    row_ids,
    starts,
    indptr,
    ENTRY_PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    entries = ids + tl.load(row_ids + request).to(tl.int64) * ids_stride
    begin = tl.load(indptr + request).to(tl.int64)
    end = tl.minimum(tl.load(indptr + request + 1).to(tl.int64), capacity)
    length = (end - begin).to(tl.int32)
    start = tl.load(starts + request).to(tl.int32)
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        written = at < length
        position = start + at
        column = position // ENTRY_PAGE_SIZE
        entry = tl.load(entries + column, mask=written & (column < columns), other=0).to(tl.int64)
        kernel_id = tl.maximum(entry, 0) * ENTRY_PAGE_SIZE + position % ENTRY_PAGE_SIZE
        tl.store(out + begin + at, kernel_id.to(out.dtype.element_ty), mask=written)


def _check(
    out: torch.Tensor,
    ids: torch.Tensor,
    row_ids: torch.Tensor,
    entry_page_size: int,
    starts: torch.Tensor,
    indptr: torch.Tensor,
) -> None:
    batch = row_ids.numel()
    if entry_page_size < 1:
        raise InputError("entry_page_size", entry_page_size, "a positive number")
    if batch < 1 or starts.numel() != batch:
        raise InputError("starts", tuple(starts.shape), f"({max(batch, 1)},), one per request")
    if indptr.numel() != batch + 1:
        raise InputError("indptr", tuple(indptr.shape), f"({batch + 1},)")
    if out.ndim != 1 or not out.is_contiguous():
        raise InputError("out", tuple(out.shape), "one contiguous dimension")
    if ids.ndim != 2 or ids.stride(1) != 1:
        raise InputError("ids", tuple(ids.shape), "[rows, columns] with contiguous rows")
