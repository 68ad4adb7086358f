"""A small runner for backend tests: real pool, allocator and translator, and a dense memory beside them.

The rig serves requests like the engine does (pages, window eviction, moves between forwards) and keeps
every K and V it ever wrote as dense tensors, so that `dense` can say what attention must return without
any id of any kind.
"""

from dataclasses import dataclass, field

import torch

from suite.kernels.allocators.paged import StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, bytes_for_pages
from suite.kernels.ids import KVKind, VirtualIds
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.kernels.translator import KVIndexTranslator

Work = dict[int, int]  # request row -> new tokens


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, dtype: torch.dtype) -> torch.Tensor:
    """One request: newest queries q [queries, q_heads, dim] over all of k, v [keys, kv_heads, dim], in `dtype`."""
    queries, keys, groups = q.shape[0], k.shape[0], layer.q_heads // layer.kv_heads
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    position = torch.arange(keys - queries, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)[None]
    hidden = key > position
    if layer.window is not None:
        hidden |= key <= position - layer.window
    for head in range(layer.q_heads):
        scores = q[:, head].to(dtype) @ k[:, head // groups].to(dtype).T * layer.scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks[head].to(dtype).expand(queries, 1)], 1)
        out[:, head] = scores.softmax(-1)[:, :keys] @ v[:, head // groups].to(dtype)
    return out


def plain_layer(q_heads: int, kv_heads: int, head_dim: int) -> AttentionLayer:
    """A full-attention layer without sinks."""
    return AttentionLayer(index=0, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


@dataclass
class Step:
    """One forward of every layer: what went in, what came out, and the metadata that it read by."""

    batch: ForwardBatch
    metadata: object
    q: dict[int, torch.Tensor]
    out: dict[int, torch.Tensor]
    exact: dict[int, torch.Tensor]  # float64
    rough: dict[int, torch.Tensor]  # the same maths in the pool's dtype

    def assert_earned(self) -> None:
        """Error against exact <= 2x the error of the same maths in the pool's dtype, plus one rounding of it."""
        for layer, exact in self.exact.items():
            out, rough = self.out[layer].double(), self.rough[layer].double()
            assert out.isfinite().all(), f"layer {layer}: not finite"
            allowed = 2 * (rough - exact).abs().max() + torch.finfo(self.out[layer].dtype).eps * exact.abs().max()
            error = (out - exact).abs().max()
            assert error <= allowed, f"layer {layer}: error {error:.2e} > {allowed:.2e}"


@dataclass
class Rig:
    """Full layers 0 and 2, window layers 1, 3 and 4 (none with window=None): the multipliers differ."""

    mode: str = "static"
    backend: str = "reference"
    launcher: str = "reference"
    page_size: int = 4
    window: int | None = 10
    sinks: bool = True
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    context: int = 96
    requests: int = 8
    seed: int = 0
    poison: bool = True
    lengths: dict[int, int] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.layers = [self._layer(index) for index in ((0, 1, 2, 3, 4) if self.window else (0, 2))]
        geometry = RunnerGeometry.from_layers(self.layers, self.dtype, self.page_size)
        per_request = -(-self.context // self.page_size) + 1
        count = 2 + 2 * self.requests * per_request
        if self.mode == "static":
            pages = {pool.kind: count for pool in geometry.pools}
            self.pool = StaticPool(geometry, pages, self.device, poison=self.poison)
            self.allocator = StaticAllocator(self.pool)
        else:
            size = bytes_for_pages(geometry, self.mode, count)
            self.pool = UNIFIED_POOLS[self.mode](geometry, size, self.context, self.device, poison=self.poison)
            self.allocator = UnifiedAllocator(self.pool)
        table = torch.zeros(self.requests + 1, self.context, dtype=torch.int32, device=self.device)
        self.translator = KVIndexTranslator(pool=self.pool, allocator=self.allocator, req_to_token=table)
        self.attention = backend_class(self.backend)(
            pool=self.pool, translator=self.translator, launcher=self.launcher, sinks=self.sinks
        )
        self.memory = {
            (layer.index, row): (self.randn(0, self.kv_heads), self.randn(0, self.kv_heads, self.v_head_dim))
            for layer in self.layers
            for row in range(1, self.requests + 1)
        }
        self.lengths = dict.fromkeys(range(1, self.requests + 1), 0)
        self.pages = {row: [] for row in range(1, self.requests + 1)}

    def _layer(self, index: int) -> AttentionLayer:
        sinks = torch.randn(self.q_heads, generator=self.random).bfloat16().float().to(self.device)
        return AttentionLayer(
            index=index,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.head_dim**-0.5,
            window=None if index in (0, 2) else self.window,
            sinks=sinks if self.sinks else None,
        )

    def randn(self, tokens: int, heads: int, dim: int | None = None) -> torch.Tensor:
        values = torch.randn(tokens, heads, dim or self.head_dim, generator=self.random)
        return values.to(self.dtype).to(self.device)

    def batch(
        self, work: Work, mode: ForwardMode | None = None, pad_to: int = 0, draft_tokens: int = 1
    ) -> ForwardBatch:
        """Allocate, write `req_to_token` and build the batch; padded with sink requests to `pad_to`.

        A padding request of a verify is as long as the others' new tokens, of `draft_tokens` where there is none.
        """
        written = []
        for row, new in work.items():
            start, end = self.lengths[row], self.lengths[row] + new
            missing = -(-end // self.page_size) - len(self.pages[row])
            self.pages[row] += self.allocator.alloc(missing)
            page = torch.tensor(self.pages[row])
            position = torch.arange(start, end)
            ids = page[position // self.page_size] * self.page_size + position % self.page_size
            self.translator.req_to_token[row, start:end] = ids.to(self.translator.req_to_token)
            self.lengths[row] = end
            written.append(ids)
        if mode is None:
            mode = ForwardMode.DECODE if set(work.values()) == {1} else ForwardMode.EXTEND
        padding, each = (
            max(0, pad_to - len(work)),
            max(work.values(), default=draft_tokens) if mode is ForwardMode.VERIFY else 1,
        )
        written.append(torch.zeros(padding * each, dtype=torch.int64))
        rows = [*work, *[0] * padding]
        lens = [*(self.lengths[row] for row in work), *[each] * padding]
        news = [*work.values(), *[each] * padding]
        return ForwardBatch.create(
            mode=mode,
            input_ids=[0] * sum(news),
            req_rows=rows,
            seq_lens=lens,
            query_lens=news,
            virtual_write_ids=VirtualIds(torch.cat(written).to(self.device)),
            translator=self.translator,
        )

    def step(
        self,
        work: Work,
        *,
        mode: ForwardMode | None = None,
        pad_to: int = 0,
        replay: bool = False,
        evict: bool = True,
    ) -> Step:
        """One forward of all layers over `work`, then (or with evict=False later) window eviction."""
        batch = self.batch(work, mode, pad_to)
        metadata = self.attention.replay(batch) if replay else self.attention.plan(batch)
        step = Step(batch, metadata, {}, {}, {}, {})
        tokens = batch.input_ids.numel()
        for layer in self.layers:
            q, k = self.randn(tokens, self.q_heads), self.randn(tokens, self.kv_heads)
            v = self.randn(tokens, self.kv_heads, self.v_head_dim)
            out = self.attention.forward(layer, q, k, v, metadata)
            assert out.shape == (tokens, self.q_heads, layer.out_dim)
            assert out.dtype == q.dtype
            live = sum(work.values())
            step.q[layer.index], step.out[layer.index] = q, out[:live]
            step.exact[layer.index], step.rough[layer.index] = self._expect(layer, work, q, k, v)
        if evict:
            self.evict(work)
        return step

    def _expect(self, layer, work, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        exact, rough, at = [], [], 0
        for row, new in work.items():
            mine = slice(at, at + new)
            at += new
            old_k, old_v = self.memory[layer.index, row]
            keys, values = torch.cat([old_k, k[mine]]), torch.cat([old_v, v[mine]])
            self.memory[layer.index, row] = keys, values
            exact.append(dense(q[mine], keys, values, layer, torch.float64))
            rough.append(dense(q[mine], keys, values, layer, self.dtype))
        return torch.cat(exact), torch.cat(rough)

    def evict(self, work: Work) -> None:
        """Tombstone the pages that no later query of these requests can see through the window."""
        if self.window is None:
            return
        for row in work:
            gone = max(0, self.lengths[row] - self.window + 1) // self.page_size
            page_map = self.allocator.page_map(KVKind.WINDOW)
            self.allocator.evict_window([page for page in self.pages[row][:gone] if int(page_map[page]) > 0])

    def release(self, row: int) -> None:
        self.allocator.free(self.pages[row])
        self.pages[row], self.lengths[row] = [], 0
        for layer in self.layers:
            self.memory[layer.index, row] = (
                self.randn(0, self.kv_heads),
                self.randn(0, self.kv_heads, self.v_head_dim),
            )

    def move(self) -> int:
        """Pack the unified pool; 0 on a static one, where nothing ever moves."""
        return self.allocator.compact(urgent=True) if self.mode != "static" else 0
