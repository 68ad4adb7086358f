"""How well a checkpoint answers, clean and with some of its stored rows replaced.

Exact match of the greedy answer, found in one pass: the prompt and the right
answer are read together, and the answer counts where every word of it was the
most likely one.
"""

import torch

from suite.kernels.geometry import AttentionLayer
from suite.kernels.ids import KVKind
from suite.models.dense import DenseMixers
from suite.models.gpt_oss import GptOss
from suite.models.languages import question


def flat_positions(sequences: int, length: int, device: torch.device | str) -> torch.Tensor:
    """0 .. length-1 for each sequence, flattened."""
    return torch.arange(length, device=device).repeat(sequences)


@torch.no_grad()
def exact_match(
    model: GptOss, task: str, *, items: int, length: int, seed: int, rows: int = 64, corrupt: "Corruption | None" = None
) -> float:
    """Share of `items` questions of `task` answered in full."""
    device, right = model.lm_head.weight.device, 0
    for first in range(0, items, rows):
        asked = [question(task, seed, index, length) for index in range(first, min(items, first + rows))]
        ids = torch.tensor([prompt + answer for prompt, answer in asked], device=device)
        mixers = DenseMixers(len(ids)) if corrupt is None else corrupt.mixers(len(ids))
        hidden = model(ids.flatten(), flat_positions(*ids.shape, device), mixers).view(*ids.shape, -1)
        before_answer = hidden[:, length - 1 : -1]
        said = model.logits(before_answer.flatten(0, 1)).argmax(-1).view(before_answer.shape[:2])
        right += int((said == ids[:, length:]).all(1).sum())
    return right / items


class Corruption:
    """Replaces a share of the stored K/V rows of one kind of layer by another sequence's at the same position."""

    def __init__(self, kind: KVKind, share: float, seed: int) -> None:
        self.kind, self.share = kind, share
        self.generator = torch.Generator().manual_seed(seed)

    def mixers(self, sequences: int) -> "CorruptedMixers":
        return CorruptedMixers(sequences, self)


class CorruptedMixers(DenseMixers):
    """Dense mixers that read some rows from another sequence."""

    def __init__(self, sequences: int, corruption: Corruption) -> None:
        super().__init__(sequences)
        self.corruption = corruption

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        corruption = self.corruption
        if layer.kind is corruption.kind:
            hit = (torch.rand(len(k), generator=corruption.generator) < corruption.share).to(k.device)[:, None, None]
            one = len(k) // self.sequences
            k = torch.where(hit, k.roll(one, 0), k)
            v = None if v is None else torch.where(hit, v.roll(one, 0), v)
        return super().attend(layer, q, k, v)
