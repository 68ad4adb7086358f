"""From what happened to signals: errors name the room that raised them, outcomes are ruled on by the real judge."""

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from suite.e2e.engine.runner import NonFiniteLogitsError
from suite.e2e.faults.fault import Signal
from suite.e2e.faults.seams import unplanted
from suite.e2e.matrix.judge import judge
from suite.errors import InputError, InvariantError, RefusedError, one_line
from suite.records import Arm, Cell, Metric, Outcome, Provenance, Samples, Workload

ROOT = Path(__file__).resolve().parents[4]
FINDINGS: tuple[tuple[type[Exception], str], ...] = (
    (InvariantError, "invariant"),
    (NonFiniteLogitsError, "not_finite"),
    (RefusedError, "refused"),
    (InputError, "bad_input"),
    (TypeError, "type_error"),
)
# of SQLAlchemy, by name: SQL is spoken in db only
DATABASE_FINDINGS = {"IntegrityError": "constraint", "StatementError": "bad_value", "OperationalError": "unusable"}
PROVENANCE = Provenance(
    python="3",
    torch="2",
    triton="3",
    platform="simulated",
    device_name="simulated",
    driver=None,
    cuda=None,
    kernel_library=None,
    kernel_version=None,
    commit=None,
    dirty=None,
)


def signal_of(error: Exception) -> Signal:
    """An error as a signal: `room.finding`, where the room is the innermost one of ours that it passed through."""
    finding = next((name for kind, name in FINDINGS if isinstance(error, kind)), None)
    finding = finding or DATABASE_FINDINGS.get(type(error).__name__, "crash")
    return Signal(name=f"{room_of(error)}.{finding}", text=one_line(f"{type(error).__name__}: {error}")[:300])


def room_of(error: Exception) -> str:
    """`allocators`, `translator`, `engine`, ...: from the innermost frame that is ours and no part of the faults."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_relative_to(ROOT):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "db":
            return "db"
        if parts[0] == "suite" and parts[1] in ("kernels", "e2e") and parts[2] != "faults":
            return parts[2]
        if parts[0] == "suite" and parts[1] not in ("kernels", "e2e"):
            return parts[1]
    return "child"


def ruled(cell: Cell, arm: Arm, outcome: Outcome, static: Outcome | None) -> Iterator[Signal]:
    """What the judge says of `outcome`, unless it passes; every finding in its reason stands in the text."""
    with unplanted():
        ruling = judge(cell, arm, outcome, static)
    if ruling.outcome.status != "passed":
        yield Signal(name=f"judge.{ruling.outcome.reason_code}", text=one_line(ruling.outcome.reason or ""))


def first_of_each(signals: Sequence[Signal]) -> list[Signal]:
    """The first signal of each name, in order."""
    found: dict[str, Signal] = {}
    for signal in signals:
        found.setdefault(signal.name, signal)
    return list(found.values())


def cell_of(family: str = "kernel", **changes: object) -> Cell:
    """The cell that a scenario stands for, so that the judge and the guards have one to rule on."""
    fields: dict[str, object] = {
        "family": family,
        "model": "scenario",
        "backend": "reference",
        "launcher": "reference",
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "graph": True,
        "seed": 0,
        "workload": Workload(name="scenario", requests=4, prompt_tokens=8, new_tokens=8, batch=4, chunk_tokens=16),
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def passed(**changes: object) -> Outcome:
    """An outcome that nothing speaks against."""
    fields: dict[str, object] = {
        "status": "passed",
        "launcher": "reference",
        "provenance": PROVENANCE,
        "prompt_hash": "scenario",
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def moved(share: float, of: int) -> dict[str, Metric]:
    return {"moved_share": Metric.of("moved_share", share, of)}


def outputs(values: object) -> tuple[Samples, ...]:
    return (Samples.pack("output", values),)  # type: ignore[arg-type]
