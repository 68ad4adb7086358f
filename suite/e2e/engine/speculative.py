"""Which drafts stay: acceptance as pure functions.

A verify pass computes the target's logits at the newest token and at every draft behind it. Accepted are the
drafts up to the first that the target would not have said; behind them stands one more token, the target's own
(the *bonus*), so that every pass commits at least one. Accept length counts the bonus, accept rate does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from suite.e2e.engine.sampler import Sampling, draw, probabilities, uniform

ACCEPT_STREAM, REPLACE_STREAM = 1, 2  # of a position's random numbers, beside 0 of plain sampling


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """Drafts of one request. `chances` [drafts, vocab]: the distributions they were drawn from; None: no chance.

    `forced`: how many count as accepted whatever the target says, of a simulation.
    """

    tokens: list[int]
    chances: torch.Tensor | None = None
    forced: int | None = None


def accept_by_match(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """The committed tokens: `targets` up to and with the first that its draft did not foretell.

    `targets[i]` is what the target says behind `drafts[:i]`, one more than there are drafts, greedy or drawn from
    its distribution. The committed tokens are then exactly those of a run without drafts, with the same random
    numbers; a draft d is accepted with the chance p(d) that rejection sampling gives a draft of no chance.
    """
    for place, draft in enumerate(drafts):
        if draft != targets[place]:
            return list(targets[: place + 1])
    return list(targets[: len(drafts) + 1])


def accept_by_rejection(
    target: torch.Tensor,
    chances: torch.Tensor,
    drafts: Sequence[int],
    accept_numbers: Sequence[float],
    draw_number: float,
) -> list[int]:
    """The committed tokens of drafts that were drawn from `chances` [drafts, vocab]; distributed as the target's own.

    target: [drafts + 1, vocab] distributions p. Draft d is accepted when u q(d) < p(d); the first that is not is
    replaced by a draw from max(p - q, 0), normalised; behind all of them stands a draw from the last p
    (Leviathan et al. 2023, Chen et al. 2023). `accept_numbers` and `draw_number` are uniform in [0, 1).
    """
    for place, (draft, number) in enumerate(zip(drafts, accept_numbers, strict=True)):
        if number * float(chances[place, draft]) >= float(target[place, draft]):
            left = (target[place] - chances[place]).clamp(min=0)
            if not bool(left.sum() > 0):
                left = target[place]  # p = q up to rounding
            return [*drafts[:place], int(draw(left[None], [draw_number])[0])]
    return [*drafts, int(draw(target[-1:], [draw_number])[0])]


def commit(
    proposal: Proposal, targets: Sequence[int], logits: torch.Tensor, sampling: Sampling, positions: Sequence[int]
) -> list[int]:
    """What one request commits of a verify. targets, logits [drafts + 1 or more, vocab] and positions are those of the
    tokens behind its newest one: what the target says there, from what, and where that would stand."""
    if proposal.forced is not None:
        return list(targets[: proposal.forced + 1])
    if proposal.chances is None:
        return accept_by_match(proposal.tokens, targets)
    count = len(proposal.tokens)
    return accept_by_rejection(
        probabilities(logits[: count + 1], [sampling] * (count + 1)),
        proposal.chances,
        proposal.tokens,
        [uniform(sampling.seed, positions[place], ACCEPT_STREAM) for place in range(count)],
        uniform(sampling.seed, positions[0], REPLACE_STREAM),
    )
