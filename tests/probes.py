"""Which positions a backend reads, told by its outputs.

Queries of zeros weigh all they see alike, and the value row of position j is one-hot at j modulo its width: an
output times the number of positions that should be seen counts how often each was. A row that holds anything
else (poison, another request's, another layer's) shows as a count that is not the expected one.
"""

import torch

from suite.kernels.attention.base import Metadata
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer
from tests.attention_rig import Rig, Work

DRAFT_TOKENS = 3
# new tokens per request, the mode, captured: prefill, chunks of it, and decodes and verifies that cross pages
FORWARDS = (
    ({1: 17, 2: 30, 3: 5}, ForwardMode.EXTEND, False),
    ({2: 1, 1: 1}, ForwardMode.DECODE, False),
    ({1: DRAFT_TOKENS, 2: DRAFT_TOKENS}, ForwardMode.VERIFY, False),
    ({1: DRAFT_TOKENS, 3: DRAFT_TOKENS}, ForwardMode.VERIFY, True),
    ({2: 1, 1: 1, 3: 1}, ForwardMode.DECODE, True),
    ({1: 4, 2: 1, 3: 9}, ForwardMode.EXTEND, False),
    ({3: DRAFT_TOKENS, 2: DRAFT_TOKENS}, ForwardMode.VERIFY, True),
)


def probe(rig: Rig, work: Work, mode: ForwardMode, captured: bool, lanes: int) -> None:
    """One forward of every layer of `rig`; a captured one is padded to `lanes` requests."""
    batch = rig.batch(work, mode, pad_to=lanes if captured else 0)
    metadata = rig.attention.replay(batch) if captured else rig.attention.plan(batch)
    for layer in rig.layers:
        out = ask(rig, layer, batch, metadata)
        assert out.isfinite().all(), f"layer {layer.index}: poison was read"
        for token, at in enumerate(batch.positions.tolist()[: sum(work.values())]):
            seen = torch.arange(0 if layer.window is None else max(0, at - layer.window + 1), at + 1)
            expected = torch.bincount(seen % layer.out_dim, minlength=layer.out_dim).to(out)
            counted = (out[token] * len(seen)).round()
            where = f"{mode}, layer {layer.index}, token {token} at {at}"
            assert torch.equal(counted, expected.expand_as(counted)), where


def ask(rig: Rig, layer: AttentionLayer, batch: ForwardBatch, metadata: Metadata) -> torch.Tensor:
    """Outputs [tokens, q_heads, out_dim] float64 of queries and keys of zeros and one-hot values."""
    tokens, device = batch.input_ids.numel(), batch.positions.device
    q = torch.zeros(tokens, layer.q_heads, layer.head_dim, dtype=rig.dtype, device=device)
    k = torch.zeros(tokens, layer.kv_heads, layer.head_dim, dtype=rig.dtype, device=device)
    value = torch.nn.functional.one_hot(batch.positions % layer.out_dim, layer.out_dim).to(rig.dtype)[:, None]
    if layer.is_latent:
        k[..., : layer.out_dim] = value
        return rig.attention.forward(layer, q, k, None, metadata).double()
    return rig.attention.forward(layer, q, k, value.expand_as(k).contiguous(), metadata).double()
