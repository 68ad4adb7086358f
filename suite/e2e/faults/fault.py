"""A planted fault as a value: what goes wrong, where it is put in, what shows it, and who must notice.

A *seam* is one attribute of the real code, named `module:name` or `module:Class.name`. A fault is planted by
substituting that attribute and nothing else, so production code has no branch for it, and what nothing was
planted into is the code as it stands. A *scenario* runs real objects and yields a *signal* for each detector that
fires; run with nothing planted it is the fault's clean twin, in which none may.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from suite.errors import InvariantError

Kind = Literal[
    "addressing",
    "state",
    "speculation",
    "numeric",
    "graph",
    "configuration",
    "benchmarking",
    "evaluation",
    "database",
]
KINDS: tuple[Kind, ...] = (
    "addressing",
    "state",
    "speculation",
    "numeric",
    "graph",
    "configuration",
    "benchmarking",
    "evaluation",
    "database",
)
Substitute = Callable[[Any], Any]  # what stands at the seam -> what stands there once the fault is planted


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A detector that fired. `name` is `room.finding`, `text` the finding with its values."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a scenario runs. With `fresh` it does what a naive suite does: no churn, and no check that pages moved."""

    seed: int = 0
    fresh: bool = False
    device: str = "cpu"


Scenario = Callable[[Setting], Iterator[Signal]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake. It is caught when at least one of `signals` fires.

    `severity`: how large the mistake is, where it has a number (rows, tokens, percent). `source`: where it was seen,
    a row of the fault catalogue (B..) or of the pool design's silent failures (U..). `smoke`: part of the smoke set.
    """

    id: str
    kind: Kind
    seam: str
    text: str
    substitute: Substitute
    scenario: Scenario
    signals: tuple[str, ...]
    source: str | None = None
    severity: float | None = None
    smoke: bool = False


class Registry(dict[str, Fault]):
    """Faults by id. `plants` makes a function, whose docstring says the mistake, the substitute of a new fault."""

    def plants(
        self, kind: Kind, seam: str, scenario: Scenario, *signals: str, **more: Any
    ) -> Callable[[Substitute], Substitute]:
        def add(substitute: Substitute) -> Substitute:
            text = " ".join((inspect.getdoc(substitute) or "").split())
            name = substitute.__name__
            if name in self or not text or not signals:
                raise InvariantError(f"fault {name}: a name of its own, a text and a signal != {(text, signals)}")
            self[name] = Fault(
                id=name,
                kind=kind,
                seam=seam,
                text=text,
                substitute=substitute,
                scenario=scenario,
                signals=signals,
                **more,
            )
            return substitute

        return add


FAULTS = Registry()
plants = FAULTS.plants
