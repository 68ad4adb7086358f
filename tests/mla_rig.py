"""The rig of the MLA backends: latent rows beside a dense memory of them, absorbed attention said without any id."""

from dataclasses import dataclass, field

import torch

from suite.kernels.allocators.paged import StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, bytes_for_pages
from suite.kernels.ids import KVKind
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.kernels.translator import KVIndexTranslator
from tests.attention_rig import Rig, Step, Work

MODES = ("static", "unified", "unified_token_major")


def absorbed(q: torch.Tensor, rows: torch.Tensor, layer: AttentionLayer, dtype: torch.dtype) -> torch.Tensor:
    """One request: newest queries q [queries, heads, width] over all of its rows [keys, width], in `dtype`."""
    queries, keys = q.shape[0], rows.shape[0]
    rows = rows.to(dtype)
    position = torch.arange(keys - queries, keys, device=q.device)[:, None]
    hidden = torch.arange(keys, device=q.device)[None] > position
    out = torch.empty(queries, layer.q_heads, layer.out_dim, dtype=dtype, device=q.device)
    for head in range(layer.q_heads):
        scores = (q[:, head].to(dtype) @ rows.T * layer.scale).masked_fill(hidden, -torch.inf)
        out[:, head] = scores.softmax(-1) @ rows[:, : layer.out_dim]
    return out


@dataclass
class LatentStep(Step):
    """`largest`: of the latents that a layer sums, whose accumulators round by it and not by the smaller sum."""

    largest: dict[int, float] = field(default_factory=dict)

    def assert_earned(self) -> None:
        """As a step's, plus one fp32 rounding of the largest latent."""
        for layer, exact in self.exact.items():
            out, rough = self.out[layer].double(), self.rough[layer].double()
            assert out.isfinite().all(), f"layer {layer}: not finite"
            floor = torch.finfo(self.out[layer].dtype).eps * exact.abs().max()
            floor += torch.finfo(torch.float32).eps * self.largest[layer]
            allowed, error = 2 * (rough - exact).abs().max() + floor, (out - exact).abs().max()
            assert error <= allowed, f"layer {layer}: error {error:.2e} > {allowed:.2e}"


@dataclass
class LatentRig(Rig):
    """`depth` MLA layers of rows [latent | rope]; batches, moves and releases as the rig serves them."""

    window: int | None = None
    sinks: bool = False
    kv_heads: int = 1
    latent: int = 32
    rope: int = 16
    depth: int = 3

    def __post_init__(self) -> None:
        self.head_dim = self.latent + self.rope
        self.random = torch.Generator().manual_seed(self.seed)
        self.layers = [self._layer(index) for index in range(self.depth)]
        geometry = RunnerGeometry.from_layers(self.layers, self.dtype, self.page_size)
        count = 2 + 2 * self.requests * (-(-self.context // self.page_size) + 1)
        if self.mode == "static":
            self.pool = StaticPool(geometry, {KVKind.FULL: count}, self.device, poison=self.poison)
            self.allocator = StaticAllocator(self.pool)
        else:
            size = bytes_for_pages(geometry, self.mode, count)
            self.pool = UNIFIED_POOLS[self.mode](geometry, size, self.context, self.device, poison=self.poison)
            self.allocator = UnifiedAllocator(self.pool)
        table = torch.zeros(self.requests + 1, self.context, dtype=torch.int32, device=self.device)
        self.translator = KVIndexTranslator(pool=self.pool, allocator=self.allocator, req_to_token=table)
        self.attention = backend_class(self.backend)(
            pool=self.pool, translator=self.translator, launcher=self.launcher, sinks=False
        )
        self.memory = {}
        for row in range(1, self.requests + 1):
            self._forget(row)

    def _layer(self, index: int) -> AttentionLayer:
        return AttentionLayer(
            index=index,
            q_heads=self.q_heads,
            kv_heads=1,
            head_dim=self.latent + self.rope,
            scale=(self.latent + self.rope) ** -0.5,
            v_head_dim=self.latent,
            is_latent=True,
        )

    def _forget(self, row: int) -> None:
        self.pages[row], self.lengths[row] = [], 0
        for layer in self.layers:
            self.memory[layer.index, row] = self.randn(0, 1)[:, 0]

    def release(self, row: int) -> None:
        self.allocator.free(self.pages[row])
        self._forget(row)

    def step(
        self, work: Work, *, mode: ForwardMode | None = None, pad_to: int = 0, replay: bool = False, evict: bool = True
    ) -> LatentStep:
        """One forward of all layers over `work`; nothing is ever evicted."""
        batch = self.batch(work, mode, pad_to)
        metadata = self.attention.replay(batch) if replay else self.attention.plan(batch)
        step = LatentStep(batch, metadata, {}, {}, {}, {})
        live = sum(work.values())
        for layer in self.layers:
            q, k = self.randn(batch.input_ids.numel(), self.q_heads), self.randn(batch.input_ids.numel(), 1)
            out = self.attention.forward(layer, q, k, None, metadata)
            assert out.shape == (*q.shape[:2], self.latent)
            assert out.dtype == q.dtype
            step.q[layer.index], step.out[layer.index] = q, out[:live]
            step.exact[layer.index], step.rough[layer.index] = self._expect_latent(layer, work, q, k[:, 0])
            known = [self.memory[layer.index, row][:, : self.latent].abs().max() for row in work]
            step.largest[layer.index] = float(max(known))
        return step

    def _expect_latent(
        self, layer: AttentionLayer, work: Work, q: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact, rough, at = [], [], 0
        for row, new in work.items():
            mine = slice(at, at + new)
            at += new
            known = self.memory[layer.index, row] = torch.cat([self.memory[layer.index, row], rows[mine]])
            exact.append(absorbed(q[mine], known, layer, torch.float64))
            rough.append(absorbed(q[mine], known, layer, self.dtype))
        return torch.cat(exact), torch.cat(rough)
