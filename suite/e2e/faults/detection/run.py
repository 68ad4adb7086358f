"""The detection run: every fault once with nothing planted, once planted; which signals fired, and how soon.

A fault is caught when a signal that was expected of it fires. Its clean twin is the same scenario with the same
numbers: one signal there, and the fault proves nothing.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from suite.e2e.faults.detection.registry import FAULTS
from suite.e2e.faults.detection.signals import first_of_each, signal_of
from suite.e2e.faults.fault import KINDS, Fault, Scenario, Setting, Signal
from suite.e2e.faults.seams import planted
from suite.errors import InputError, UnknownNameError


class FaultRow(TypedDict):
    """One fault's row. `by`: every signal that fired; `first_signal`: the first `expected` one, with its values.

    `gpu_seconds`: what the planted run took on a GPU, 0 on a CPU; `seconds`: on any device.
    """

    fault: str
    kind: str
    caught: bool
    by: list[str]
    first_signal: str | None
    gpu_seconds: float
    clean_twin_passed: bool
    seconds: float
    seam: str
    text: str
    expected: list[str]
    severity: float | None


def choose(kind: str | None = None, smoke: bool = False) -> list[Fault]:
    """The faults of one kind or of all, or those of the smoke set; in the order of the kinds."""
    if kind is not None and kind not in KINDS:
        raise UnknownNameError("kind", kind, KINDS)
    chosen = [f for f in FAULTS.values() if kind in (None, f.kind) and (f.smoke or not smoke)]
    if not chosen:
        raise InputError("faults", (kind, smoke), "at least one fault of that kind, in the smoke set if asked for")
    return sorted(chosen, key=lambda fault: KINDS.index(fault.kind))


def detect(
    faults: Sequence[Fault], setting: Setting | None = None, told: Callable[[FaultRow], None] = lambda row: None
) -> list[FaultRow]:
    """One row per fault. `told` hears of every row as it comes."""
    setting = setting or Setting()
    twins: dict[Scenario, list[Signal]] = {}  # many faults share a scenario, and so its twin
    rows = []
    for fault in faults:
        if fault.scenario not in twins:
            twins[fault.scenario] = observe(fault.scenario, setting)
        rows.append(row_of(fault, setting, twins[fault.scenario]))
        told(rows[-1])
    return rows


def row_of(fault: Fault, setting: Setting, twin: Sequence[Signal]) -> FaultRow:
    started = time.perf_counter()
    with planted(fault):
        signals = observe(fault.scenario, setting)
    took = time.perf_counter() - started
    first = next((signal for signal in signals if signal.name in fault.signals), None)
    return FaultRow(
        fault=fault.id,
        kind=fault.kind,
        caught=first is not None,
        by=[signal.name for signal in signals],
        first_signal=None if first is None else f"{first.name}: {first.text}",
        gpu_seconds=0.0 if setting.device == "cpu" else took,
        clean_twin_passed=not twin,
        seconds=took,
        seam=fault.seam,
        text=fault.text,
        expected=list(fault.signals),
        severity=fault.severity,
    )


def observe(scenario: Scenario, setting: Setting) -> list[Signal]:
    """The signals that fire, the first of each name. An error ends the scenario and is a signal of its own."""
    signals: list[Signal] = []
    try:
        signals.extend(scenario(setting))
    except Exception as error:  # what would end a child as a crashed row; the signal says of what
        signals.append(signal_of(error))
    return first_of_each(signals)


def missed(rows: Iterable[FaultRow]) -> list[str]:
    """What makes a run fail: faults that no expected signal caught, and clean twins that were not."""
    return [row["fault"] for row in rows if not (row["caught"] and row["clean_twin_passed"])]
