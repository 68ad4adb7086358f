"""Holding the arms of a run against each other, metric by metric, over its blocks.

A block is a pair: an arm's value is taken with its own block's static value, and the median over the pairs
is told, with how many there are. Void blocks are left out. Times are never judged here: the gate does.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict

import sqlalchemy as sa

from db.queries import Ended, check_metric_name, ended_rows, metric_order
from suite.records import METRICS

MIN_BLOCKS = 4  # below, a median ratio is not even told as one
JOINT_METRICS = {  # by family: computed over both arms, kept with the other one
    "engine": ("max_logit_diff", "token_mismatches"),
    "kernel": ("max_output_diff",),
}


class CompareRow(TypedDict):
    """One metric of both arms of one cell; `ratio` is the median over its pairs, None where no value divides."""

    cell: str
    metric: str
    static: float | None
    unified: float | None
    delta: float | None
    ratio: float | None
    blocks: int
    verdict: str


class Pair(NamedTuple):
    """One metric of one block."""

    static: float | None
    unified: float | None


def compare_rows(engine: sa.Engine, run_id: str, metric: str | None = None) -> list[CompareRow]:
    """Every metric, or only `metric`, of every arm beside its cell's static arm."""
    ended = ended_rows(engine, run_id)
    if metric is not None:
        check_metric_name(metric, [row.show for row in ended])
    static = {(row.cell_id, row.block): row for row in ended if row.is_reference}
    arms: dict[tuple[str, str], list[Ended]] = {}
    for row in ended:
        if not row.is_reference:
            arms.setdefault((row.cell_id, arm_name(row)), []).append(row)
    return [
        compare_metric(name, blocks, [static.get((row.cell_id, row.block)) for row in blocks])
        for blocks in arms.values()
        for name in metric_names(blocks, static)
        if metric in (None, name)
    ]


def arm_name(row: Ended) -> str:
    """The cell's name with what tells this arm from the unified one."""
    other = row.show["label"] or row.show["pool"]
    return row.show["cell"] + ("" if other == "unified" else f"+{other}")


def metric_names(blocks: Sequence[Ended], static: dict[tuple[str, int], Ended]) -> list[str]:
    names = set(JOINT_METRICS[blocks[0].show["family"]])
    for row in blocks:
        pair = static.get((row.cell_id, row.block))
        names |= {*row.show["metrics"], *(pair.show["metrics"] if pair else ())}
    return sorted(names, key=metric_order)


def compare_metric(metric: str, rows: Sequence[Ended], static: Sequence[Ended | None]) -> CompareRow:
    pairs = [
        Pair(value_of(pair, metric), value_of(row, metric))
        for row, pair in zip(rows, static, strict=True)
        if row.show["void_reason"] is None
    ]
    whole = [pair for pair in pairs if None not in pair]
    joint = metric in JOINT_METRICS[rows[0].show["family"]]
    deltas = [pair.unified if joint else pair.unified - pair.static for pair in (pairs if joint else whole)]  # type: ignore[operator]
    known = [delta for delta in deltas if delta is not None]
    ratios = [pair.unified / pair.static for pair in whole if pair.static]  # type: ignore[operator]
    return CompareRow(
        cell=arm_name(rows[0]),
        metric=metric,
        static=median(pair.static for pair in pairs),
        unified=median(pair.unified for pair in pairs),
        delta=(max(known, key=abs) if joint else statistics.median(known)) if known else None,
        ratio=statistics.median(ratios) if ratios else None,
        blocks=len(pairs),
        verdict=verdict(metric, pairs, deltas, joint) if pairs else f"void: {rows[0].show['void_reason']}",
    )


def verdict(metric: str, pairs: Sequence[Pair], deltas: Sequence[float | None], joint: bool) -> str:
    """What the pairs say; for a metric that is missing anywhere, that it is."""
    kind = METRICS.get(metric.partition(".")[0])
    complete = None not in deltas and len(deltas) == len(pairs)
    if not complete and kind is not None and kind.better == "neither" and not joint:
        lone = "static" if all(pair.unified is None for pair in pairs) else "unified"
        return f"not judged: only the {lone} arm has it"
    if not complete:
        return "missing"
    if kind is not None and kind.timing:
        few = len(pairs) < MIN_BLOCKS
        return f"not judged: {len(pairs)} block{'s' * (len(pairs) != 1)}" + ("" if few else ", the gate judges")
    return "equal" if not any(deltas) else "differs"


def value_of(row: Ended | None, metric: str) -> float | None:
    found = row.show["metrics"].get(metric) if row else None
    return found["value"] if found else None


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
