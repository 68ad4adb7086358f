"""How well a checkpoint answers, clean and with some of its stored rows replaced.

Exact match of the greedy answer, found in one pass: the prompt and the right
answer are read together, and the answer counts where every word of it was the
most likely one.
"""

import torch

from suite.kernels.geometry import AttentionLayer
from suite.kernels.ids import KVKind
from suite.models.dense import dense_attend
from suite.models.gpt_oss import Attend, GptOss
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
        attend = dense_attend(len(ids))
        if corrupt is not None:
            attend = corrupt.of(attend, len(ids))
        hidden = model(ids.flatten(), flat_positions(*ids.shape, device), attend).view(*ids.shape, -1)
        before_answer = hidden[:, length - 1 : -1]
        said = model.logits(before_answer.flatten(0, 1)).argmax(-1).view(before_answer.shape[:2])
        right += int((said == ids[:, length:]).all(1).sum())
    return right / items


class Corruption:
    """Replaces a share of the stored K/V rows of one kind of layer by another sequence's at the same position."""

    def __init__(self, kind: KVKind, share: float, seed: int) -> None:
        self.kind, self.share = kind, share
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, attend: Attend, sequences: int) -> Attend:
        def corrupted(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if layer.kind is self.kind:
                hit = (torch.rand(len(k), generator=self.generator) < self.share).to(k.device)[:, None, None]
                one = len(k) // sequences
                k, v = (torch.where(hit, rows.roll(one, 0), rows) for rows in (k, v))
            return attend(layer, q, k, v)

        return corrupted
