"""What the unified pool adds to a decode step: `python -m suite.kernels.ops.bench_step`.

A step is the batch's metadata, refilled outside the graph, then a graph of N attention layers that write and
attend. Both arms hold the same pages in the same order, the unified ones through a shuffled page map, and are
timed in turn (static, unified, unified, static). Prints the medians of each and of the paired difference; the
target is at most +2 us. Needs an NVIDIA GPU; takes about 20 seconds.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from suite.errors import InputError
from suite.kernels.allocators.paged import StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.attention.support import BACKENDS, backend_class
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, bytes_for_pages
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UnifiedPool
from suite.kernels.translator import KVIndexTranslator
from suite.measure import capture, require_cuda
from suite.records import PoolMode

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAIRS = 100


def decode_step(
    mode: PoolMode, backend: str, batch: int, tokens: int, page_size: int, layers: int
) -> Callable[[], None]:
    """One decode step of `batch` requests of `tokens` tokens on a pool of `mode`, captured and ready to run."""
    shape = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "scale": HEAD_DIM**-0.5}
    stack = [AttentionLayer(index=index, **shape) for index in range(layers)]
    geometry = RunnerGeometry.from_layers(stack, torch.bfloat16, page_size)
    each = -(-tokens // page_size)
    if mode == "static":
        pool = StaticPool(geometry, {KVKind.FULL: 2 * batch * each + 2}, "cuda")
        allocator = StaticAllocator(pool)
    else:
        pool = UnifiedPool(geometry, bytes_for_pages(geometry, mode, 2 * batch * each + 2), tokens, "cuda")
        allocator = UnifiedAllocator(pool)
    spare = allocator.alloc(batch * each)
    pages = [allocator.alloc(each) for _ in range(batch)]
    allocator.free(spare)
    if mode != "static":
        allocator.compact(urgent=True)  # into the holes: the page map is not the identity
    ids = torch.tensor([[0] * each, *pages], device="cuda")[:, :, None] * page_size
    table = (ids + torch.arange(page_size, device="cuda")).flatten(1)[:, :tokens].int()
    translator = KVIndexTranslator(pool=pool, allocator=allocator, req_to_token=table)
    forward_batch = ForwardBatch.create(
        mode=ForwardMode.DECODE,
        input_ids=[0] * batch,
        req_rows=list(range(1, batch + 1)),
        seq_lens=[tokens] * batch,
        query_lens=[1] * batch,
        virtual_write_ids=VirtualIds(table[1:, -1].long()),
        translator=translator,
    )
    attention = backend_class(backend)(pool=pool, translator=translator, launcher="native", sinks=False)
    attention.capture(batch)
    metadata = attention.replay(forward_batch)
    q, k, v = (torch.randn(batch, heads, HEAD_DIM, device="cuda").bfloat16() for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    graph = capture(lambda: [attention.forward(layer, q, k, v, metadata) for layer in stack])

    def step() -> None:
        attention.replay(replace(forward_batch))  # a new batch: nothing is memoised
        graph.replay()

    return step


def timed_us(step: Callable[[], None]) -> float:
    """From before the metadata's first launch to the end of the graph, the host's launches included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times a decode step on the static and on the unified pool.")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="fa3")
    for name, value in (("batch", 64), ("tokens", 4096), ("page-size", 16), ("layers", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    try:
        require_cuda("a decode step")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sizes = options.batch, options.tokens, options.page_size, options.layers
    static, unified = (decode_step(mode, options.backend, *sizes) for mode in ("static", "unified"))
    for _ in range(10):
        static(), unified()
    ones, others = [], []
    for _ in range(PAIRS):
        first, second, third, fourth = (timed_us(step) for step in (static, unified, unified, static))
        ones.append((first + fourth) / 2)
        others.append((second + third) / 2)
    differences = [other - one for one, other in zip(ones, others, strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options}, {PAIRS} ABBA pairs")
    print(f"static {statistics.median(ones):.2f} us, unified {statistics.median(others):.2f} us")
    print(f"unified - static: median {middle:+.2f} us, quartiles {low:+.2f} to {high:+.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
