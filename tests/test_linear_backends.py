"""GDN, KDA and Lightning on real pools: prefill, decode, verify and commit against the naive recurrence.

Pools are poisoned: whoever reads a slot that is not its own, or a fresh one, gets NaN.
"""

import pytest
import torch

from suite.errors import InputError, InvariantError
from suite.kernels.batch import ForwardMode
from suite.kernels.linear.delta import DeltaInputs
from suite.kernels.linear.metadata import Tracking
from suite.kernels.pools.state import KernelSlots
from tests.linear_rig import LAYERS, OFFSET, POISON_BYTE, LinearRig, batch_shape

FAMILIES = pytest.mark.parametrize("family", ["gdn", "kda", "lightning"])
LAUNCHERS = pytest.mark.parametrize("launcher", ["reference", "interpreter"])
LAYOUTS = pytest.mark.parametrize("layout", ["static", "strided"])
D = 4


def rig_of(family: str, launcher: str, layout: str = "strided", **more) -> LinearRig:
    """The interpreter takes 15 ms a program, so it runs the second layer only."""
    return LinearRig(family, launcher, layout, layers=LAYERS if launcher == "reference" else LAYERS[1:], **more)


def part(inputs, rows):
    """The same inputs, other tokens."""
    return type(inputs)(**{name: getattr(inputs, name)[rows] for name in inputs.__dataclass_fields__})


@FAMILIES
@LAUNCHERS
@LAYOUTS
def test_prefill_and_decode_follow_the_recurrence(family, launcher, layout):
    rig = rig_of(family, launcher, layout)
    rig.step({5: 67, 2: 3})
    rig.step({2: 1, 5: 1})
    rig.step({2: 64, 3: 1})  # a later chunk of one prompt beside a prompt of one token
    rig.step({3: 1, 5: 1, 2: 1}, pad=(0, -1))
    assert all(stream[:, 1].isnan().all() and stream[:, 0].isfinite().all() for stream in rig.pool.streams())
    if layout == "strided":
        end = OFFSET + (rig.slots + 1) * rig.pool.geometry.slot_bytes
        assert (rig.buffer[:OFFSET] == POISON_BYTE).all()
        assert (rig.buffer[end:] == POISON_BYTE).all()


@LAUNCHERS
def test_the_safe_gate(launcher):
    rig = rig_of("kda", launcher, safe_gate=True)
    rig.step({1: 5})
    rig.step({1: 1})


@FAMILIES
def test_a_slot_is_free_for_the_next_request(family):
    rig = rig_of(family, "reference")
    rig.step({4: 9, 2: 2})
    rig.lengths[4] = 0  # another request in a slot that nobody cleared
    rig.step({4: 70})
    rig.step({4: 1, 2: 1})


def assert_same(launcher, got, want, why=None):
    """To the bit, NaN being itself; the torch twin by rounding: on some CPUs its sums depend on the batch's shape."""
    if launcher == "reference":
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), why


@FAMILIES
@LAUNCHERS
def test_verify_and_commit_equal_decoding_the_accepted_tokens(family, launcher):
    verified, decoded = (rig_of(family, launcher, seed=7) for _ in range(2))
    work, accepts = {3: D, 1: D - 1, 6: D, 2: 1}, [2, 0, D, 1]
    for rig in (verified, decoded):
        rig.step({3: 5, 1: 4, 6: 6, 2: 5})
    verified.backend.reserve_verify(5, D)
    before = verified.snapshot()
    _, metadata = verified.plan(work, verify=True)
    inputs = {layer: verified.inputs(sum(work.values())) for layer in verified.layers}
    outs = {layer: verified.backend.forward(verified.model[layer], inputs[layer], metadata) for layer in inputs}
    assert verified.changed(before) == set(), "verify wrote a committed state"

    begins = dict(zip(work, (0, D, 2 * D - 1, 3 * D - 1), strict=True))
    for round_ in range(D):
        live = {slot: 1 for slot, accepted in zip(work, accepts, strict=True) if round_ < accepted}
        if not live:
            continue
        rows = [begins[slot] + round_ for slot in live]
        _, step = decoded.plan(live)
        for layer in inputs:
            out = decoded.backend.forward(decoded.model[layer], part(inputs[layer], rows), step)
            assert_same(launcher, out, outs[layer][rows])

    verified.backend.commit(metadata, torch.tensor(accepts))
    for layer in verified.layers:
        at = LAYERS.index(layer)
        for got, want in zip(verified.pool.streams(), decoded.pool.streams(), strict=True):
            assert_same(launcher, got[at], want[at], f"layer {layer}: a rejected suffix left a trace")


@LAUNCHERS
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_a_tree_commits_its_branch(family, launcher):
    tree, chain = (rig_of(family, launcher, seed=3) for _ in range(2))
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, -1, 1, 1, 3, 2]], dtype=torch.int32)
    branches = {2: [0, 2, 4, 5], 5: [1, 3, 4]}
    for rig in (tree, chain):
        rig.step({2: 4, 5: 2})
    tree.backend.reserve_verify(2, 6)
    _, metadata = tree.plan({2: 6, 5: 6}, verify=True, parents=parents)
    inputs = {layer: tree.inputs(12) for layer in tree.layers}
    before = tree.snapshot()
    outs = {layer: tree.backend.forward(tree.model[layer], inputs[layer], metadata) for layer in inputs}
    assert tree.changed(before) == set()
    for first, (slot, branch) in zip((0, 6), branches.items(), strict=True):
        for node in branch:
            _, step = chain.plan({slot: 1})
            for layer in inputs:
                out = chain.backend.forward(chain.model[layer], part(inputs[layer], [first + node]), step)
                assert_same(launcher, out[0], outs[layer][first + node], f"node {node}")
    with pytest.raises(InputError, match="commit_nodes for a tree"):
        tree.backend.commit(metadata, torch.tensor([4, 3]))
    tree.backend.commit_nodes(metadata, torch.tensor([5, 4]))
    for layer in tree.layers:
        at = LAYERS.index(layer)
        for got, want in zip(tree.pool.streams(), chain.pool.streams(), strict=True):
            assert_same(launcher, got[at], want[at])


@FAMILIES
@LAUNCHERS
def test_padding_touches_slot_0_and_freed_slots_nothing(family, launcher):
    rig = rig_of(family, launcher)
    rig.backend.reserve_verify(3, 2)
    rig.step({4: 3})
    for verify in (False, True):
        before = rig.snapshot()
        batch, metadata = rig.plan({4: 1}, pad=(0, -1), verify=verify)
        layer = rig.layers[0]
        inputs = rig.inputs(3)
        out = rig.backend.forward(rig.model[layer], inputs, metadata)
        if verify:
            assert rig.changed(before) == set()
            rig.backend.commit(metadata, torch.tensor([1, 1, 1]))
        assert rig.changed(before) <= {0, 4}
        assert 4 in rig.changed(before)
        assert not out[2].any(), "a freed slot has an output"
        assert out.isfinite().all()
        assert all(stream[:, 0].isfinite().all() for stream in rig.pool.streams())
        assert len(batch.query_lens_host) == 3


@FAMILIES
@LAUNCHERS
def test_prefill_keeps_chunk_boundary_states(family, launcher):
    whole, piece = (rig_of(family, launcher, seed=5) for _ in range(2))
    track = Tracking(requests=(1, 1, 0), tokens=(64, 128, 64), slots=KernelSlots(torch.tensor([3, 4, -1])))
    _, metadata = whole.plan({1: 70, 2: 128}, tracking=track)
    layer = whole.layers[-1]
    inputs = whole.inputs(198)
    whole.backend.forward(whole.model[layer], inputs, metadata)
    _, metadata = piece.plan({2: 64})
    piece.backend.forward(piece.model[layer], part(inputs, slice(70, 134)), metadata)
    one, other = whole.pool.state_views(layer), piece.pool.state_views(layer)
    for got, want in ((one.temporal, other.temporal), (one.conv, other.conv)):
        if got is None or want is None:
            assert family == "lightning"
            continue
        assert torch.equal(got[3], want[2]), "after 64 tokens"
        assert torch.equal(got[4], got[2]), "after all 128"
        assert got[6].isnan().all()
    with pytest.raises(InputError, match=r"tracking.tokens: got 65, expected a multiple of 64 up to 70"):
        whole.plan({1: 70}, tracking=Tracking(requests=(0,), tokens=(65,), slots=KernelSlots(torch.tensor([3]))))


@FAMILIES
def test_captured_buffers_follow_slots_and_never_move(family):
    captured, eager = (rig_of(family, "reference", seed=2) for _ in range(2))
    addresses = set()
    for rig in (captured, eager):
        rig.step({1: 4, 2: 3, 5: 2})
        rig.backend.reserve_verify(3, D)
        rig.backend.capture(3)
    for slots, verify in (([2, 1, 0], False), ([5, -1, 1], False), ([1, 5, 0], True), ([2, 0, -1], True)):
        rows = [*range(3)] if not verify else [*range(3 * D)]
        work = KernelSlots(torch.tensor(slots))
        news = [D if verify else 1] * 3
        batch = batch_shape([20] * 3, news, "cpu", ForwardMode.EXTEND if verify else ForwardMode.DECODE)
        one = captured.backend.replay(batch, work, verify=verify)
        other = eager.backend.plan(batch, work, verify=verify)
        addresses.add((verify, one.slots.tensor.data_ptr(), one.cu_query_lens.data_ptr()))
        inputs = captured.inputs(len(rows))
        for layer in captured.layers:
            outs = [r.backend.forward(r.model[layer], inputs, m) for r, m in ((captured, one), (eager, other))]
            assert torch.equal(*outs)
        if verify:
            for rig, metadata in ((captured, one), (eager, other)):
                rig.backend.commit(metadata, torch.tensor([2, 4, 4]))
        assert all(torch.equal(a, b) for a, b in zip(captured.snapshot(), eager.snapshot(), strict=True))
    assert len(addresses) == 2
    with pytest.raises(InputError, match="at most 3 requests of 4 new tokens"):
        captured.backend.replay(batch_shape([9] * 4, [1] * 4, "cpu", ForwardMode.EXTEND), work, verify=True)


def test_misuse_is_named():
    rig = rig_of("gdn", "reference")
    with pytest.raises(InvariantError, match="gdn: verify before reserve_verify"):
        rig.plan({1: 2}, verify=True)
    batch, _ = rig.plan({1: 1})
    with pytest.raises(InvariantError, match="gdn: replay of decode before its capture"):
        rig.backend.replay(batch, KernelSlots(torch.tensor([1])))
    rig.backend.reserve_verify(1, 2)
    with pytest.raises(InputError, match="at most 2, the reserved draft tokens"):
        rig.plan({1: 3}, verify=True)
    with pytest.raises(InputError, match="at most 1 requests to verify"):
        rig.plan({1: 1, 2: 1}, verify=True)
    with pytest.raises(TypeError, match=r"gdn.plan: needs KernelSlots, got Tensor"):
        rig.backend.plan(batch, torch.tensor([1]))
    batch, metadata = rig.plan({1: 1})
    with pytest.raises(InvariantError, match="commit after decode, needs a verify"):
        rig.backend.commit(metadata, torch.tensor([1]))
    inputs = rig.inputs(1)
    with pytest.raises(InputError, match=r"mixed.dtype: got torch.bfloat16, expected torch.float32"):
        rig.backend.forward(rig.model[1], DeltaInputs(mixed=inputs.mixed.bfloat16(), a=inputs.a, b=inputs.b), metadata)
