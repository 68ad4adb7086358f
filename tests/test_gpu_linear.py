"""On a GPU: the compiled linear-attention kernels against the naive recurrence, at the real models' head shapes.

bf16 inputs, fp32 states, 128 x 128 heads; poisoned strided pools. A few seconds each once compiled.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from suite.kernels.batch import ForwardMode
from suite.kernels.linear.gdn import flashinfer_prefill
from suite.kernels.linear.naive import naive_delta
from suite.kernels.ops.delta_chunk import ChunkPlan, delta_chunk_torch, delta_chunk_triton
from suite.kernels.ops.delta_step import StepInputs, delta_step
from suite.kernels.ops.state_rows import gather_rows
from suite.kernels.pools.state import KernelSlots, StateGeometry, StatePool
from tests.linear_rig import LinearRig, assert_earned, batch_shape

pytestmark = pytest.mark.gpu

FAMILIES = pytest.mark.parametrize("family", ["gdn", "kda", "lightning"])
D = 4


def gpu_rig(family: str, **more) -> LinearRig:
    heads = {"gdn": (16, 32), "kda": (8, 8), "lightning": (8, 8)}[family]
    shape = {"k_heads": heads[0], "v_heads": heads[1], "k_dim": 128, "v_dim": 128}
    return LinearRig(family, "native", "strided", device="cuda", dtype=torch.bfloat16, layers=(4,), **shape, **more)


@FAMILIES
def test_prefill_and_decode_follow_the_recurrence(family):
    rig = gpu_rig(family)
    rig.step({5: 130, 2: 3})
    rig.step({2: 1, 5: 1})
    rig.step({2: 64, 3: 1})
    rig.step({3: 1, 5: 1, 2: 1}, pad=(0, -1))
    assert all(stream[:, 1].isnan().all() and stream[:, 0].isfinite().all() for stream in rig.pool.streams())


def test_the_safe_gate():
    rig = gpu_rig("kda", safe_gate=True)
    rig.step({1: 70})
    rig.step({1: 1})


@FAMILIES
def test_verify_reads_and_commit_takes_the_accepted_prefix(family):
    rig = gpu_rig(family)
    work, accepts = {3: D, 1: D - 1, 6: D, 2: 1}, [2, 0, D, 1]
    rig.step({3: 5, 1: 4, 6: 6, 2: 5})
    rig.backend.reserve_verify(5, D)
    before, layer = rig.snapshot(), rig.layers[0]
    _, metadata = rig.plan(work, verify=True)
    inputs = rig.inputs(sum(work.values()))
    out = rig.backend.forward(rig.model[layer], inputs, metadata)
    assert rig.changed(before) == set(), "verify wrote a committed state"
    rig.backend.commit(metadata, torch.tensor(accepts, device="cuda"))
    assert rig.changed(before) == {3, 6, 2}
    begin, views = 0, rig.pool.state_views(layer)
    for (slot, new), accepted in zip(work.items(), accepts, strict=True):
        mine, memory = slice(begin, begin + new), rig.memory[layer, slot]
        begin += new
        exact, states, _ = rig.oracle(layer, inputs, mine, memory.window, memory.exact, torch.float64)
        rough, lost, _ = rig.oracle(layer, inputs, mine, memory.window, memory.rough, torch.bfloat16)
        assert_earned(out[mine], exact, rough, f"slot {slot}")
        if accepted:
            at = accepted - 1
            assert_earned(views.temporal[slot], states[at], lost[at], f"slot {slot}: state after {accepted}")


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_a_tree_starts_every_node_from_its_parent(family):
    rig = gpu_rig(family)
    parents = [-1, 0, 0, 1, 2, 4]
    rig.step({2: 4})
    rig.backend.reserve_verify(1, 6)
    tree = torch.tensor([parents], dtype=torch.int32, device="cuda")
    _, metadata = rig.plan({2: 6}, verify=True, parents=tree)
    inputs, layer = rig.inputs(6), rig.layers[0]
    out = rig.backend.forward(rig.model[layer], inputs, metadata)
    memory = rig.memory[layer, 2]
    for branch in ([0, 1, 3], [0, 2, 4, 5]):
        path = type(inputs)(**{name: getattr(inputs, name)[branch] for name in ("mixed", "a", "b")})
        whole = slice(0, len(branch))
        exact, states, _ = rig.oracle(layer, path, whole, memory.window, memory.exact, torch.float64)
        rough, lost, _ = rig.oracle(layer, path, whole, memory.window, memory.rough, torch.bfloat16)
        assert_earned(out[branch], exact, rough, f"branch {branch}")
        scratch = rig.backend.scratch.state_views(layer).temporal[0, branch[-1]]
        assert_earned(scratch, states[-1], lost[-1], f"branch {branch}: state")


@FAMILIES
def test_a_captured_graph_follows_slots(family):
    captured, eager = (gpu_rig(family, seed=2) for _ in range(2))
    for rig in (captured, eager):
        rig.step({1: 4, 2: 3, 5: 2})
        rig.backend.reserve_verify(3, D)
        rig.backend.capture(3)
    for verify in (False, True):
        new, layer = D if verify else 1, captured.layers[0]
        mode = ForwardMode.EXTEND if verify else ForwardMode.DECODE
        batch = batch_shape([20] * 3, [new] * 3, "cuda", mode)
        inputs = captured.inputs(3 * new)
        nowhere = KernelSlots(torch.tensor([-1, -1, -1], device="cuda"))  # warms up and captures without a trace
        metadata = captured.backend.replay(batch, nowhere, verify=verify)
        captured.backend.forward(captured.model[layer], inputs, metadata)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = captured.backend.forward(captured.model[layer], inputs, metadata)
        for order in ([2, 1, 0], [5, -1, 1], [1, 5, 2]):
            slots = KernelSlots(torch.tensor(order, device="cuda"))
            metadata = captured.backend.replay(batch, slots, verify=verify)
            graph.replay()
            other = eager.backend.plan(batch, slots, verify=verify)
            expected = eager.backend.forward(eager.model[layer], inputs, other)
            assert torch.equal(out, expected)
            if verify:
                for rig, work in ((captured, metadata), (eager, other)):
                    rig.backend.commit(work, torch.tensor([2, 4, 1], device="cuda"))
            assert all(torch.equal(a, b) for a, b in zip(captured.snapshot(), eager.snapshot(), strict=True))


@pytest.mark.parametrize("per_channel", [False, True])
def test_fp32_is_not_tensor_float(per_channel):
    """The chunk kernels on fp32 inputs beat the same maths on inputs rounded to TF32's ten bits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(130, 2, 128, device="cuda") for _ in range(3))
    g = -torch.rand(130, 2, 128, device="cuda") if per_channel else -torch.rand(130, 2, device="cuda")
    beta, initial = torch.rand(130, 2, device="cuda"), torch.randn(1, 2, 128, 128, device="cuda")
    plan = ChunkPlan.create((130,), torch.device("cuda"))
    exact, states = naive_delta(q, k, v, g, beta, initial[0], dtype=torch.float64)
    got = delta_chunk_triton(StepInputs(q=q, k=k, v=v, g=g, beta=beta), initial, plan)
    rounded = [x.half().float() for x in (q, k, v)]  # as many bits as TF32 keeps
    rough = delta_chunk_torch(StepInputs(**dict(zip("qkv", rounded, strict=True)), g=g, beta=beta), initial, plan)
    assert (got.out - exact).abs().max() <= (rough.out - exact).abs().max()
    assert (got.final[0] - states[-1]).abs().max() <= (rough.final[0] - states[-1]).abs().max()


def test_states_beyond_2_31_elements():
    """The last slot of a strided pool of 9 GB: its byte offset and its element offset pass 2^31."""
    geometry = StateGeometry(layers=tuple(range(36)), conv_dim=8192, v_heads=32, v_dim=128, k_dim=128)
    slots = 120
    buffer = torch.empty((slots + 1) * geometry.slot_bytes, dtype=torch.uint8, device="cuda")
    pool = StatePool.strided(geometry, slots, buffer)
    last = pool.state_views(35).temporal
    assert last.stride(0) * slots > 2**31
    last[[1, slots]] = torch.randn(2, 32, 128, 128, device="cuda")
    near = gather_rows(last, torch.tensor([slots], device="cuda"))
    assert torch.equal(near[0], last[slots])
    untouched = last[1].clone()
    q, k = (torch.randn(1, 16, 128, device="cuda") for _ in range(2))
    v, g, beta = torch.randn(1, 32, 128, device="cuda"), -torch.rand(1, 32, device="cuda"), torch.rand(1, 32).cuda()
    inputs, offsets = StepInputs(q=q, k=k, v=v, g=g, beta=beta), torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    far = delta_step(inputs, last, torch.tensor([slots], device="cuda"), offsets)
    assert torch.equal(far, delta_step(inputs, near, torch.tensor([0], device="cuda"), offsets))
    assert torch.equal(last[slots], near[0])
    assert torch.equal(last[1], untouched)
    pool.copy_slots(KernelSlots(torch.tensor([slots], device="cuda")), KernelSlots(torch.tensor([2], device="cuda")))
    assert torch.equal(last[2], near[0])


def test_flashinfer_prefill_where_it_is_built():
    """Skipped unless its module lies prebuilt beside the package: compiling it takes longer than a test may."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package flashinfer-python, which is not installed")
    if not list((Path(spec.origin).parent / "data" / "aot").glob("*gdn*")):
        pytest.skip("needs flashinfer's gdn_prefill prebuilt, got none under data/aot")
    torch.manual_seed(0)
    q, k = (torch.randn(133, 16, 128, device="cuda").bfloat16() for _ in range(2))
    v = torch.randn(133, 32, 128, device="cuda").bfloat16()
    g, beta = -torch.rand(133, 32, device="cuda"), torch.rand(133, 32, device="cuda")
    initial = torch.randn(2, 32, 128, 128, device="cuda")
    inputs = StepInputs(q=q, k=k, v=v, g=g, beta=beta)
    got = flashinfer_prefill(inputs, initial, torch.tensor([0, 3, 133], dtype=torch.int32, device="cuda"))
    for request, mine in enumerate((slice(0, 3), slice(3, 133))):
        args = (q[mine], k[mine], v[mine], g[mine], beta[mine], initial[request])
        exact, states = naive_delta(*args, dtype=torch.float64)
        rough, lost = naive_delta(*args, dtype=torch.bfloat16)
        assert_earned(got.out[mine], exact, rough, f"request {request}")
        assert_earned(got.final[request], states[-1], lost[-1], f"request {request}: state")
