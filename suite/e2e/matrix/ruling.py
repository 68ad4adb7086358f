"""From a block's outcomes to its rows: each judged against the static arm, all guarded together. No clock, no disk."""

import math
from collections.abc import Sequence

import msgspec

from db.checks import check_outcome
from db.keys import uuid7
from db.store import Comparison, Entry
from suite.e2e.matrix.digest import bounded
from suite.e2e.matrix.executors import crashed
from suite.e2e.matrix.guards import void_reason
from suite.e2e.matrix.judge import Exactness, Ruling, judge
from suite.e2e.matrix.spool import Concluded
from suite.errors import InputError
from suite.records import POOL_MODES, CellJob, Outcome

EXACTNESS_METHOD, EXACTNESS_VERSION = "bit_identity", 1

Results = Sequence[tuple[CellJob, Concluded]]


def rule_block(results: Results, attempt: int) -> list[Entry]:
    """The rows of one attempt at a block, the static arm's first."""
    entries: list[Entry] = []
    static: Outcome | None = None
    static_id = ""
    for job, concluded in sorted(results, key=reading_order):
        row_id = uuid7()
        ruling = rule(job, concluded.outcome, static)
        if job.arm.is_reference:
            static, static_id = ruling.outcome, row_id
        exactness = exactness_rows(ruling.exactness, static_id) if ruling.exactness else ()
        entries.append(
            Entry(
                id=row_id,
                job=job,
                outcome=ruling.outcome,
                started_at=concluded.started_at,
                attempt=attempt,
                comparisons=exactness,
            )
        )
    void = void_reason([(entry.job.arm, entry.outcome) for entry in entries])
    replace = msgspec.structs.replace
    return [replace(entry, outcome=bounded(entry.outcome), void_reason=void) for entry in entries]


def reading_order(result: tuple[CellJob, Concluded]) -> tuple[bool, int, bool, int]:
    arm = result[0].arm
    return (not arm.is_reference, len(arm.plants), arm.label is None, POOL_MODES.index(arm.pool))


def rule(job: CellJob, outcome: Outcome, static: Outcome | None) -> Ruling:
    """The ruling on one outcome; what no row may have becomes a crash that says so."""
    try:
        check_outcome(outcome)
        ruling = judge(job.cell, job.arm, outcome, static)
        check_outcome(ruling.outcome)
    except InputError as error:  # the child's claim is no row; that it made one is
        same = {name: getattr(outcome, name) for name in ("exit_code", "signal", "stderr_tail", "duration_s")}
        refused = crashed("bad_outcome", f"wrote an outcome that is no row: {error}")
        return Ruling(outcome=msgspec.structs.replace(refused, **same))
    return ruling


def exactness_rows(exactness: Exactness, static_id: str) -> tuple[Comparison, ...]:
    """`exactness` as the database keeps it, against the row `static_id`."""
    effects = {f"max_{exactness.of}_diff": exactness.max_diff}
    if exactness.tokens:
        effects["token_mismatches"] = float(exactness.token_mismatches)
    return tuple(
        Comparison(
            static_id=static_id,
            metric=metric,
            method=EXACTNESS_METHOD,
            version=EXACTNESS_VERSION,
            effect=effect if math.isfinite(effect) else None,
            verdict="equal" if effect == 0.0 else "differs",
        )
        for metric, effect in effects.items()
    )
