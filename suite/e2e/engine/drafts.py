"""Who drafts: a script with a known pattern, the prompt itself (n-grams), or a smaller model.

A drafter proposes up to `draft_tokens` tokens behind every request's newest one. It is told of every forward of the
target, so that what it stores of its own stays in step with what the target has stored.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from suite.e2e.engine.requests import Request
from suite.e2e.engine.runner import Runner
from suite.e2e.engine.sampler import draw, probabilities, uniform
from suite.e2e.engine.scheduler import Step
from suite.e2e.engine.speculative import Proposal
from suite.errors import InputError
from suite.kernels.upload import upload

DRAFT_STREAM = 3  # of the random numbers: what a draft model draws with


class Drafter(Protocol):
    """One way to draft."""

    def propose(self, step: Step) -> list[Proposal]:
        """Drafts for every request of a verify step, at most `drafts_wanted` of each."""

    def follow(self, step: Step, features: torch.Tensor | None) -> None:
        """The target has just stored the new tokens of `step`, which is no verify; features [tokens, width]."""

    def settle(self, step: Step, stored: Sequence[int], features: torch.Tensor | None) -> None:
        """Of a verify, the target has kept the first `stored` new tokens of every request."""


def drafts_wanted(request: Request, draft_tokens: int) -> int:
    """Drafts that can still be committed: behind them comes one more token, the target's own."""
    return max(0, min(draft_tokens, request.remaining - 1))


class HostDrafter:
    """A drafter that stores nothing in any pool."""

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens

    def propose(self, step: Step) -> list[Proposal]:
        return [Proposal(tokens=self.drafts_for(r, drafts_wanted(r, self.draft_tokens))) for r in step.requests]

    def drafts_for(self, request: Request, count: int) -> list[int]:
        raise NotImplementedError

    def follow(self, step: Step, features: torch.Tensor | None) -> None:
        """Nothing is stored."""

    def settle(self, step: Step, stored: Sequence[int], features: torch.Tensor | None) -> None:
        """Nothing is stored."""


class SimulatedDrafter(HostDrafter):
    """Drafts that count as right as often as `script` says, whatever the target says: for times, never for answers.

    Pass i of a request has `script[i]` right drafts; the script repeats.
    """

    def __init__(self, draft_tokens: int, script: Sequence[int]) -> None:
        super().__init__(draft_tokens)
        if not script or not all(0 <= right <= draft_tokens for right in script):
            raise InputError("script", list(script), f"numbers of right drafts, 0 to {draft_tokens}")
        self.script = list(script)

    def right(self, request: Request) -> int:
        """How many drafts of the request's next pass are right."""
        right = self.script[request.drafts.verify_passes % len(self.script)]
        return min(right, drafts_wanted(request, self.draft_tokens))

    def propose(self, step: Step) -> list[Proposal]:
        return [
            Proposal(tokens=[0] * drafts_wanted(request, self.draft_tokens), forced=self.right(request))
            for request in step.requests
        ]


class ScriptedDrafter(SimulatedDrafter):
    """Drafts whose accept pattern is known: the script's number of right tokens, then a wrong one.

    truth: prompt -> what the target says to it, from a run without drafts. Other prompts get no drafts.
    """

    def __init__(self, draft_tokens: int, script: Sequence[int], truth: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(draft_tokens, script)
        self.truth = truth

    def propose(self, step: Step) -> list[Proposal]:
        return HostDrafter.propose(self, step)

    def drafts_for(self, request: Request, count: int) -> list[int]:
        begin = len(request.tokens) - len(request.prompt)
        drafts = self.truth.get(tuple(request.prompt), [])[begin : begin + count]
        if (right := self.right(request)) < len(drafts):
            drafts[right] = drafts[right] + 1 if drafts[right] == 0 else drafts[right] - 1  # of any vocabulary
        return drafts


class NgramDrafter(HostDrafter):
    """Prompt lookup: what followed the last time that the newest `longest` (or fewer) tokens stood there."""

    def __init__(self, draft_tokens: int, longest: int = 3) -> None:
        super().__init__(draft_tokens)
        self.longest = longest
        # per request, n-gram -> where its continuation begins; and how many tokens are in it
        self._seen: WeakKeyDictionary[Request, tuple[dict[tuple[int, ...], int], list[int]]] = WeakKeyDictionary()

    def drafts_for(self, request: Request, count: int) -> list[int]:
        tokens = request.tokens
        table, done = self._seen.setdefault(request, ({}, [1]))
        for end in range(done[0], len(tokens)):  # an n-gram counts once its continuation is known
            for n in range(1, min(self.longest, end) + 1):
                table[tuple(tokens[end - n : end])] = end
        done[0] = len(tokens)
        for n in range(min(self.longest, len(tokens)), 0, -1):
            if (begin := table.get(tuple(tokens[-n:]))) is not None:
                return tokens[begin : begin + count]
        return []


class ModelDrafter:
    """A smaller language model with a pool of its own, found by the target's virtual ids.

    It stores the same tokens as the target, one forward behind. Its drafts are its greedy choice for greedy requests,
    drawn from its distribution for others.
    """

    def __init__(self, runner: Runner, draft_tokens: int) -> None:
        self.runner, self.draft_tokens = runner, draft_tokens

    def follow(self, step: Step, features: torch.Tensor | None) -> None:
        self.runner.forward(step, self._last_rows(step))

    def settle(self, step: Step, stored: Sequence[int], features: torch.Tensor | None) -> None:
        """Nothing to do: all that may be kept was stored while it was drafted."""

    def propose(self, step: Step) -> list[Proposal]:
        requests, width = step.requests, self.draft_tokens + 1
        begin = [request.computed + 1 for request in requests]
        tokens = [request.tokens[-1] for request in requests]
        drafts: list[list[int]] = []
        chances: list[torch.Tensor] = []
        for place in range(width):  # the last forward only stores the last draft, which may be kept
            one = step.place(place, tokens)
            rows = torch.arange(len(requests), device=step.virtual_write_ids.tensor.device)
            logits = self.runner.forward(one, rows).logits
            if place == self.draft_tokens:
                break
            chances.append(probabilities(logits, [request.sampling for request in requests]))
            numbers = [
                uniform(request.sampling.seed, length + place, DRAFT_STREAM)
                for request, length in zip(requests, begin, strict=True)
            ]
            tokens = draw(chances[-1], numbers).tolist()
            drafts.append(tokens)
        return [self._proposal(request, row, drafts, chances) for row, request in enumerate(requests)]

    def _proposal(self, request: Request, row: int, drafts: list[list[int]], chances: list[torch.Tensor]) -> Proposal:
        count = drafts_wanted(request, self.draft_tokens)
        tokens = [each[row] for each in drafts[:count]]
        if request.sampling.is_greedy or not count:
            return Proposal(tokens=tokens)
        return Proposal(tokens=tokens, chances=torch.stack([each[row] for each in chances[:count]]))

    def _last_rows(self, step: Step) -> torch.Tensor:
        """One row, for a forward of which only the stored rows matter."""
        ends = list(itertools.accumulate(step.query_lens))
        return upload([end - 1 for end in ends[-1:]], step.virtual_write_ids.tensor.device)
