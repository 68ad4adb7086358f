"""Speculation faults of block drafts, with the trained pair that ships: its accept length is high, and sees them.

No answer does: the target verifies every draft.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from suite.e2e.engine.block_drafts import BlockPass
from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.e2e.faults.detection.serving import believed_less
from suite.e2e.faults.detection.signals import signal_of
from suite.e2e.faults.fault import Setting, Signal, plants
from suite.e2e.faults.seams import unplanted
from suite.e2e.gate.accept import Counters
from suite.models.drafts import find_draft, load_draft
from suite.models.languages import question
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.records import PoolMode

FOLDER = "qwen-mini"
REQUESTS, NEW_TOKENS, DRAFTS = 3, 24, 7


@functools.cache
def models(device: str) -> tuple[Any, Any]:
    """The target and its draft."""
    folder = resolve_model(FOLDER)
    target = load_model(folder, dtype=torch.float32, device=device)
    return target, load_draft(find_draft(folder, "DSPARK"), target, dtype=torch.float32, device=device)


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What the requests of one pool came to."""

    answers: Sequence[Sequence[int]]
    counts: Counters


def drafted(pool: PoolMode, setting: Setting) -> Drafted:
    target, draft = models(setting.device)
    config = EngineConfig(
        backend="reference",
        launcher="reference",
        pool=pool,
        page_size=4,
        max_batch=REQUESTS,
        max_context=128,
        chunk_tokens=64,
        dtype=torch.float32,
        device=setting.device,
        graph=False,
        seed=setting.seed,
        speculation="dspark",
        draft_tokens=DRAFTS,
    )
    work = [
        Request(prompt=question("template", 11 + setting.seed, index, 40 + 9 * index)[0], max_new_tokens=NEW_TOKENS)
        for index in range(REQUESTS)
    ]
    Engine(target, config, draft=draft).run(work, churn=not setting.fresh)
    tokens, passes = ([getattr(r.drafts, name) for r in work] for name in ("accept_tokens", "verify_passes"))
    return Drafted(answers=[r.output for r in work], counts=Counters(np.array(tokens, float), np.array(passes, float)))


@functools.lru_cache(maxsize=64)
def static_arm(setting: Setting) -> Drafted:
    return drafted("static", setting)


def block_draft(setting: Setting) -> Iterator[Signal]:
    """The unified pool against the static one: the same answers, and drafts that are believed as often."""
    with unplanted():
        static = static_arm(setting)
    try:
        unified = drafted("unified", setting)
    except Exception as error:  # a child would end as a crashed row here
        yield signal_of(error)
        return
    if unified.answers != static.answers:
        yield Signal(name="engine.drafts_change_answers", text="the unified pool answers otherwise than the static one")
    yield from believed_less(static.counts, unified.counts)


@plants("speculation", "suite.e2e.engine.runner:Runner._batch", block_draft, "gate.accept_loss")
def draft_reads_other_rows(own: Any) -> Any:
    """a block draft reads the rows of the request beside it: answers stay, drafts go wrong"""

    def batch(self: Any, step: Any, lanes: int) -> Any:
        right = own(self, step, lanes)
        return replace(right, req_rows=right.req_rows.roll(1)) if isinstance(self.model, BlockPass) else right

    return batch
