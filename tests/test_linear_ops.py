"""The linear-attention kernels (interpreted) and their torch twins against the naive recurrence, in fp32.

A kernel may be off by twice what its twin, the same maths in fp32, is off from float64.
"""

import pytest
import torch

from suite.errors import InputError
from suite.kernels.linear.naive import naive_conv, naive_delta, naive_gates, naive_lightning
from suite.kernels.ops.causal_conv import ConvBatch, causal_conv, causal_conv_torch, causal_conv_triton
from suite.kernels.ops.delta_chunk import ChunkPlan, delta_chunk, delta_chunk_torch, delta_chunk_triton
from suite.kernels.ops.delta_gates import delta_gates, delta_gates_torch, delta_gates_triton
from suite.kernels.ops.delta_step import StepInputs, delta_step, delta_step_torch, delta_step_triton
from suite.kernels.ops.state_rows import copy_rows, copy_rows_torch, copy_rows_triton, gather_rows, scatter_rows

KINDS = pytest.mark.parametrize("kind", ["gdn", "kda", "fast_decay", "same_key", "lightning"])
LENS = (66, 1)


def inputs_of(kind: str, tokens: int, k_heads=1, v_heads=2, k_dim=16, v_dim=24) -> StepInputs:
    """fast_decay: exp(-G) overflows inside a chunk. same_key: powers of the system matrix explode."""
    torch.manual_seed(0)
    if kind == "lightning":
        k_heads = v_heads
    packed = torch.randn(tokens, 2 * k_heads * k_dim + v_heads * v_dim)  # strided tokens, as a projection leaves them
    q, k, v = packed.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], 1)
    q, k = (x.unflatten(1, (k_heads, k_dim)) for x in (q, k))
    g, beta = -torch.rand(tokens, v_heads), torch.rand(tokens, v_heads)
    if kind in ("kda", "fast_decay"):
        g = -torch.rand(tokens, v_heads, k_dim) * (60 if kind == "fast_decay" else 1)
    if kind == "same_key":
        k[:], g, beta = k[:1].clone(), torch.zeros_like(g), torch.ones_like(beta)
    if kind == "lightning":
        g, beta = -torch.rand(v_heads), None
    return StepInputs(q=q, k=k, v=v.unflatten(1, (v_heads, v_dim)), g=g, beta=beta)


def naive(inputs: StepInputs, initial: torch.Tensor, lens: tuple[int, ...], dtype: torch.dtype = torch.float64):
    outs, states, begin = [], [], 0
    for request, length in enumerate(lens):
        mine = slice(begin, begin + length)
        begin += length
        q, k, v = inputs.q[mine], inputs.k[mine], inputs.v[mine]
        if inputs.beta is None:
            out, after = naive_lightning(q, k, v, -inputs.g, initial[request], dtype)
        else:
            g, beta = inputs.g[mine], inputs.beta[mine]
            out, after = naive_delta(q, k, v, g, beta, initial[request], dtype=dtype)
        outs.append(out)
        states.append(after)
    return torch.cat(outs), states


def assert_as_good(got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor) -> None:
    allowed = 2 * (twin.double() - exact).abs().max() + 2 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert got.isfinite().all()
    assert (got.double() - exact).abs().max() <= allowed


@KINDS
def test_chunks_equal_the_recurrence(kind):
    inputs = inputs_of(kind, sum(LENS))
    initial = torch.randn(2, 2, 24, 16)
    plan = ChunkPlan.create(LENS, torch.device("cpu"))
    exact, states = naive(inputs, initial, LENS)
    twin, kernel = delta_chunk_torch(inputs, initial, plan), delta_chunk_triton(inputs, initial, plan)
    step_states, offsets = initial.clone(), torch.tensor([0, 66, 67], dtype=torch.int32)
    step = delta_step_torch(inputs, step_states, torch.tensor([0, 1]), offsets)
    final = torch.stack([after[-1] for after in states])
    rough, _ = naive(inputs, initial, LENS, torch.bfloat16)
    for got in (twin.out, step):
        assert (got - exact).abs().max() <= 2 * (rough - exact).abs().max()
    assert_as_good(kernel.out, twin.out, exact)
    assert_as_good(kernel.final, twin.final, final)
    assert_as_good(step_states, twin.final, final)
    boundaries = torch.stack([initial[0].double(), states[0][63], initial[1].double()])
    assert_as_good(kernel.boundaries, twin.boundaries, boundaries)
    assert torch.equal(kernel.boundaries[[0, 2]], initial)


@KINDS
def test_steps_equal_the_recurrence(kind):
    inputs = inputs_of(kind, 5)
    pool = torch.full((6, 2, 24, 16), torch.nan)
    pool[[4, 2]] = torch.randn(2, 2, 24, 16)
    lens, slots, offsets = (2, 3), torch.tensor([4, 2]), torch.tensor([0, 2, 5], dtype=torch.int32)
    exact, states = naive(inputs, pool[slots], lens)
    pools = [pool.clone() for _ in range(2)]
    twin = delta_step_torch(inputs, pools[0], slots, offsets)
    kernel = delta_step_triton(inputs, pools[1], slots, offsets)
    assert_as_good(kernel, twin, exact)
    assert_as_good(pools[1][slots], pools[0][slots], torch.stack([after[-1] for after in states]))
    assert pools[1][[0, 1, 3, 5]].isnan().all()


def test_half_precision_states_round_after_every_token():
    inputs = inputs_of("gdn", 3)
    whole, single = (torch.zeros(2, 2, 24, 16, dtype=torch.bfloat16) for _ in range(2))
    scratch = torch.zeros(1, 3, 2, 24, 16, dtype=torch.bfloat16)
    slots, rows = torch.tensor([1]), torch.tensor([0])
    out = delta_step_torch(
        inputs, whole, slots, torch.tensor([0, 3], dtype=torch.int32), scratch=scratch, scratch_rows=rows
    )
    for t in range(3):
        one = StepInputs(
            **{name: getattr(inputs, name)[t : t + 1] for name in ("q", "k", "v", "g", "beta")},
        )
        assert torch.equal(delta_step_torch(one, single, slots, torch.tensor([0, 1], dtype=torch.int32))[0], out[t])
        assert torch.equal(single[1], scratch[0, t])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_the_chunk_twin_has_the_gradients_of_the_recurrence(kind):
    """In fp32 against the naive recurrence in float64; the same maths in bf16 says how far is too far."""
    inputs, initial = inputs_of(kind, 66), torch.randn(1, 2, 24, 16)
    weight = torch.randn(66, 2, 24)

    def gradients(run, dtype):
        leaves = {name: getattr(inputs, name).clone().to(dtype) for name in ("q", "k", "v", "g", "beta")}
        for leaf in leaves.values():
            leaf.requires_grad_()
        out = run(StepInputs(**leaves))
        return torch.autograd.grad((out * weight.to(dtype)).sum(), list(leaves.values()))

    plan = ChunkPlan.create((66,), torch.device("cpu"))
    got = gradients(lambda leaves: delta_chunk_torch(leaves, initial, plan).out, torch.float32)
    exact, rough = (
        gradients(lambda leaves, dtype=dtype: naive(leaves, initial, (66,), dtype)[0], dtype)
        for dtype in (torch.float64, torch.bfloat16)
    )
    for one, right, rounded in zip(got, exact, rough, strict=True):
        assert right.any()
        assert (one - right).abs().max() <= 2 * (rounded - right).abs().max()


@pytest.mark.parametrize("width", [(), (8,)], ids=["per_head", "per_channel"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates(width, lower_bound):
    torch.manual_seed(1)
    a, b, a_log, dt_bias = torch.randn(7, 4, *width) * 12, torch.randn(7, 4), torch.randn(4), torch.randn(4, *width)
    exact = naive_gates(a, b, a_log, dt_bias, lower_bound, torch.float64)
    twin = delta_gates_torch(a, b, a_log, dt_bias, lower_bound)
    kernel = delta_gates_triton(a, b, a_log, dt_bias, lower_bound)
    for got, same, want in zip(kernel, twin, exact, strict=True):
        assert got.shape == want.shape
        assert_as_good(got, same, want)
    assert (kernel[0] <= 0).all()
    assert lower_bound is None or (kernel[0] >= lower_bound).all()
    tiny = kernel[0][kernel[0] > -1e-4]
    assert len(tiny)  # where 1 + e^x rounds to 1, the decay must not round to none
    assert (tiny < 0).all()


@pytest.mark.parametrize("taps_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("convolve", [causal_conv_torch, causal_conv_triton])
def test_convolution(convolve, dtype, taps_first):
    torch.manual_seed(2)
    x, weight = torch.randn(25, 2, 20).to(dtype)[:, 1], torch.randn(20, 4).to(dtype)  # strided tokens
    windows = torch.randn(5, 20, 3).to(dtype)
    stored = windows.transpose(1, 2).contiguous() if taps_first else windows
    batch = ConvBatch(
        cu_query_lens=torch.tensor([0, 2, 3, 23, 25], dtype=torch.int32),
        max_query_len=20,
        slots=torch.tensor([3, 1, 4, -1]),
    )
    last = torch.full_like(stored, torch.nan)
    how = {"taps_first": taps_first, "out_rows": torch.tensor([2, 0, 4, 1])}
    out = convolve(x, weight, stored, batch, out_windows=last, every_token=False, **how)
    every = torch.full((5, 20, *stored.shape[1:]), torch.nan, dtype=dtype)
    assert torch.equal(out, convolve(x, weight, stored, batch, out_windows=every, every_token=True, **how))
    for begin, end, slot, row in ((0, 2, 3, 2), (2, 3, 1, 0), (3, 23, 4, 4)):
        exact, window = naive_conv(x[begin:end], weight, windows[slot], torch.float64)
        rough, _ = naive_conv(x[begin:end], weight, windows[slot], dtype)
        assert_as_good(out[begin:end], rough, exact) if dtype == torch.float32 else None
        allowed = 2 * (rough - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
        assert (out[begin:end] - exact).abs().max() <= allowed
        held = last[row].T if taps_first else last[row]
        assert torch.equal(held.double(), window)
        assert torch.equal(every[row, end - begin - 1], last[row])
    assert not out[23:].any()
    assert last[[1, 3]].isnan().all()


def rows(layers=2, count=5, width=6, dtype=torch.float32):
    """Strided rows of a larger buffer, NaN all over."""
    return torch.full((layers, count, width + 3), torch.nan, dtype=dtype)[:, :, :width]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy", [copy_rows, copy_rows_torch, copy_rows_triton])
def test_rows_go_where_they_belong(copy, dtype):
    source, target = rows(dtype=dtype), rows(dtype=dtype)
    source[:] = torch.randn(2, 5, 6).to(dtype)
    copy(target, torch.tensor([4, -1, 0, 2]), source, torch.tensor([1, 2, 3, -1]))
    assert torch.equal(target[:, [4, 0]], source[:, [1, 3]])
    assert target[:, [1, 2, 3]].isnan().all()
    copy(target, torch.empty(0, dtype=torch.int64), source, torch.empty(0, dtype=torch.int64))


def test_gather_and_scatter():
    pool = rows()[0]
    pool[[3, 1]] = torch.randn(2, 6)
    held = gather_rows(pool, torch.tensor([3, -1, 1]))
    assert torch.equal(held, torch.stack([pool[3], torch.zeros(6), pool[1]]))
    scatter_rows(pool, torch.tensor([2, -1, 4]), held)
    assert torch.equal(pool[[2, 4]], held[[0, 2]])
    assert pool[0].isnan().all()


def test_bad_input_is_named():
    inputs = inputs_of("gdn", 4)
    with pytest.raises(InputError, match=r"width: got 5, expected 6"):
        copy_rows(rows(), torch.tensor([1]), rows(width=5), torch.tensor([1]))
    with pytest.raises(InputError, match=r"dtype: got torch.bfloat16"):
        copy_rows(rows(), torch.tensor([1]), rows(dtype=torch.bfloat16), torch.tensor([1]))
    with pytest.raises(InputError, match=r"source_rows: got \(2,\)"):
        copy_rows(rows(), torch.tensor([1]), rows(), torch.tensor([1, 2]))
    with pytest.raises(InputError, match="g: got"):
        StepInputs(q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g[:2], beta=inputs.beta)
    with pytest.raises(InputError, match="beta: got"):
        StepInputs(q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta[:2])
    with pytest.raises(InputError, match=r"v.stride: got"):
        StepInputs(q=inputs.q, k=inputs.k, v=torch.zeros(24, 4, 2).permute(1, 2, 0), g=inputs.g, beta=inputs.beta)
    with pytest.raises(InputError, match=r"initial: got \(\(1, 2, 16, 24\)"):
        delta_chunk(inputs, torch.zeros(1, 2, 16, 24), ChunkPlan.create((4,), torch.device("cpu")))
    with pytest.raises(InputError, match="query_lens: got 3, expected a sum of 4"):
        delta_chunk(inputs, torch.zeros(1, 2, 24, 16), ChunkPlan.create((3,), torch.device("cpu")))
    with pytest.raises(InputError, match="scratch"):
        delta_step(
            inputs, torch.zeros(2, 2, 24, 16), torch.tensor([1]), torch.tensor([0, 4]), parents=torch.zeros(1, 4)
        )
    with pytest.raises(InputError, match="gates: got"):
        delta_gates(torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(2), torch.zeros(2))
    with pytest.raises(InputError, match="windows: got"):
        causal_conv(
            torch.zeros(2, 8),
            torch.zeros(8, 4),
            torch.zeros(3, 3, 8),
            ConvBatch(cu_query_lens=torch.tensor([0, 2]), max_query_len=2, slots=torch.tensor([1])),
            taps_first=False,
            out_windows=torch.zeros(3, 3, 8),
            out_rows=torch.tensor([1]),
            every_token=False,
        )
