"""A small runner for linear-attention tests: real pool and backend, and the naive oracle's states beside them.

The rig draws inputs, runs a forward through the backend and continues the oracle of every request from where its
last forward left it, in float64 (what is right) and in bfloat16 (what the same maths would lose).
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from suite.kernels.batch import ForwardMode
from suite.kernels.linear import linear_backend_class
from suite.kernels.linear.delta import DeltaInputs, DeltaLayer
from suite.kernels.linear.lightning import LightningInputs, LightningLayer
from suite.kernels.linear.naive import naive_conv, naive_delta, naive_gates, naive_lightning
from suite.kernels.linear.stamp import LinearAttnFlags, resolve, stamp_runner
from suite.kernels.pools.state import KernelSlots, StateGeometry, StatePool

LAYERS = (1, 4)
OFFSET = 64  # bytes of somebody else's before the slots of a strided pool
POISON_BYTE = 0xFF  # four of them are an fp32 NaN, two a bf16 one

Work = dict[int, int]  # kernel slot -> new tokens


def assert_earned(out: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor, what: str) -> None:
    """Error against exact <= 2x the error of the same maths in less precision, plus one rounding of the result."""
    floor = torch.finfo(out.dtype).eps
    out, exact, rough = out.double(), exact.double(), rough.double()
    assert out.isfinite().all(), f"{what}: not finite"
    allowed = 2 * (rough - exact).abs().max() + floor * exact.abs().max()
    error = (out - exact).abs().max()
    assert error <= allowed, f"{what}: error {error:.2e} > {allowed:.2e}"


def batch_shape(seq_lens: list[int], query_lens: list[int], device: str, mode: ForwardMode) -> SimpleNamespace:
    """What a plan reads of a batch."""
    offsets = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return SimpleNamespace(
        mode=mode,
        cu_query_lens=offsets.to(device),
        seq_lens_host=tuple(seq_lens),
        query_lens_host=tuple(query_lens),
    )


@dataclass
class Memory:
    """One request's oracle in one layer: window [dim, width] and state [v_heads, V, K], float64 and bfloat16."""

    window: torch.Tensor
    exact: torch.Tensor
    rough: torch.Tensor


@dataclass
class LinearRig:
    """`layers` of LAYERS are run; the pool holds all of them. Slots are kernel slots, chosen by the test."""

    family: str = "gdn"
    launcher: str = "reference"
    layout: str = "static"
    k_heads: int = 1
    v_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    slots: int = 6
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    layers: tuple[int, ...] = LAYERS
    seed: int = 0
    safe_gate: bool = False
    topk: int = 0
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        if self.family == "lightning":
            self.k_heads, self.v_dim = self.v_heads, self.k_dim
        conv_dim = 0 if self.family == "lightning" else 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        geometry = StateGeometry(
            layers=LAYERS,
            conv_dim=conv_dim,
            v_heads=self.v_heads,
            v_dim=self.v_dim,
            k_dim=self.k_dim,
            taps_first=self.family == "kda",
            conv_dtype=self.dtype,
        )
        self.pool = self._pool(geometry)
        self.model = {layer: self._layer(layer, conv_dim) for layer in LAYERS}
        runner = SimpleNamespace()
        stamp_runner(runner, resolve(LinearAttnFlags()))
        backend = linear_backend_class(self.family)
        self.backend = backend(runner=runner, pool=self.pool, launcher=self.launcher, topk=self.topk)
        self.memory: dict[tuple[int, int], Memory] = {}

    def _pool(self, geometry: StateGeometry) -> StatePool:
        if self.layout == "static":
            return StatePool.static(geometry, self.slots, self.device, poison=True)
        size = OFFSET + (self.slots + 1) * geometry.slot_bytes
        self.buffer = torch.full((size + 128,), POISON_BYTE, dtype=torch.uint8, device=self.device)
        return StatePool.strided(geometry, self.slots, self.buffer, OFFSET, poison=True)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype if dtype is None else dtype).to(self.device)

    def _layer(self, index: int, conv_dim: int) -> DeltaLayer | LightningLayer:
        if self.family == "lightning":
            return LightningLayer.of_model(
                index=index, layers=8, heads=self.v_heads, head_dim=self.k_dim, device=self.device
            )
        gate = (self.v_heads, self.k_dim) if self.family == "kda" else (self.v_heads,)
        return DeltaLayer(
            index=index,
            k_heads=self.k_heads,
            v_heads=self.v_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            conv_weight=self.randn(conv_dim, 4),
            a_log=self.randn(self.v_heads, dtype=torch.float32),
            dt_bias=self.randn(*gate, dtype=torch.float32),
            lower_bound=-5.0 if self.safe_gate else None,
        )

    def inputs(self, tokens: int) -> DeltaInputs | LightningInputs:
        """Random inputs of one layer."""
        if self.family == "lightning":
            return LightningInputs(**{n: self.randn(tokens, self.v_heads, self.k_dim) for n in ("q", "k", "v")})
        gate = (self.v_heads, self.k_dim) if self.family == "kda" else (self.v_heads,)
        dim = 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        return DeltaInputs(
            mixed=self.randn(tokens, dim), a=self.randn(tokens, *gate), b=self.randn(tokens, self.v_heads)
        )

    def plan(self, work: Work, pad: tuple[int, ...] = (), **how):
        """Metadata of a batch over `work`, then one-token rows at the slots `pad`."""
        news = [*work.values(), *[1] * len(pad)]
        seqs = [*(self.lengths.get(slot, 0) + new for slot, new in work.items()), *[9] * len(pad)]
        mode = ForwardMode.DECODE if set(news) == {1} else ForwardMode.EXTEND
        batch = batch_shape(seqs, news, self.device, mode)
        slots = KernelSlots(torch.tensor([*work, *pad], device=self.device))
        return batch, self.backend.plan(batch, slots, **how)

    def step(self, work: Work, pad: tuple[int, ...] = (), **how) -> dict[int, torch.Tensor]:
        """One decode or prefill, checked against the oracle: outputs and the states it leaves. Returns outputs."""
        _, metadata = self.plan(work, pad, **how)
        outs = {}
        for layer in self.layers:
            inputs = self.inputs(sum(work.values()) + len(pad))
            outs[layer] = out = self.backend.forward(self.model[layer], inputs, metadata)
            assert out.dtype == self.dtype
            begin = 0
            for slot, new in work.items():
                self._follow(layer, slot, inputs, slice(begin, begin + new), out)
                begin += new
        for slot, new in work.items():
            self.lengths[slot] = self.lengths.get(slot, 0) + new
        return outs

    def _follow(self, layer: int, slot: int, inputs, mine: slice, out: torch.Tensor) -> None:
        memory = self.memory.setdefault((layer, slot), self.blank()) if self.lengths.get(slot) else self.blank()
        exact, states, window = self.oracle(layer, inputs, mine, memory.window, memory.exact, torch.float64)
        rough, rough_states, _ = self.oracle(layer, inputs, mine, memory.window, memory.rough, torch.bfloat16)
        what = f"layer {layer}, slot {slot}"
        assert_earned(out[mine], exact, rough, what)
        self.memory[layer, slot] = Memory(window, states[-1], rough_states[-1])
        views = self.pool.state_views(layer)
        assert_earned(views.temporal[slot], states[-1], rough_states[-1], f"{what}: state")
        if views.conv is not None:
            held = views.conv[slot].T if self.family == "kda" else views.conv[slot]
            assert torch.equal(held.double(), window), f"{what}: window"

    def blank(self) -> Memory:
        """A request that has seen nothing."""
        dim = 0 if self.family == "lightning" else 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        state = torch.zeros(self.v_heads, self.v_dim, self.k_dim, dtype=torch.float64, device=self.device)
        return Memory(torch.zeros(dim, 3, dtype=torch.float64, device=self.device), state, state)

    def oracle(self, layer: int, inputs, mine: slice, window, state, dtype, parents=None):
        """(out, states after every token, window after the last) of the tokens `mine`, from `window` and `state`."""
        model = self.model[layer]
        if self.family == "lightning":
            out, states = naive_lightning(inputs.q[mine], inputs.k[mine], inputs.v[mine], model.rate, state, dtype)
            return out, states, window
        mixed, _ = naive_conv(inputs.mixed[mine], model.conv_weight, window, dtype)
        after = torch.cat([window, inputs.mixed[mine].double().T], 1)[:, -3:]
        keys = self.k_heads * self.k_dim
        q, k, v = mixed.split([keys, keys, self.v_heads * self.v_dim], 1)
        g, beta = naive_gates(inputs.a[mine], inputs.b[mine], model.a_log, model.dt_bias, model.lower_bound, dtype)
        q, k = (x.reshape(-1, self.k_heads, self.k_dim) for x in (q, k))
        out, states = naive_delta(q, k, v.reshape(-1, self.v_heads, self.v_dim), g, beta, state, parents, dtype)
        return out, states, after

    def snapshot(self) -> list[torch.Tensor]:
        """Every byte of the pool's state, as integers: NaN compares equal to itself."""
        return [stream.contiguous().view(torch.uint8).clone() for stream in self.pool.streams()]

    def changed(self, before: list[torch.Tensor]) -> set[int]:
        """Slots that hold other bytes than `before`, in any layer and stream."""
        slots: set[int] = set()
        for old, new in zip(before, self.snapshot(), strict=True):
            differs = (old != new).flatten(2).any(-1).any(0)
            slots |= set(differs.nonzero().flatten().tolist())
        return slots
