"""Read-table time in a replayed graph, from a random page map: `python -m suite.kernels.ops.bench`.

One line per shape: median microseconds with the L2 cold and warm. Needs an NVIDIA GPU.
"""

import statistics
import sys
from collections.abc import Callable

import torch

from suite.errors import InputError
from suite.kernels.ops.read_table import read_table
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


def read_table_work(requests: int, tokens: int, page_size: int, device: str = "cuda") -> Callable[[], None]:
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
    virtual, page_map = virtual.to(device), page_map.to(device)
    return lambda: read_table(out, virtual, rows, lens, page_map, MULTIPLIER, page_size, tokens)


def main() -> int:
    try:
        require_cuda("the read table")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of 100")
    print(f"{'requests':>8} {'tokens':>7} {'page':>5} {'cold_us':>8} {'warm_us':>8}")
    for requests, tokens, page_size in SHAPES:
        work = read_table_work(requests, tokens, page_size)
        cold, warm = statistics.median(cold_times_us(work)), statistics.median(warm_times_us(work))
        print(f"{requests:>8} {tokens:>7} {page_size:>5} {cold:>8.2f} {warm:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
