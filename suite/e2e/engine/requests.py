"""One request through the engine: what was asked, what is computed, what came out."""

import math
from dataclasses import dataclass, field

import torch

from suite.e2e.engine.sampler import GREEDY, Sampling
from suite.errors import InputError


@dataclass(kw_only=True, eq=False)
class DraftCounters:
    """What verify passes came to. `accepted_at[i]` counts the accepted drafts at place i of a window.

    `accept_tokens` counts committed tokens, the bonus token of every pass among them.
    """

    verify_passes: int = 0
    accept_tokens: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # committed tokens of each pass

    def add(self, proposed: int, accepted: int) -> None:
        while len(self.proposed_at) < proposed:
            self.proposed_at.append(0)
            self.accepted_at.append(0)
        for place in range(proposed):
            self.proposed_at[place] += 1
            self.accepted_at[place] += place < accepted
        self.verify_passes += 1
        self.accept_tokens += accepted + 1
        self.lengths.append(accepted + 1)


@dataclass(kw_only=True, eq=False)
class Request:
    """Generation, or (with `score_from`) the log-likelihood of `prompt[score_from:]`.

    Generation ends at a token of `stop`, which is not kept, after `max_new_tokens`, or, as if its client had left,
    after `cancel_after`. It may start at step `arrival_step` of the engine's clock. What `follow`s is said next by
    the user: behind the answer, the conversation goes on in `next`. `computed` counts the tokens whose rows are in
    the pool; `pages` are their virtual pages, in order.
    """

    prompt: list[int]
    max_new_tokens: int = 0
    stop: frozenset[int] = frozenset()
    score_from: int | None = None
    keep_logits: bool = False
    sampling: Sampling = GREEDY
    arrival_step: int = 0
    cancel_after: int | None = None
    follow: list[list[int]] = field(default_factory=list)
    group: str = ""  # what the largest batch is counted by

    tokens: list[int] = field(init=False)  # the prompt and what was generated
    done: bool = False
    computed: int = 0
    row: int = 0
    slot: int = 0  # virtual state slot of a model with recurrent layers
    pages: list[int] = field(default_factory=list)
    evicted_pages: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    retractions: int = 0
    drafts: DraftCounters = field(default_factory=DraftCounters)
    next: "Request | None" = None
    first_step: int | None = None  # the clock when it was first admitted, and when it ended
    last_step: int | None = None
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] fp32 per generated token
    scored: int = 0
    loglikelihood: float = 0.0
    is_greedy: bool = True
    arrival_s: float = 0.0  # host clock, when the request was handed over
    token_times_s: list[float] = field(default_factory=list)  # host clock, when each token was known

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("prompt", self.prompt, "at least one token")
        for name in ("max_new_tokens", "arrival_step"):
            if (value := getattr(self, name)) < 0:
                raise InputError(name, value, "0 or more")
        if self.cancel_after is not None and self.cancel_after < 1:
            raise InputError("cancel_after", self.cancel_after, "1 or more")
        if self.score_from is not None and not 1 <= self.score_from < len(self.prompt):
            raise InputError(
                "score_from", self.score_from, f"1 to {len(self.prompt) - 1}: context and continuation both non-empty"
            )
        if self.score_from is None and self.max_new_tokens == 0:
            raise InputError("max_new_tokens", 0, "1 or more for a request that scores nothing")
        self.tokens = list(self.prompt)
        self.scored = self.score_from or 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def longest(self) -> int:
        """Tokens that this request ever stores at most; the last generated one is never stored."""
        return len(self.prompt) + max(self.max_new_tokens - 1, 0)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token is stored. The first token of all is an extend: it starts the state."""
        return 0 < self.computed == len(self.tokens) - 1

    @property
    def reusable(self) -> int:
        """How many of its tokens may come from a cache: the logits of the rest are still to be read."""
        return len(self.tokens) - 1 if self.score_from is None else self.score_from - 1

    def accept(self, token: int) -> None:
        """Take a generated token: end at a stop token, else keep it."""
        if token in self.stop:
            self.done = True
            return
        self.tokens.append(token)
        generated = len(self.tokens) - len(self.prompt)
        self.done = generated >= self.max_new_tokens or generated == self.cancel_after

    def next_turn(self, clock: int) -> "Request | None":
        """The conversation's next request, behind this one's answer; None when it is over."""
        if self.follow:
            self.next = Request(
                prompt=self.tokens + self.follow[0],
                max_new_tokens=self.max_new_tokens,
                stop=self.stop,
                keep_logits=self.keep_logits,
                sampling=self.sampling,
                arrival_step=clock,
                follow=self.follow[1:],
            )
        return self.next

    def add_scores(self, start: int, logits: torch.Tensor) -> None:
        """Score `prompt[start + 1 :]` by fp32 logits [n, vocab] of the positions from `start` on."""
        self.scored = start + 1 + len(logits)
        targets = torch.tensor(self.prompt[start + 1 : self.scored], device=logits.device)
        picked = logits.log_softmax(-1).gather(1, targets[:, None])
        self.loglikelihood += float(picked.double().sum())
        self.is_greedy &= bool((logits.argmax(-1) == targets).all())
        if not math.isfinite(self.loglikelihood):
            raise FloatingPointError(f"log-likelihood of request is {self.loglikelihood}: the logits are not finite")
