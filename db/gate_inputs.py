"""What a gate decides from: plain records, read once, hashed, and stored whole beside the decision.

A number that is none has its name: `null` where the database says NULL, "nan" and "inf" where raw samples
hold them; a metric that was never measured has no entry. They are different things, and none is a number.
"""

import hashlib
import math
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from suite.records import Record, canonical_json

Number = float | str | None


def number(value: float | None) -> Number:
    """`value` as JSON can keep it: an infinity or NaN by its name."""
    return value if value is None or math.isfinite(value) else str(value)


class Exact(Record, frozen=True):
    """One exactness comparison of a row with its block's static row; the bound is 0.0."""

    metric: str
    effect: Number
    verdict: str


class Row(Record, frozen=True):
    """How one arm of one cell ended in the newest attempt at one block.

    `answers` has one text per repeat with a character per item of the cell: 1 right, 0 wrong, - not asked.
    `counters` are raw samples by name, [prompts] or [prompts, positions].
    """

    id: str
    run: str
    block: int
    attempt: int
    started_at: str
    status: str
    reason_code: str | None
    reason: str | None
    void_reason: str | None
    launcher: str | None
    prompt_hash: str | None
    comparable_hash: str | None
    device_name: str | None
    values: dict[str, Number]
    answers: tuple[str, ...]
    exact: tuple[Exact, ...]
    counters: dict[str, list[Any]]


class ArmRows(Record, frozen=True):
    """One arm of a cell. `planned` are the (run, block) pairs in which it was to run."""

    id: str
    pool: str
    label: str | None
    plants: tuple[str, ...]
    planned: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The arm as people call it; `static` and its replicate are two."""
        return " + ".join((self.pool if self.label is None else self.label, *self.plants))


class Series(Record, frozen=True):
    """A cell's nightly mean log ratios of one metric, positive where the arm is worse than static.

    `pinned` is the mean of the release that somebody pinned, in run `pinned_run`.
    """

    arm: str
    metric: str
    runs: tuple[str, ...]
    values: tuple[float, ...]
    pinned: float | None
    pinned_run: str | None


class CellRows(Record, frozen=True):
    """One cell with the fields it may be selected by. `tasks` names the task of every item, in `answers`' order."""

    id: str
    name: str
    family: str
    fields: dict[str, str | int | bool | float | None]
    tasks: tuple[str, ...]
    arms: tuple[ArmRows, ...]
    series: tuple[Series, ...]


class PlantedRow(Record, frozen=True):
    """How a row with a planted fault ended, at the revision that is judged."""

    fault: str
    run: str
    status: str


class Inputs(Record, frozen=True):
    """Everything one decision is made from. `runs` are pooled, oldest first: a re-run appends, it never replaces."""

    run: str
    suite: str
    code_rev: str
    state: str
    runs: tuple[str, ...]
    cells: tuple[CellRows, ...]
    planted: tuple[PlantedRow, ...]


def pack(inputs: Inputs) -> tuple[str, bytes]:
    """The sha256 of the inputs' canonical JSON, and that JSON compressed."""
    text = canonical_json(inputs)
    return hashlib.sha256(text).hexdigest(), zlib.compress(text, 6)


def unpack(data: bytes) -> tuple[str, Inputs]:
    """The sha256 and the inputs of what `pack` made."""
    text = zlib.decompress(data)
    return hashlib.sha256(text).hexdigest(), msgspec.json.decode(text, type=Inputs)


def answer_text(items: Iterable[str], answers: dict[str, bool]) -> str:
    """`answers` in the order of `items`, a character each."""
    return "".join("-" if item not in answers else "1" if answers[item] else "0" for item in items)
