"""`req_to_token` -> page table of one batch, one launch.

Column c of a request holds the page of positions `c * page_size` on, as kernels index it:
`page_map[virtual page] * page_multiplier`. Only a request's live columns are written, so what the
caller keeps past them (zeros, a -1 sentinel, a stale tail) survives. Ids that are negative, out of
range or unmapped become page 0, the sink.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from suite.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TableCut:
    """How one launch is cut: columns per block, programs over all requests, warps.

    The grid follows the batch, not the lengths, so a captured launch stays cheap at short ones. `keeps_map`: tell
    the L2 to keep the page map, whose entries are gathered, over ids and table, which are streamed.
    """

    block: int
    programs: int = 1024
    warps: int = 4
    keeps_map: bool = False


ONE_TOKEN_PAGES, LONGER_PAGES = TableCut(block=256), TableCut(block=128)  # one-token pages have the most columns


def read_table(
    out: torch.Tensor,
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_map: torch.Tensor | None,
    page_multiplier: int,
    page_size: int,
    max_seq_len: int,
) -> None:
    """Fill the first `batch` rows of `out` in place; on CUDA one launch and no synchronisation.

    out: [>= batch, columns] int32 or int64, a request longer than it is cut at its width.
    req_to_token: [requests, context] virtual ids. req_rows, seq_lens: [batch].
    page_map: [pages] virtual -> physical, -1 unmapped; None is the identity.
    max_seq_len: bound of seq_lens known to the host; it sizes the grid and never the result.
    Raises InputError for shapes that do not belong together.
    """
    _check(out, req_to_token, req_rows, seq_lens, page_size)
    if out.is_cuda:
        read_table_triton(out, req_to_token, req_rows, seq_lens, page_map, page_multiplier, page_size, max_seq_len)
    else:
        read_table_torch(out, req_to_token, req_rows, seq_lens, page_map, page_multiplier, page_size)


def read_table_torch(
    out: torch.Tensor,
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_map: torch.Tensor | None,
    page_multiplier: int,
    page_size: int,
) -> None:
    """The same in plain torch, for CPU tensors and for tests."""
    columns = min(out.shape[1], -(-max(int(seq_lens.max()), 0) // page_size))
    tokens = req_to_token[req_rows, : columns * page_size : page_size].long()
    page = torch.div(tokens, page_size, rounding_mode="floor")
    if page_map is not None:
        known = (page >= 0) & (page < page_map.numel())
        page = torch.where(known, page_map[torch.where(known, page, 0)], -1)
    entry = torch.where(page < 0, 0, page * page_multiplier).to(out.dtype)
    live = torch.arange(tokens.shape[1], device=out.device) * page_size < seq_lens[:, None]
    target = out[: req_rows.numel(), : tokens.shape[1]]
    target.copy_(torch.where(live, entry, target))


def read_table_triton(
    out: torch.Tensor,
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_map: torch.Tensor | None,
    page_multiplier: int,
    page_size: int,
    max_seq_len: int,
    cut: TableCut | None = None,
) -> None:
    """The same as one Triton launch."""
    batch = req_rows.numel()
    columns = min(out.shape[1], triton.cdiv(req_to_token.shape[1], page_size))
    cut = cut or (ONE_TOKEN_PAGES if page_size == 1 else LONGER_PAGES)
    useful = triton.cdiv(min(columns, triton.cdiv(max_seq_len, page_size)), cut.block)
    grid = (batch, max(1, min(useful, triton.cdiv(cut.programs, batch))))
    _read_table_kernel[grid](
        out,
        out.stride(0),
        req_to_token,
        req_to_token.stride(0),
        req_rows,
        seq_lens,
        page_map,
        0 if page_map is None else page_map.numel(),
        page_multiplier,
        columns,
        PAGE_SIZE=page_size,
        BLOCK=cut.block,
        STREAMED="evict_first" if cut.keeps_map else "",
        GATHERED="evict_last" if cut.keeps_map else "",
        num_warps=cut.warps,
    )


@triton.jit
def _read_table_kernel(
    out,
    out_stride,
    req_to_token,
    token_stride,
    req_rows,
    seq_lens,
    page_map,
    mapped_pages,
    page_multiplier,
    columns,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    STREAMED: tl.constexpr,
    GATHERED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tokens = req_to_token + tl.load(req_rows + request).to(tl.int64) * token_stride
    live = tl.minimum(tl.cdiv(tl.load(seq_lens + request).to(tl.int32), PAGE_SIZE), columns)
    for first in range(tl.program_id(1) * BLOCK, live, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)
        written = column < live
        token = tl.load(tokens + column * PAGE_SIZE, mask=written, other=-1, eviction_policy=STREAMED)
        bound = token >= 0  # tested before the division, which truncates -1 // page_size to page 0
        page = token // PAGE_SIZE
        if page_map is not None:
            bound = bound & (page < mapped_pages)
            page = tl.load(page_map + page, mask=bound, other=-1, eviction_policy=GATHERED)
            bound = bound & (page >= 0)
        entry = tl.where(bound, page.to(tl.int64) * page_multiplier, 0)
        at = out + request * out_stride + column
        tl.store(at, entry.to(out.dtype.element_ty), mask=written, eviction_policy=STREAMED)


def _check(
    out: torch.Tensor, req_to_token: torch.Tensor, req_rows: torch.Tensor, seq_lens: torch.Tensor, page_size: int
) -> None:
    batch = req_rows.numel()
    if page_size < 1:
        raise InputError("page_size", page_size, "a positive number")
    if batch < 1 or seq_lens.numel() != batch:
        raise InputError("seq_lens", tuple(seq_lens.shape), f"({max(batch, 1)},), one per request")
    if out.ndim != 2 or out.shape[0] < batch or out.stride(1) != 1:
        raise InputError("out", tuple(out.shape), f"at least {batch} rows with contiguous columns")
    if req_to_token.ndim != 2 or req_to_token.stride(1) != 1:
        raise InputError("req_to_token", tuple(req_to_token.shape), "[requests, context] with contiguous rows")
