"""Token mixers without a pool: equally long sequences attend to themselves in one masked matrix.

Training uses it, and so does every comparison with an independent model. It is
the definition of what a paged backend must return.
"""

import torch

from suite.kernels.geometry import AttentionLayer


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: may row's token attend to column's? Causal, and within `window` where given."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


class DenseMixers:
    """`Mixers` over `sequences` sequences of equal length, flattened one after the other.

    keep: [layers, sequences], what each sequence's output of each attention layer is multiplied by (training drops
    layers with it); None keeps all.
    """

    expands_latent = False

    def __init__(self, sequences: int, keep: torch.Tensor | None = None) -> None:
        self.sequences, self.keep = sequences, keep

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        v = k[..., : layer.out_dim] if v is None else v
        sequences, length, group = self.sequences, len(q) // self.sequences, layer.q_heads // layer.kv_heads
        q5 = q.view(sequences, length, layer.kv_heads, group, layer.head_dim)
        k4, v4 = (x.reshape(sequences, length, layer.kv_heads, x.shape[-1]) for x in (k, v))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q5, k4).float() * layer.scale
        scores = scores.masked_fill(~visible(length, layer.window, q.device), -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.view(1, layer.kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        shares = scores.softmax(-1)[..., :length]
        out = torch.einsum("bhgqk,bkhd->bqhgd", shares.to(v.dtype), v4)
        if self.keep is not None:
            out = out * self.keep[layer.index].to(out.dtype).view(-1, 1, 1, 1, 1)
        return out.reshape(len(q), layer.q_heads, layer.out_dim)

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        """Nobody is fed."""
