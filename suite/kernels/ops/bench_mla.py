"""Absorbed MLA decode per cut and number of splits: `python -m suite.kernels.ops.bench_mla`.

Batch 32, 16 heads, 4,096 tokens, rows of 512 + 64 bf16 in random page order. One line per cut, splits
and page size: median microseconds of a replayed graph with a cold L2, TB/s of the latent rows read
once, and the error against fp32. The last lines name the fastest. Needs an NVIDIA GPU; takes about
30 seconds, most of it compilation. `--heads N`, `--batch N` and `--tokens N` change the shape.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch

from suite.errors import InputError
from suite.kernels.ops.mla_decode import mla_attention, mla_attention_torch
from suite.kernels.ops.mla_tiles import MlaTile, lanes_of
from suite.measure import cold_times_us, require_cuda

LATENT, ROPE = 512, 64
PAGE_SIZES = (1, 64)
SPLITS = (4, 6, 8, 12)
SAMPLES = 40
# keys per block, warps, stages, keys first
CUTS = (
    (32, 4, 3, False),
    (32, 4, 5, False),
    (32, 8, 5, False),
    (32, 4, 7, False),
    (64, 4, 3, False),
    (64, 4, 5, False),
    (64, 4, 3, True),
    (64, 8, 3, True),
)
WIDE_CUTS = ((32, 8, 3, False), (32, 8, 5, False), (64, 8, 2, False), (64, 4, 3, True))  # tiles of 32 rows and more


class Work:
    """One decode batch of full-length requests whose pages lie in random order."""

    def __init__(self, batch: int, heads: int, tokens: int, page_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = batch * tokens // page_size
        order = torch.randperm(pages, generator=generator).view(-1, 1) + 1
        self.rows = torch.randn((pages + 1) * page_size, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
        self.indices = (order * page_size + torch.arange(page_size)).flatten().int().cuda()
        self.indptr = (torch.arange(batch + 1) * tokens).int().cuda()
        self.offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
        self.scale = (LATENT + ROPE) ** -0.5
        streams = self.offsets, self.indptr, self.indices
        self.exact = mla_attention_torch(self.q.float(), self.rows, *streams, LATENT, self.scale)

    def run(self, tile: MlaTile | None, splits: int) -> torch.Tensor:
        streams = self.offsets, self.indptr, self.indices
        return mla_attention(self.q, self.rows, *streams, LATENT, self.scale, 1, splits, tile)

    @property
    def kv_read_bytes(self) -> int:
        return self.indices.numel() * self.rows.shape[1] * self.rows.itemsize

    def measure(self, tile: MlaTile, splits: int) -> tuple[float, float]:
        """(median microseconds, largest error against fp32)."""
        off = float((self.run(tile, splits).float() - self.exact).abs().max())
        return statistics.median(cold_times_us(lambda: self.run(tile, splits), SAMPLES)), off


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times absorbed MLA decode per cut and number of splits.")
    for name, value in (("batch", 32), ("heads", 16), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    shape = parser.parse_args(arguments)
    try:
        require_cuda("MLA decode")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows = max(16, lanes_of(shape.heads))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {shape}, medians of {SAMPLES}")
    print("page rows keys warps stages   first splits       us   TB/s  error")
    for page_size in PAGE_SIZES:
        work = Work(shape.batch, shape.heads, shape.tokens, page_size)
        lines = []
        for keys, warps, stages, keys_first in CUTS if rows == 16 else WIDE_CUTS:
            tile = MlaTile(rows=rows, keys=keys, warps=warps, stages=stages, keys_first=keys_first)
            for splits in SPLITS:
                us, off = work.measure(tile, splits)
                rate = work.kv_read_bytes / us / 1e6
                cut = f"{rows:>4} {keys:>4} {warps:>5} {stages:>6} {'keys' if keys_first else 'queries':>7}"
                lines.append((us, f"{page_size:>4} {cut} {splits:>6} {us:>8.2f} {rate:>6.2f}  {off:.1e}"))
                print(lines[-1][1], flush=True)
        print("best", min(lines)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
