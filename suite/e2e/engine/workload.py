"""From a workload to requests: pure functions of the workload and its seed, so both arms serve the same schedule."""

import random
from collections.abc import Callable

from suite.e2e.engine.requests import Request
from suite.e2e.engine.sampler import Sampling
from suite.kernels.geometry import pages_for
from suite.records import Workload

Text = Callable[[int, int], list[int]]  # (number, tokens) -> that many token ids, others for every number

TREE = 1_000_000  # numbers of texts that several prompts begin with, apart from those of their own


def schedule(workload: Workload, text: Text, seed: int, *, keep_logits: bool = False) -> list[Request]:
    """The requests of `workload`, first turns only: later ones come from their answers."""
    rng = random.Random(f"arrivals/{seed}")
    arrival = 0.0
    requests = []
    for index in range(workload.requests):
        if workload.arrivals_per_step is not None:
            arrival += rng.expovariate(workload.arrivals_per_step)
        requests.append(
            Request(
                prompt=prompt(workload, text, index),
                max_new_tokens=workload.new_tokens,
                keep_logits=keep_logits,
                arrival_step=int(arrival),
                sampling=Sampling(temperature=workload.temperature, top_p=workload.top_p, seed=seed * TREE + index),
                follow=[text(TREE * (2 + turn) + index, workload.turn_tokens) for turn in range(1, workload.turns)],
            )
        )
    return requests


def prompt(workload: Workload, text: Text, index: int) -> list[int]:
    """Prompt `index`. Half of the tokens that a tree shares begin every prompt, the others those of one branch."""
    if not workload.shared_tokens:
        return text(index, workload.prompt_tokens)
    trunk = workload.shared_tokens // 2
    branch = workload.shared_tokens - trunk
    own = workload.prompt_tokens - workload.shared_tokens
    beginning = text(TREE, trunk) if trunk else []
    return beginning + text(TREE + 1 + index % workload.branches, branch) + text(index, own)


def mix_shift(workload: Workload, text: Text) -> list[Request]:
    """Many short requests, then few long ones, and short ones again; served in this order."""
    short, long = workload.requests, workload.long_requests
    groups = ["short"] * short + ["long"] * long + ["short"] * short
    lengths = {"short": workload.prompt_tokens, "long": workload.long_tokens}
    return [
        Request(prompt=text(index, lengths[group]), max_new_tokens=workload.new_tokens, group=group)
        for index, group in enumerate(groups)
    ]


def static_split(workload: Workload, page_size: int, window: int | None) -> dict[str, int]:
    """Pages of each kind, and state slots, that hold exactly a full batch of the mix it is `sized_for`.

    That is `batch` short requests or `long_requests` long ones; of window pages, those of a window and two ends each,
    and of one chunk.
    """
    count, tokens = workload.batch, workload.prompt_tokens + workload.new_tokens
    if workload.sized_for == "long":
        count, tokens = workload.long_requests, workload.long_tokens + workload.new_tokens
    pages = pages_for(tokens, page_size)
    kept = pages if window is None else min(pages, pages_for(window, page_size) + 2)
    chunk = pages_for(min(workload.chunk_tokens, tokens), page_size)
    return {"full": count * pages, "window": min(count * pages, count * kept + chunk), "state": count}


def longest_context(workload: Workload) -> int:
    """Tokens of the longest request, prompt and generated together."""
    turns = workload.prompt_tokens + workload.turns * workload.new_tokens + (workload.turns - 1) * workload.turn_tokens
    return max(turns, workload.long_tokens + workload.new_tokens)
