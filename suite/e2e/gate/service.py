"""Deciding on a run of a database, keeping what was decided, and making a stored decision again."""

from typing import Any

import msgspec
import sqlalchemy as sa

from db import gate_inputs
from db.decisions import find_decision, store_decision
from db.gate_reader import read_inputs
from db.queries import find_run
from suite.e2e.gate.decide import decide, engine_sha
from suite.e2e.gate.engine_smoke import EngineFaults, plant_into_engine, whole_smoke_set
from suite.e2e.gate.policy import History, Policy
from suite.e2e.gate.verdicts import Decision
from suite.records import Record


class Stored(Record):
    """A decision as it is kept: its id, what it says, and who overrode it where somebody did."""

    id: str
    decision: Decision
    verdict: str
    exit_code: int
    reason: str
    supersedes: str | None
    override_by: str | None


class Replay(Record):
    """A stored decision made again: what differs (nothing when they agree), and whether the gate's code changed."""

    stored: Stored
    differences: tuple[str, ...]
    engine_changed: bool


def run_gate(
    engine: sa.Engine, run: str | None, policy: Policy, engine_faults: EngineFaults = plant_into_engine
) -> Stored:
    """Decide on `run`, the latest when None, and keep the decision. `engine_faults` runs the engine's smoke set."""
    run_id = find_run(engine, run)
    history = [e for e in policy.endpoints.values() if isinstance(e, History)]
    nights = max((e.window for e in history), default=0)
    inputs = read_inputs(engine, run_id, sorted({e.metric for e in history}), nights)
    decision = decide(policy, inputs, lambda rules, given: whole_smoke_set(rules, given, engine_faults))
    key = store_decision(
        engine, msgspec.to_builtins(decision), msgspec.to_builtins(policy), gate_inputs.pack(inputs)[1]
    )
    return read_decision(engine, key)


def read_decision(engine: sa.Engine, decision: str) -> Stored:
    """The stored decision of that id or unique beginning."""
    return stored(find_decision(engine, decision))


def stored(row: Any) -> Stored:
    same = ("id", "verdict", "exit_code", "reason", "supersedes", "override_by")
    return Stored(decision=msgspec.convert(row.document, Decision), **{name: getattr(row, name) for name in same})


def replay(engine: sa.Engine, decision: str) -> Replay:
    """Make a stored decision again from its stored policy and inputs, and compare all of it, bit for bit.

    What the engine's smoke set came to is an input like the others: it was kept, and is not run again.
    """
    row = find_decision(engine, decision)
    inputs_sha, inputs = gate_inputs.unpack(row.inputs)
    kept = stored(row)
    policy = msgspec.convert(row.policy, Policy)
    again = decide(
        policy, inputs, lambda rules, given: whole_smoke_set(rules, given, lambda: kept.decision.smoke.engine)
    )
    differences = list(different("decision", msgspec.to_builtins(kept.decision), msgspec.to_builtins(again)))
    if inputs_sha != row.inputs_sha:
        differences.insert(0, f"inputs: their sha256 is {inputs_sha}, the decision was made from {row.inputs_sha}")
    return Replay(stored=kept, differences=tuple(differences), engine_changed=row.engine_sha != engine_sha())


def different(field: str, then: object, now: object) -> list[str]:
    """Where two trees of plain values differ; the hash of the engine is told apart."""
    if field == "decision.engine_sha":
        return []
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [*then, *(key for key in now if key not in then)]
        return [text for key in keys for text in different(f"{field}.{key}", then.get(key), now.get(key))]
    if isinstance(then, list | tuple) and isinstance(now, list | tuple) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return [text for number, (a, b) in pairs for text in different(f"{field}[{number}]", a, b)]
    return [] if type(then) is type(now) and then == now else [f"{field}: {then!r} then, {now!r} now"]
