"""Probes on a CPU: every backend's metadata by the oracle, and our kernels under the interpreter."""

import pytest

from tests.attention_rig import Rig
from tests.mla_rig import MODES, LatentRig
from tests.probes import DRAFT_TOKENS, FORWARDS, probe
from tests.test_attention_mla import CASES, ORACLE

MHA = [("reference", 4), ("triton", 1), ("fa3", 4), ("fa4", 16), ("flashinfer", 4), ("trtllm_mha", 16)]
MLA = [(name, size) for name, launcher, size in CASES if launcher == ORACLE]


def windowed(mode: str, backend: str, launcher: str, page_size: int) -> Rig:
    """Positions fit the width of a head, so every one is told apart."""
    return Rig(
        mode, backend, launcher, page_size, window=10, sinks=False, q_heads=2, kv_heads=1, head_dim=64, context=64,
        requests=3,
    )  # fmt: skip


def latent(mode: str, backend: str, launcher: str, page_size: int) -> LatentRig:
    return LatentRig(
        mode, backend, launcher, page_size, latent=64, q_heads=2, context=max(64, page_size), requests=3, depth=2
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "backend", "page_size"), [
    *((windowed, *case) for case in MHA), *((latent, *case) for case in MLA)
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_positions_that_metadata_grants(make, backend, page_size, mode):
    rig = make(mode, backend, ORACLE, page_size)
    rig.layers = rig.layers[:2]
    rig.attention.capture(4, DRAFT_TOKENS)
    for work, kind, captured in FORWARDS:
        probe(rig, work, kind, captured, lanes=4)
        rig.evict(work)
        rig.move()


@pytest.mark.parametrize("mode", ["static", "unified"])
@pytest.mark.parametrize("make", [windowed, latent], ids=["windows", "latent"])
def test_positions_that_our_kernels_read(make, mode):
    rig = make(mode, "triton", "interpreter", 4)
    rig.layers = rig.layers[:2]
    rig.attention.capture(4, DRAFT_TOKENS)
    for work, kind, captured in FORWARDS[:5]:
        probe(rig, work, kind, captured, lanes=4)
        rig.evict(work)
        rig.move()
