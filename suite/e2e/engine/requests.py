"""One request through the engine: what was asked, what is computed, what came out."""

import math
from dataclasses import dataclass, field

import torch

from suite.errors import InputError


@dataclass(kw_only=True, eq=False)
class Request:
    """Greedy generation, or (with `score_from`) the log-likelihood of `prompt[score_from:]`.

    Generation ends at a token of `stop`, which is not kept, or after `max_new_tokens`. `computed` counts
    the tokens whose K and V are in the pool; `pages` are their virtual pages, in order.
    """

    prompt: list[int]
    max_new_tokens: int = 0
    stop: frozenset[int] = frozenset()
    score_from: int | None = None
    keep_logits: bool = False

    output: list[int] = field(default_factory=list)
    done: bool = False
    computed: int = 0
    row: int = 0
    pages: list[int] = field(default_factory=list)
    evicted_pages: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] fp32 per generated token
    loglikelihood: float = 0.0
    is_greedy: bool = True
    arrival_s: float = 0.0  # host clock, when the request was handed over
    token_times_s: list[float] = field(default_factory=list)  # host clock, when each token was known

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("prompt", self.prompt, "at least one token")
        if self.max_new_tokens < 0:
            raise InputError("max_new_tokens", self.max_new_tokens, "0 or more")
        if self.score_from is not None and not 1 <= self.score_from < len(self.prompt):
            raise InputError(
                "score_from", self.score_from, f"1 to {len(self.prompt) - 1}: context and continuation both non-empty"
            )
        if self.score_from is None and self.max_new_tokens == 0:
            raise InputError("max_new_tokens", 0, "1 or more for a request that scores nothing")

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def longest(self) -> int:
        """Tokens that this request ever stores at most; the last generated one is never stored."""
        return len(self.prompt) + max(self.max_new_tokens - 1, 0)

    @property
    def is_prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    def accept(self, token: int) -> None:
        """Take a generated token: end at a stop token, else keep it."""
        if token in self.stop:
            self.done = True
            return
        self.output.append(token)
        self.done = len(self.output) >= self.max_new_tokens

    def add_scores(self, start: int, logits: torch.Tensor) -> None:
        """Score `prompt[start + 1 :]` by fp32 logits [n, vocab] of the positions from `start` on."""
        targets = torch.tensor(self.prompt[start + 1 : start + 1 + len(logits)], device=logits.device)
        picked = logits.log_softmax(-1).gather(1, targets[:, None])
        self.loglikelihood += float(picked.double().sum())
        self.is_greedy &= bool((logits.argmax(-1) == targets).all())
        if not math.isfinite(self.loglikelihood):
            raise FloatingPointError(f"log-likelihood of request is {self.loglikelihood}: the logits are not finite")
