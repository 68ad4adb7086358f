"""Probes on a GPU: the positions that each native kernel reads, for windows, verify and padded captured batches."""

import pytest
import torch

from suite.kernels.attention.support import native_refusal
from suite.kernels.attention.triton import TritonBackend
from tests.attention_rig import Rig
from tests.mla_rig import LatentRig
from tests.probes import DRAFT_TOKENS, FORWARDS, probe

pytestmark = pytest.mark.gpu

MHA = [("triton", 1), ("triton", 16), ("fa3", 1), ("fa3", 16), ("flashinfer", 16), ("trtllm_mha", 16)]
MLA = [("triton", 1), ("triton", 64), ("fa3", 64), ("flashinfer_mla", 64), ("flashmla", 64)]
POOLS = pytest.mark.parametrize("mode", ["static", "unified", "unified_token_major"])


def run(rig: Rig) -> None:
    rig.attention.capture(4, DRAFT_TOKENS)
    for work, kind, captured in FORWARDS:
        probe(rig, work, kind, captured, lanes=4)
        rig.evict(work)
        rig.move()


def skip_unless_native(backend: str) -> None:
    reason = TritonBackend.launchers("cuda")["native"] if backend == "triton" else native_refusal(backend, "cuda")
    if reason:
        pytest.skip(reason)


@POOLS
@pytest.mark.parametrize(("backend", "page_size"), MHA)
@pytest.mark.parametrize("window", [None, 10, 128])
def test_positions_of_keys_and_values(backend, page_size, mode, window):
    skip_unless_native(backend)
    run(
        Rig(mode, backend, "native", page_size, window=window, sinks=False, q_heads=16, kv_heads=2, head_dim=128,
            context=96, requests=3, dtype=torch.bfloat16, device="cuda")
    )  # fmt: skip


@POOLS
@pytest.mark.parametrize(("backend", "page_size"), MLA)
def test_positions_of_latent_rows(backend, page_size, mode):
    skip_unless_native(backend)
    run(
        LatentRig(mode, backend, "native", page_size, latent=512, rope=64, q_heads=16, context=128, requests=3,
                  depth=2, dtype=torch.bfloat16, device="cuda")
    )  # fmt: skip
