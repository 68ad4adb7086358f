"""Expanded prefill: chunks that are translated once, merges, and equality with the absorbed form."""

import pytest
import torch

from suite.errors import InputError, RefusedError
from suite.kernels.attention import mla_prefill
from suite.kernels.attention.mla_prefill import MlaPrefill, attend_reference, merge, read_latent
from suite.kernels.attention.reference import execute
from suite.kernels.ids import KernelIds, KVKind, VirtualIds
from tests import mla_vendor
from tests.mla_rig import MODES, LatentRig

NOPE, V_DIM = 24, 20  # of a head before absorption; the rig's rows are 32 + 16
ALL_MODES = pytest.mark.parametrize("mode", MODES)


class Heads:
    """The up-projection of one layer: keys [q_heads, NOPE, latent], values [q_heads, V_DIM, latent]."""

    def __init__(self, rig: LatentRig) -> None:
        generator = torch.Generator().manual_seed(1)
        self.latent = rig.latent
        self.keys, self.values = (
            torch.randn(rig.q_heads, dim, rig.latent, generator=generator) * rig.latent**-0.5 for dim in (NOPE, V_DIM)
        )

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = rows[:, : self.latent], rows[:, self.latent :]
        nope = torch.einsum("td,hnd->thn", latent, self.keys)
        keys = torch.cat([nope, rope[:, None].expand(-1, nope.shape[1], -1)], -1)
        return keys, torch.einsum("td,hvd->thv", latent, self.values)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.einsum("thn,hnd->thd", q[..., :NOPE], self.keys), q[..., NOPE:]], -1)

    def project(self, out: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thd,hvd->thv", out, self.values)


def prefill_of(rig: LatentRig, chunk_tokens: int, launcher: str = "reference") -> MlaPrefill:
    return MlaPrefill(pool=rig.pool, translator=rig.translator, launcher=launcher, chunk_tokens=chunk_tokens)


def both_forms(rig: LatentRig, prefill: MlaPrefill, work: dict[int, int]) -> tuple[torch.Tensor, ...]:
    """Expanded, absorbed, and absorbed in fp64, of the last layer over one batch."""
    batch, layer, heads = rig.batch(work), rig.layers[-1], Heads(rig)
    tokens = sum(work.values())
    q = torch.randn(tokens, rig.q_heads, NOPE + rig.rope, generator=rig.random)
    rows = rig.randn(tokens, 1)[:, 0]
    expanded = prefill.forward(layer.index, batch, q, rows, layer.scale, heads.expand)
    metadata = rig.attention.plan(batch)
    absorbed = heads.project(execute(metadata, layer, heads.absorb(q), rig.pool))
    exact = []
    at = 0
    for row, new in work.items():  # from the pool's own rows, in fp64
        ids = batch.write_ids.tensor[at : at + new]
        assert torch.equal(rig.pool.latent_view(layer.index)[ids], rows[at : at + new])
        known = rig.memory[layer.index, row] = torch.cat([rig.memory[layer.index, row], rows[at : at + new]])
        keys, values = (side.double() for side in heads.expand(known))
        scores = torch.einsum("qhd,khd->qhk", q[at : at + new].double(), keys) * layer.scale
        hidden = torch.ones(new, len(known), dtype=torch.bool).triu(1 + len(known) - new)[:, None]
        exact.append(torch.einsum("qhk,khv->qhv", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
        at += new
    return expanded, absorbed, torch.cat(exact)


@ALL_MODES
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 1000], ids=lambda tokens: f"chunk{tokens}")
@pytest.mark.parametrize("page_size", [1, 4])
def test_expanded_equals_absorbed(mode, chunk_tokens, page_size):
    rig = LatentRig(mode, page_size=page_size)
    prefill = prefill_of(rig, chunk_tokens)
    rig.step({4: 20, 1: 13, 2: 2, 3: 31})
    rig.release(4)
    rig.move()
    for work in ({1: 5, 2: 1, 3: 9}, {5: 3, 2: 4, 1: 1}):  # a request without a prefix among others
        expanded, absorbed, exact = both_forms(rig, prefill, work)
        # each form rounds in its own places: both stay within twice what the other one is off
        floor = torch.finfo(torch.float32).eps * exact.abs().max()
        assert (expanded - exact).abs().max() <= 2 * (absorbed - exact).abs().max() + 2 * floor


@ALL_MODES
def test_chunks_cover_every_prefix_once(mode):
    rig = LatentRig(mode, page_size=4)
    rig.step({1: 13, 2: 2, 3: 31})
    batch = rig.batch({1: 5, 2: 1, 4: 2, 3: 9})
    for chunk_tokens, step in ((1, 1), (15, 3), (16, 4), (39, 8), (4000, 1000)):
        chunks = prefill_of(rig, chunk_tokens).chunks(batch)
        assert len(chunks) == -(-31 // step)
        assert max(sum(chunk.lens_host) for chunk in chunks) <= max(chunk_tokens, batch.size)
        for request, (row, length) in enumerate({1: 13, 2: 2, 4: 0, 3: 31}.items()):
            parts = [chunk.ids.tensor[slice(*chunk.cu_lens[request : request + 2].tolist())] for chunk in chunks]
            virtual = rig.translator.req_to_token[row, :length].long()
            assert torch.equal(torch.cat(parts), rig.translator.write_loc(VirtualIds(virtual)).tensor)
            assert [len(part) for part in parts] == [chunk.lens_host[request] for chunk in chunks]


def test_the_prefix_is_translated_once_for_all_layers(monkeypatch):
    rig = LatentRig("unified", page_size=4)
    prefill = prefill_of(rig, 8)
    rig.step({1: 13, 2: 9, 3: 8})
    filled = []
    fill = rig.translator.fill_read_stream
    monkeypatch.setattr(rig.translator, "fill_read_stream", lambda *given: filled.append(fill(*given)))
    batch = rig.batch({1: 5, 2: 1})
    chunks = prefill.chunks(batch)
    assert prefill.chunks(batch) is chunks
    assert len(filled) == len(chunks) == 4
    rig.release(3)
    assert rig.move() > 0
    assert prefill.chunks(batch) is not chunks, "ids that a move made stale"


def test_the_first_chunk_of_a_prompt_has_no_prefix():
    rig = LatentRig("unified")
    prefill = prefill_of(rig, 8)
    batch = rig.batch({1: 5, 2: 9})
    assert prefill.chunks(batch) == ()


def test_merging_with_nothing():
    out, lse = torch.randn(3, 2, 5), torch.randn(3, 2)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge((out, lse), nothing), merge(nothing, (out, lse))):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    both = merge(nothing, nothing)
    assert not both[0].any()
    assert (both[1] == -torch.inf).all()


def test_the_read_door_takes_kernel_ids_as_they_are():
    rig = LatentRig("unified")
    rig.step({1: 13})
    ids = rig.translator.write_loc(VirtualIds(rig.translator.req_to_token[1, :13].long()))
    assert torch.equal(read_latent(rig.pool, 1, ids), rig.memory[1, 1])
    with pytest.raises(TypeError, match="read of layer 1: needs KernelIds, got VirtualIds"):
        read_latent(rig.pool, 1, VirtualIds(ids.tensor))
    with pytest.raises(TypeError, match="needs KernelIds of the full pool, got ids of the window pool"):
        read_latent(rig.pool, 1, KernelIds(ids.tensor, KVKind.WINDOW))


def test_fa3_answers_as_the_oracle(monkeypatch):
    mla_vendor.stand_in(monkeypatch)
    monkeypatch.setattr(mla_prefill, "launcher_refusal", lambda launcher, device: None)
    rigs = [LatentRig("unified", page_size=4) for _ in range(2)]
    for rig in rigs:
        rig.step({1: 13, 2: 2, 3: 31})
    prefills = prefill_of(rigs[0], 16, "native"), prefill_of(rigs[1], 16)
    assert prefills[0]._attend is mla_prefill.attend_fa3
    assert prefills[1]._attend is attend_reference
    (one, absorbed, exact), (other, *_) = (
        both_forms(rig, prefill, {1: 5, 4: 3, 3: 9}) for rig, prefill in zip(rigs, prefills, strict=True)
    )
    floor = torch.finfo(torch.float32).eps * exact.abs().max()
    for each in (one, other):
        assert (each - exact).abs().max() <= 2 * (absorbed - exact).abs().max() + 2 * floor


def test_refusals_state_need_and_got(monkeypatch):
    rig = LatentRig("static")
    with pytest.raises(InputError, match="chunk_tokens: got 0"):
        prefill_of(rig, 0)
    with pytest.raises(RefusedError, match="mla_prefill: needs launcher native or reference, got interpreter"):
        prefill_of(rig, 8, "interpreter")
    with pytest.raises(RefusedError, match="mla_prefill: needs sm_90, got cpu"):
        prefill_of(rig, 8, "native")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in (((10, 0), "needs sm_90, got sm_100"), ((9, 0), "needs the package sglang-kernel")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert reason in mla_prefill.launcher_refusal("native", "cuda")
