"""The scenario of the engine: a small random model served with some features switched on, faulty against clean arm.

The requests share beginnings and differ in length, the pool is poisoned, and the window or the recurrent state of
the model is small enough that pages leave it. Accept counts go through the gate's own accept-length endpoint.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from suite.e2e.engine.engine import Engine, EngineConfig
from suite.e2e.engine.requests import Request
from suite.e2e.faults.detection import tiny
from suite.e2e.faults.detection.signals import cell_of, moved, passed, ruled, signal_of
from suite.e2e.faults.fault import Scenario, Setting, Signal
from suite.e2e.faults.seams import unplanted
from suite.e2e.gate.accept import Counters, accept_loss
from suite.records import Arm, PoolMode, Samples

NEW_TOKENS, DRAFTS = 16, 3
ACCEPT_FLOOR, ACCEPT_MARGIN, ALPHA = 1.05, 0.02, 0.05
LATER = 40  # the step at which the second turn arrives
SCRIPT = (3, 0, 1, 2, 1, 3)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """`model`: "window" (windows, sinks, experts) or "hybrid" (gated delta nets). `changes`: fields of EngineConfig."""

    model: str = "window"
    pool: PoolMode = "unified"
    changes: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    churn: bool = True
    turns: bool = True  # also the later requests, which find what the first ones have left in the prefix cache
    device: str = "cpu"


@dataclass(kw_only=True)
class Served:
    """What one arm came to; `signal` is there when it did not come to an end."""

    requests: list[Request] = field(default_factory=list)
    moved: tuple[float, int] = (0.0, 0)
    signal: Signal | None = None

    @property
    def tokens(self) -> list[list[int]]:
        return [request.output for request in self.requests]


def serving(model: str = "window", *, speculation_of: str | None = None, **changes: Any) -> Scenario:
    """Serve from the unified pool with `changes`, held against the static pool with the same ones.

    With speculation, the same requests without drafts must give the same tokens, and the drafts are counted.
    """
    if speculation_of:
        changes |= {"speculation": speculation_of, "draft_tokens": DRAFTS}
    if speculation_of == "scripted":
        changes["script"] = SCRIPT
    config = ServeConfig(model=model, changes=tuple(sorted(changes.items())))

    def scenario(setting: Setting) -> Iterator[Signal]:
        mine = replace(config, seed=setting.seed, churn=not setting.fresh, device=setting.device)
        with unplanted():
            static = clean(replace(mine, pool="static"))
            plain = clean(without_drafts(mine)) if speculation_of else None
        run = serve(mine)
        if run.signal is not None:
            yield run.signal
            return
        yield from ruled(cell_of("engine"), Arm(pool=mine.pool), *outcomes(run, static, fresh=setting.fresh))
        if plain is not None:
            yield from drafts(run, static, plain, scripted=speculation_of == "scripted")

    return scenario


@functools.lru_cache(maxsize=64)
def clean(config: ServeConfig) -> Served:
    return serve(config)


def without_drafts(config: ServeConfig) -> ServeConfig:
    kept = {name: value for name, value in config.changes if name not in ("speculation", "draft_tokens", "script")}
    kept["fused_draft"] = False
    return replace(config, pool="static", changes=tuple(sorted(kept.items())))


def serve(config: ServeConfig) -> Served:
    """The scenario's requests through one engine, to their end or to its crash."""
    served = Served()
    changes = dict(config.changes)
    model = tiny.model(config.model, config.device)
    try:
        more: dict[str, Any] = {}
        if changes.get("speculation") == "model":
            more["draft"] = tiny.model(config.model, config.device)  # the target itself: every draft is right
        if changes.get("speculation") == "scripted":
            with unplanted():
                plain = clean(without_drafts(config))
            more["truth"] = {tuple(request.prompt): request.output for request in plain.requests}
        engine = Engine(model, engine_config(config), **more)
        served.requests = requests(config)
        engine.run(served.requests, churn=config.churn)
        served.moved = (engine.churn.moved_share, engine.churn.observed)
    except Exception as error:  # a child would end as a wrong or crashed row here
        served.signal = signal_of(error)
    return served


def engine_config(config: ServeConfig) -> EngineConfig:
    fields: dict[str, Any] = {
        "backend": "reference",
        "launcher": "reference",
        "pool": config.pool,
        "page_size": 4,
        "max_batch": 4,
        "max_context": 64,
        "chunk_tokens": 16,
        "dtype": torch.float32,
        "device": config.device,
        "graph": True,
        "seed": config.seed,
        "poison": True,
        "snapshot_tokens": 8,
    }
    return EngineConfig(**(fields | dict(config.changes)))


def requests(config: ServeConfig) -> list[Request]:
    """Requests that share beginnings, then later ones that begin as those did, or as one and its answer did.

    The answer's rows had left the window when they came into the prefix cache, so that turn may reuse the prompt's
    pages only.
    """
    drawn = random.Random(config.seed)
    shared = words(drawn, 24)

    def request(prompt: list[int], new: int, arrival: int = 0) -> Request:
        return Request(prompt=prompt, max_new_tokens=new, keep_logits=True, arrival_step=arrival)

    long = words(drawn, 33)
    sizes = ((24, 5, 9), (0, 7, 12), (16, 11, 5), (0, 3, 8))
    asked = [request(shared[:kept] + words(drawn, more), new) for kept, more, new in sizes]
    asked.insert(2, request(long, NEW_TOKENS))
    if not config.turns:
        return asked
    with unplanted():
        answer = clean(ServeConfig(model=config.model, pool="static", seed=config.seed, turns=False)).tokens[2]
    later = (shared + words(drawn, 9), long + answer[:3] + words(drawn, 5), shared + words(drawn, 3))
    return asked + [request(prompt, new, LATER) for prompt, new in zip(later, (6, 9, 12), strict=True)]


def words(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(tiny.VOCAB) for _ in range(count)]


def outcomes(run: Served, static: Served, *, fresh: bool) -> tuple[Any, Any]:
    share = (1.0, 1) if fresh else run.moved
    return passed(metrics=moved(*share), samples=samples(run)), passed(samples=samples(static))


def samples(served: Served) -> tuple[Samples, ...]:
    logits = torch.stack([row for request in served.requests for row in request.logits]).float().cpu().numpy()
    tokens = np.full((len(served.requests), NEW_TOKENS), -1, dtype=np.int64)
    for row, request in zip(tokens, served.requests, strict=True):
        row[: len(request.output)] = request.output
    return Samples.pack("logits", logits), Samples.pack("tokens", tokens)


def drafts(run: Served, static: Served, plain: Served, *, scripted: bool) -> Iterator[Signal]:
    """Tokens against those without drafts, counts against the script, accept length against the static arm's."""
    if run.tokens != plain.tokens:
        differ = sum(a != b for a, b in zip(run.tokens, plain.tokens, strict=True))
        text = f"{differ} of {len(plain.tokens)} greedy answers are others than without drafts"
        yield Signal(name="engine.drafts_change_answers", text=text)
    mine, theirs = (counters(each) for each in (run, static))
    if not (mine.passes > 0).all():
        yield Signal(name="engine.no_accept_counts", text=f"verify passes per request {mine.passes.tolist()}")
        return
    if scripted and (wrong := off_script(run)):
        yield Signal(name="engine.script_differs", text=wrong)
    emitted = np.array([len(request.output) - 1 for request in run.requests])  # the first token is the prefill's
    if (mine.tokens < emitted).any() or (mine.tokens > emitted + DRAFTS).any():
        text = f"tokens committed {mine.tokens.tolist()} != tokens emitted {emitted.tolist()}"
        yield Signal(name="engine.accept_counts", text=text)
    yield from believed_less(theirs, mine)


def believed_less(theirs: Counters, mine: Counters) -> Iterator[Signal]:
    """What the gate says of `mine`, the unified arm's drafts, against those of the static arm."""
    if mine.accept_length <= ACCEPT_FLOOR:
        text = f"accept length {mine.accept_length:.3f}, at the floor {ACCEPT_FLOOR} of a mis-addressed draft"
        yield Signal(name="gate.accept_floor", text=text)
    if not (np.array_equal(mine.tokens, theirs.tokens) and np.array_equal(mine.passes, theirs.passes)):
        try:
            found = accept_loss(theirs, mine)
        except ValueError as error:
            yield Signal(name="gate.accept_loss", text=str(error))
            return
        if (p := found.p_beyond(np.log1p(ACCEPT_MARGIN))) < ALPHA:
            lengths = f"accept length {theirs.accept_length:.3f} static, {mine.accept_length:.3f} unified"
            yield Signal(name="gate.accept_loss", text=f"{lengths}: p {p:.2g} beyond {ACCEPT_MARGIN:.0%}")


def counters(served: Served) -> Counters:
    drafted = [request.drafts for request in served.requests]
    return Counters(
        np.array([each.accept_tokens for each in drafted], float),
        np.array([each.verify_passes for each in drafted], float),
    )


def off_script(run: Served) -> str | None:
    """Where the reported lengths of a request's passes are not those of the script, the last pass apart."""
    for number, request in enumerate(run.requests):
        lengths = request.drafts.lengths
        want = [SCRIPT[at % len(SCRIPT)] + 1 for at in range(len(lengths))]
        if lengths[:-1] != want[: len(lengths) - 1]:
            return f"request {number} reports passes of {lengths}, scripted {want}"
    return None
