"""Attention without a pool: equally long sequences attend to themselves in one masked matrix.

Training uses it, and so does every comparison with an independent model. It is
the definition of what a paged backend must return.
"""

import torch

from suite.kernels.geometry import AttentionLayer
from suite.models.gpt_oss import Attend


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: may row's token attend to column's? Causal, and within `window` where given."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def dense_attend(sequences: int, keep: torch.Tensor | None = None) -> Attend:
    """`attend` over `sequences` sequences of equal length, flattened one after the other.

    keep: [layers, sequences], what each sequence's output of each layer is multiplied by (training drops
    layers with it); None keeps all.
    """

    def attend(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length, group = len(q) // sequences, layer.q_heads // layer.kv_heads
        q5 = q.view(sequences, length, layer.kv_heads, group, layer.head_dim)
        k4, v4 = (x.view(sequences, length, layer.kv_heads, layer.head_dim) for x in (k, v))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q5, k4).float() * layer.scale
        scores = scores.masked_fill(~visible(length, layer.window, q.device), -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        shares = scores.softmax(-1)[..., :length]
        out = torch.einsum("bhgqk,bkhd->bqhgd", shares.to(v.dtype), v4)
        if keep is not None:
            out = out * keep[layer.index].to(out.dtype).view(-1, 1, 1, 1, 1)
        return out.reshape(q.shape)

    return attend
