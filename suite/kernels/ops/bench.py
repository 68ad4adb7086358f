"""Read-table time in a replayed graph, from a random page map: `python -m suite.kernels.ops.bench`.

One line per shape: median microseconds with the L2 cold and warm. `--cuts` tries ways to cut the launch at
64 x 131,072 tokens, page 1, with an int64 and an int32 page map: one line each, the fastest last; about 40
seconds. Needs an NVIDIA GPU.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from suite.errors import InputError
from suite.kernels.ops.read_table import TableCut, read_table, read_table_triton
from suite.measure import cold_times_us, require_cuda, warm_times_us

MULTIPLIER = 8  # a page-major pool of four layers
SHAPES = (  # requests, tokens, page size
    (64, 4096, 1),
    (256, 8192, 1),
    (64, 131072, 1),
    (256, 8192, 16),
    (256, 8192, 64),
    (64, 131072, 64),
)


LONG = (64, 131072, 1)
BLOCKS, PROGRAMS, WARPS = (256, 512, 1024, 2048), (1024, 4096, 16384), (4, 8)


def read_table_work(
    requests: int,
    tokens: int,
    page_size: int,
    device: str = "cuda",
    cut: TableCut | None = None,
    map_dtype: torch.dtype = torch.int64,
) -> Callable[[], None]:
    """A read table of full-length requests whose pages lie in random order, ready to be timed."""
    pages = requests * tokens // page_size
    generator = torch.Generator().manual_seed(0)
    page_map = torch.full((pages + 2,), -1, dtype=torch.int64)
    page_map[1:-1] = torch.randperm(pages, generator=generator) + 1
    page_map[0] = 0
    virtual_pages = (torch.randperm(pages, generator=generator) + 1).view(requests, -1, 1)
    virtual = (virtual_pages * page_size + torch.arange(page_size)).view(requests, tokens).int()
    out = torch.zeros(requests, tokens // page_size, dtype=torch.int32, device=device)
    rows = torch.arange(requests, device=device)
    lens = torch.full((requests,), tokens, dtype=torch.int32, device=device)
    virtual, page_map = virtual.to(device), page_map.to(device, map_dtype)
    if cut is not None:
        return lambda: read_table_triton(out, virtual, rows, lens, page_map, MULTIPLIER, page_size, tokens, cut)
    return lambda: read_table(out, virtual, rows, lens, page_map, MULTIPLIER, page_size, tokens)


def try_cuts() -> None:
    """One line per page-map dtype and cut of the longest shape."""
    print(f"{'map':>6} {'block':>5} {'programs':>8} {'warps':>5} {'keeps_map':>9} {'cold_us':>8}")
    found = []
    for dtype, keeps in itertools.product((torch.int64, torch.int32), (False, True)):
        for block, programs, warps in itertools.product(BLOCKS, PROGRAMS, WARPS):
            cut = TableCut(block=block, programs=programs, warps=warps, keeps_map=keeps)
            work = read_table_work(*LONG, cut=cut, map_dtype=dtype)
            us = statistics.median(cold_times_us(work, 20))
            name = str(dtype).removeprefix("torch.")
            found.append((us, f"{name:>6} {block:>5} {programs:>8} {warps:>5} {keeps!s:>9} {us:>8.2f}"))
            print(found[-1][1], flush=True)
    print("best", min(found)[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times the read table in a replayed graph.")
    parser.add_argument("--cuts", action="store_true", help="try ways to cut the longest shape's launch")
    options = parser.parse_args(arguments)
    try:
        require_cuda("the read table")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.cuts:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {LONG}, medians of 20")
        try_cuts()
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of 100")
    print(f"{'requests':>8} {'tokens':>7} {'page':>5} {'cold_us':>8} {'warm_us':>8}")
    for requests, tokens, page_size in SHAPES:
        work = read_table_work(requests, tokens, page_size)
        cold, warm = statistics.median(cold_times_us(work)), statistics.median(warm_times_us(work))
        print(f"{requests:>8} {tokens:>7} {page_size:>5} {cold:>8.2f} {warm:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
