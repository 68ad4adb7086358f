"""Which rows of a cell may be held against each other, and what the rows mean that may not.

A pair is one block in which the static arm and the candidate both passed, under the same launcher, with
the same prompts, in the environment of the cell's newest run, and no guard voided it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from db.gate_inputs import ArmRows, CellRows, Row
from suite.e2e.gate.policy import Policy

NOT_A_RESULT = (
    "not_comparable",
    "launcher_differs",
    "identity_map",
)  # reasons of wrong rows that judge nobody's answers


class NoNumberError(Exception):
    """A value that an endpoint needs is missing, null, not a number or infinite; says which and where."""


class Pair(NamedTuple):
    """One block of a static row and a candidate's row."""

    static: Row
    candidate: Row


class Finding(NamedTuple):
    """What rows alone say of a cell: "fail", "no_data" or "inconclusive", and why."""

    meaning: str
    reason: str


class Pairing(NamedTuple):
    """The pairs of one arm in time order, how many blocks were void, and what the other rows mean."""

    pairs: list[Pair]
    void: int
    findings: list[Finding]
    ignored: list[str]


def pair_rows(policy: Policy, cell: CellRows, arm: ArmRows, runs: Sequence[str]) -> Pairing:
    """The pairs of `arm` with the cell's static arm over the pooled `runs`, in the newest one's environment."""
    static = baseline_of(policy, cell)
    if static is None:
        return Pairing([], 0, [Finding("no_data", f"the cell has no {policy.baseline} arm")], [])
    others = {(row.run, row.block): row for row in static.rows}
    newest = max((row.run for row in static.rows), key=runs.index, default="")
    home = {row.comparable_hash for row in static.rows if row.run == newest and row.comparable_hash is not None}
    pairing = Pairing([], 0, [*missing(static), *missing(arm)], [])
    if len(home) > 1:
        pairing.findings.append(Finding("no_data", f"run {newest} has static rows of {len(home)} environments"))
        return pairing
    void = 0
    for row in sorted(arm.rows, key=lambda row: (runs.index(row.run), row.block)):
        other = others.get((row.run, row.block))
        if other is None:
            pairing.findings.append(Finding("no_data", f"block {row.block} of run {row.run} has no {static.name} row"))
        elif row.status != "passed" or other.status != "passed":
            judge_rows(policy, other, row, pairing)
        elif row.void_reason is not None or other.void_reason is not None:
            void += 1
        elif {row.comparable_hash, other.comparable_hash} != home and row.run != newest:
            pairing.ignored.append(f"block {row.block} of run {row.run} ran in another environment")
        elif reason := unequal(policy, cell, other, row):
            pairing.findings.append(Finding("no_data", f"block {row.block}: {reason}"))
        else:
            pairing.pairs.append(Pair(other, row))
    return pairing._replace(void=void)


def baseline_of(policy: Policy, cell: CellRows) -> ArmRows | None:
    """The arm that the others are held to."""
    return next((a for a in cell.arms if a.pool == policy.baseline and a.label is None and not a.plants), None)


def missing(arm: ArmRows) -> list[Finding]:
    """A finding when planned rows of `arm` do not exist: a cell that vanished is not one that passed."""
    there = {(row.run, row.block) for row in arm.rows}
    lost = [key for key in arm.planned if key not in there]
    return (
        [Finding("no_data", f"{len(lost)} of {len(arm.planned)} planned {arm.name} rows are missing")] if lost else []
    )


def judge_rows(policy: Policy, static: Row, row: Row, pairing: Pairing) -> None:
    """What it means that one of the two did not pass."""
    why = f"{row.status} in block {row.block}: {row.reason_code or ''} {row.reason or ''}".strip()
    if row.status == "wrong" and row.reason_code not in NOT_A_RESULT and static.status == "passed":
        pairing.findings.append(Finding("fail", why))
    elif row.status == "wrong":
        pairing.findings.append(Finding("no_data", f"{why} (static: {static.status})"))
    elif row.status == "passed":
        pairing.findings.append(Finding("no_data", f"static {static.status} in block {row.block}: {static.reason}"))
    else:
        meaning = getattr(policy.rows, row.status)
        if meaning == "ignore":
            pairing.ignored.append(why)
        elif meaning == "fail" and static.status != "passed":
            pairing.findings.append(
                Finding("no_data", f"{why} (static: {static.status})")
            )  # both: not the pool's doing
        else:
            pairing.findings.append(Finding(meaning, why))


def unequal(policy: Policy, cell: CellRows, static: Row, row: Row) -> str | None:
    """Why two passed rows may not be compared; None when they may."""
    for field in ("launcher", "prompt_hash", "comparable_hash", "device_name"):
        a, b = getattr(static, field), getattr(row, field)
        if a is None or a != b:
            return f"{field} is {a} in the static arm and {b} in the candidate"
    if row.launcher != cell.fields["launcher"] or row.launcher not in policy.launchers:
        return f"executed by {row.launcher}, the policy needs {' or '.join(policy.launchers)}"
    if policy.devices and row.device_name not in policy.devices:
        return f"ran on {row.device_name}, the policy needs {' or '.join(policy.devices)}"
    return None


def measured(rows: Iterable[Row], metric: str) -> list[float]:
    """`metric` of every row, each a positive number. NoNumberError says of the first that is none what it is."""
    values = []
    for row in rows:
        where = f"{metric} in block {row.block} of run {row.run}"
        if metric not in row.values:
            raise NoNumberError(f"{where} is missing")
        value = row.values[metric]
        if value is None:
            raise NoNumberError(f"{where} is null")
        if isinstance(value, str) or not math.isfinite(value):
            raise NoNumberError(f"{where} is {value}")
        if value <= 0.0:
            raise NoNumberError(f"{where} is {value:g}, which no clock and no counter gives")
        values.append(float(value))
    return values
