"""Substitutes what stands at a seam, and puts it back.

`planted` holds while its block runs. `unplanted` lifts every plant for a moment: the arm that the faulty one is
held against, and the detectors themselves, must run as they are.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from suite.e2e.faults.fault import Fault
from suite.errors import InvariantError


@dataclass(frozen=True, eq=False)
class Plant:
    """One substitution: `owner.name` is `own` in the code as it stands and `replacement` while planted."""

    owner: Any
    name: str
    own: Any
    replacement: Any

    def put(self) -> None:
        setattr(self.owner, self.name, self.replacement)

    def lift(self) -> None:
        setattr(self.owner, self.name, self.own)


_planted: list[Plant] = []


def locate(seam: str) -> tuple[Any, str]:
    """(owner, attribute) of `module:name` or `module:Class.name`, which the owner must define itself."""
    module, _, path = seam.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    if name not in vars(owner):
        raise InvariantError(f"seam {seam}: {name} is not defined there: attributes != 1")
    return owner, name


def plant_of(fault: Fault) -> Plant:
    """The substitution of `fault`. A static method, class method or property stays one."""
    owner, name = locate(fault.seam)
    own = inspect.getattr_static(owner, name)
    if isinstance(own, staticmethod | classmethod):
        replacement: Any = type(own)(fault.substitute(own.__func__))
    elif isinstance(own, property):
        replacement = property(fault.substitute(own.fget))
    else:
        replacement = fault.substitute(own)
    return Plant(owner, name, own, replacement)


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """`fault` stands in the code while the block runs."""
    plant = plant_of(fault)
    plant.put()
    _planted.append(plant)
    try:
        yield
    finally:
        _planted.remove(plant)
        plant.lift()


@contextlib.contextmanager
def unplanted() -> Iterator[None]:
    """Nothing is planted while the block runs."""
    lifted = list(_planted)
    for plant in reversed(lifted):
        plant.lift()
    _planted.clear()
    try:
        yield
    finally:
        _planted.extend(lifted)
        for plant in lifted:
            plant.put()
