"""Virtual token ids -> token ids of one pool, one launch.

`page_map[virtual page] * (page_multiplier * page_size) + offset`; ids that are negative, out of range
or unmapped become 0, the sink.
"""

import torch
import triton
import triton.language as tl

from suite.errors import InputError

BLOCK = 256


def write_loc(virtual: torch.Tensor, page_map: torch.Tensor, page_multiplier: int, page_size: int) -> torch.Tensor:
    """Translate `virtual`, integers of any shape, to a new int64 tensor of that shape.

    page_map: [pages] int64 virtual -> physical, -1 unmapped. On CUDA one launch and no synchronisation.
    Raises InputError for a page size below 1.
    """
    if page_size < 1:
        raise InputError("page_size", page_size, "a positive number")
    translate = write_loc_triton if virtual.is_cuda else write_loc_torch
    return translate(virtual, page_map, page_multiplier, page_size)


def write_loc_torch(
    virtual: torch.Tensor, page_map: torch.Tensor, page_multiplier: int, page_size: int
) -> torch.Tensor:
    """The same in plain torch, for CPU tensors and for tests."""
    page = torch.div(virtual.long(), page_size, rounding_mode="floor")
    known = (page >= 0) & (page < page_map.numel())
    physical = torch.where(known, page_map[torch.where(known, page, 0)], -1)
    kernel_id = physical * (page_multiplier * page_size) + virtual.remainder(page_size)
    return torch.where(physical < 0, 0, kernel_id)


def write_loc_triton(
    virtual: torch.Tensor, page_map: torch.Tensor, page_multiplier: int, page_size: int
) -> torch.Tensor:
    """The same as one Triton launch."""
    virtual = virtual.contiguous()
    out = torch.empty(virtual.shape, dtype=torch.int64, device=virtual.device)
    if (tokens := virtual.numel()) == 0:
        return out
    _write_loc_kernel[(triton.cdiv(tokens, BLOCK),)](
        out, virtual, tokens, page_map, page_map.numel(), page_multiplier, PAGE_SIZE=page_size, BLOCK=BLOCK
    )
    return out


@triton.jit
def _write_loc_kernel(
    out, virtual, tokens, page_map, mapped_pages, page_multiplier, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    written = at < tokens
    token = tl.load(virtual + at, mask=written, other=-1).to(tl.int64)
    page = token // PAGE_SIZE
    bound = (token >= 0) & (page < mapped_pages)  # the division truncates -1 to page 0, so test the token
    physical = tl.load(page_map + page, mask=bound, other=-1).to(tl.int64)
    kernel_id = physical * page_multiplier * PAGE_SIZE + token % PAGE_SIZE
    tl.store(out + at, tl.where(physical < 0, 0, kernel_id), mask=written)
