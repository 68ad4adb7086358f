"""From logits to tokens: greedy, or temperature and top-p with randomness that belongs to the request.

The random number of a token depends on the request's seed and the token's position and on nothing else, so
batching, chunking, caching and retraction change no token. Every row is treated by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from suite.errors import InputError
from suite.kernels.upload import upload

MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 is greedy. `top_p`: only the likeliest tokens that reach this mass together are drawn from."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError("temperature", self.temperature, "a finite number, 0 for greedy")
        if not 0 < self.top_p <= 1:
            raise InputError("top_p", self.top_p, "a share above 0, at most 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) by splitmix64 of the three; streams of one position are independent of each other."""
    state = 0
    for word in (seed, position, stream):
        state = (state + word + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return (state >> 32) / 2**32  # 32 bits, so that u * total stays below total in doubles


def probabilities(logits: torch.Tensor, asked: Sequence[Sampling]) -> torch.Tensor:
    """fp32 logits [n, vocab] -> the distribution [n, vocab] that each row is drawn from, one-hot where greedy."""
    best = logits.argmax(-1, keepdim=True)
    scale = torch.tensor([each.temperature or 1.0 for each in asked], device=logits.device)
    chances = (logits / scale[:, None]).softmax(-1)
    if any(each.top_p < 1 for each in asked):
        top_p = torch.tensor([each.top_p for each in asked], dtype=torch.float64, device=logits.device)
        ranked, order = chances.sort(dim=-1, descending=True, stable=True)
        before = ranked.double().cumsum(-1) - ranked
        kept = (before < top_p[:, None]) | (top_p[:, None] == 1)
        chances = torch.zeros_like(chances).scatter(-1, order, ranked * kept)
        chances = chances / chances.sum(-1, keepdim=True)
    greedy = torch.tensor([each.is_greedy for each in asked], device=logits.device)
    return torch.where(greedy[:, None], torch.zeros_like(chances).scatter(-1, best, 1.0), chances)


def draw(chances: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """One token per row of `chances` [n, vocab] (need not sum to 1): where the cumulative sum passes `numbers`."""
    sums = chances.double().cumsum(-1)
    at = torch.tensor(numbers, dtype=torch.float64, device=chances.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True)[:, 0]


def pick(logits: torch.Tensor, asked: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """A token for every row of fp32 logits [n, vocab]. `positions`: where those tokens will stand."""
    tokens = logits.argmax(-1)
    drawn = [row for row, each in enumerate(asked) if not each.is_greedy]
    if drawn:
        rows = upload(drawn, logits.device)
        chances = probabilities(logits[rows], [asked[row] for row in drawn])
        tokens[rows] = draw(chances, [uniform(asked[row].seed, positions[row]) for row in drawn])
    return tokens.tolist()
