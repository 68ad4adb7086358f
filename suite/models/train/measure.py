"""How well a checkpoint answers, clean and with one component of what it stores corrupted.

Exact match of the greedy answer, found in one pass: the prompt and the right answer are read together, and the
answer counts where every word of it was the most likely one. A corrupted row or state is another request's, at the
same position.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from suite.kernels.geometry import AttentionLayer
from suite.kernels.linear.delta import DeltaLayer
from suite.kernels.linear.lightning import LightningLayer
from suite.kernels.ops.delta_step import StepInputs
from suite.models.causal import CausalModel
from suite.models.dense import DenseMixers, chunked
from suite.models.languages import question
from suite.models.mixers import Expand

Part = Literal["k", "v", "latent", "state", "conv"]
TOKENS = 32768  # at once
HANDOVER = 64  # tokens between two hand-overs of a recurrent layer's convolution window, a prefill chunk


def flat_positions(sequences: int, length: int, device: torch.device | str) -> torch.Tensor:
    """0 .. length-1 for each sequence, flattened."""
    return torch.arange(length, device=device).repeat(sequences)


@functools.lru_cache(maxsize=64)
def asked(task: str, seed: int, items: int, length: int) -> torch.Tensor:
    """Prompts of `length` tokens and their answers, int64 [items, length + answer]."""
    pairs = (question(task, seed, index, length) for index in range(items))
    return torch.tensor([prompt + answer for prompt, answer in pairs])


@torch.no_grad()
def exact_match(
    model: CausalModel,
    task: str,
    *,
    items: int,
    length: int,
    seed: int,
    rows: int | None = None,
    corrupt: "Corruption | None" = None,
) -> float:
    """Share of `items` questions of `task` answered in full."""
    device, right = model.output_weight.device, 0
    for ids in asked(task, seed, items, length).to(device).split(rows or max(2, TOKENS // length)):
        mixers = DenseMixers(len(ids)) if corrupt is None else CorruptedMixers(len(ids), corrupt, length)
        hidden = model(ids.flatten(), flat_positions(*ids.shape, device), mixers).view(*ids.shape, -1)
        before_answer = hidden[:, length - 1 : -1]
        said = model.logits(before_answer.flatten(0, 1)).argmax(-1).view(before_answer.shape[:2])
        right += int((said == ids[:, length:]).all(1).sum())
    return right / items


@dataclass(frozen=True)
class Corruption:
    """`share` of what `layers` store as `parts` is another request's.

    k, v, latent: rows. state: whole recurrent states of requests, where decoding takes over from the prompt.
    conv: convolution windows of requests, at every hand-over between prefill chunks and to the decode.
    """

    layers: Collection[int]
    parts: Collection[Part]
    share: float
    seed: int = 0


class CorruptedMixers(DenseMixers):
    """Dense mixers that read some of what they stored from another sequence. prompt: tokens before the answer."""

    def __init__(self, sequences: int, corruption: Corruption, prompt: int) -> None:
        super().__init__(sequences)
        self.corruption, self.prompt = corruption, prompt
        self.generator = torch.Generator().manual_seed(corruption.seed)

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        k = self._swapped(layer.index, "latent" if v is None else "k", k)
        v = None if v is None else self._swapped(layer.index, "v", v)
        return super().attend(layer, q, k, v)

    def attend_expanded(
        self, layer: AttentionLayer, q: torch.Tensor, rows: torch.Tensor, expand: Expand, scale: float
    ) -> torch.Tensor:
        raise NotImplementedError("rows are corrupted as they are stored, so attention is absorbed here")

    def convolve(self, layer: DeltaLayer, mixed: torch.Tensor) -> torch.Tensor:
        """The tokens after a hand-over convolve the inputs from before it: another sequence's, where hit."""
        out = super().convolve(layer, mixed)
        if not self._hits(layer.index, "conv"):
            return out
        width, hit = layer.conv_weight.shape[1] - 1, self._lot(self.sequences, mixed.device)
        apart, out = (x.unflatten(0, (self.sequences, -1)) for x in (mixed, out))
        for end in [*range(HANDOVER, self.prompt - 1, HANDOVER), self.prompt - 1]:
            after = apart[:, end : end + width]
            seen = torch.cat((apart.roll(1, 0)[:, max(0, end - width) : end], after), dim=1)
            wrong = super().convolve(layer, seen.flatten(0, 1)).unflatten(0, (self.sequences, -1))
            out[hit, end : end + width] = wrong[hit, -after.shape[1] :]
        return out.flatten(0, 1)

    def recurrence(self, layer: DeltaLayer | LightningLayer, step: StepInputs) -> torch.Tensor:
        """The last word of the prompt is the first to read the state handed over: another sequence's, where hit."""
        if not self._hits(layer.index, "state"):
            return super().recurrence(layer, step)
        first, rest = (_tokens(step, part) for part in (slice(self.prompt - 1), slice(self.prompt - 1, None)))
        before = chunked(first, None)
        state = before.final[0].unflatten(0, (self.sequences, -1))  # [sequences, heads, V, K]
        hit = self._lot(self.sequences, state.device)[:, None, None, None]
        handed = torch.where(hit, state.roll(1, 0), state).flatten(0, 1)[None]
        return torch.cat((before.out, chunked(rest, handed).out))

    # -- inside ----------------------------------------------------------------------------------

    def _hits(self, layer: int, part: Part) -> bool:
        return layer in self.corruption.layers and part in self.corruption.parts

    def _lot(self, count: int, device: torch.device) -> torch.Tensor:
        return (torch.rand(count, generator=self.generator) < self.corruption.share).to(device)

    def _swapped(self, layer: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        """rows [tokens, heads, dim], some of them the next sequence's at the same position."""
        if not self._hits(layer, part):
            return rows
        hit = self._lot(len(rows), rows.device)[:, None, None]
        return torch.where(hit, rows.roll(len(rows) // self.sequences, 0), rows)


def _tokens(step: StepInputs, part: slice) -> StepInputs:
    """Some tokens of a recurrence; a constant decay has none to choose from."""
    g = step.g if step.g.ndim == 1 else step.g[part]
    beta = None if step.beta is None else step.beta[part]
    return StepInputs(q=step.q[part], k=step.k[part], v=step.v[part], g=g, beta=beta)
