"""What a matrix takes out of the product of its axes again.

`[[exclude]]` names fields and drops the cells (or, with `pool`, the arms) that match all of them.
`[[constraints]]` drops what matches `when` and not `require`. A field may list several values. A rule that
matches nothing is a mistake and an error.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from suite.e2e.matrix.fields import Check, Table, check_keys
from suite.e2e.matrix.planned import PlannedCell
from suite.errors import InputError
from suite.records import Arm, Cell, Record

RULE_FIELDS = ("family", "model", "backend", "launcher", "device", "dtype", "page_size", "graph", "workload", "pool")


class Rule(Record):
    """Drops every arm that has one of the values of each field of `when`, and not of each field of `require`."""

    field: str  # where it stands in the matrix
    when: dict[str, list[Any]]
    require: dict[str, list[Any]] | None = None

    def drops(self, cell: Cell, arm: Arm) -> bool:
        return self.applies(cell, arm) and (self.require is None or not matches(self.require, cell, arm))

    def applies(self, cell: Cell, arm: Arm) -> bool:
        return matches(self.when, cell, arm)


def matches(wanted: dict[str, list[Any]], cell: Cell, arm: Arm) -> bool:
    return all(value_of(name, cell, arm) in values for name, values in wanted.items())


def value_of(name: str, cell: Cell, arm: Arm) -> object:
    match name:
        case "pool":
            return arm.pool
        case "workload":
            return cell.workload.name
        case _:
            return getattr(cell, name)


def read_rules(matrix: Table, checks: dict[str, Check]) -> list[Rule]:
    """The rules of a parsed matrix; InputError naming the field of the first thing wrong in them."""
    rules = []
    for number, table in enumerate(tables(matrix, "exclude")):
        field = f"exclude[{number}]"
        rules.append(Rule(field=field, when=read_values(field, table, checks)))
    for number, table in enumerate(tables(matrix, "constraints")):
        field = f"constraints[{number}]"
        given = check_keys(field, table, ("when", "require"))
        sides = {side: read_values(f"{field}.{side}", given.get(side), checks) for side in ("when", "require")}
        rules.append(Rule(field=field, **sides))
    return rules


def tables(matrix: Table, name: str) -> list[object]:
    found = matrix.get(name, [])
    if not isinstance(found, list):
        raise InputError(name, found, f"tables [[{name}]]")
    return found


def read_values(field: str, table: object, checks: dict[str, Check]) -> dict[str, list[Any]]:
    """The checked values of each field of `table`, always as lists."""
    given = check_keys(field, table, RULE_FIELDS)
    if not given:
        raise InputError(field, table, f"at least one of {', '.join(RULE_FIELDS)}")
    found = {}
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        checked = [checks[name](f"{field}.{name}", entry) for entry in values]
        found[name] = [one for entry in checked for one in (entry if isinstance(entry, list) else [entry])]
    return found


def apply_rules(planned: Sequence[PlannedCell], rules: Sequence[Rule]) -> tuple[PlannedCell, ...]:
    """The cells with the arms that no rule drops; a cell without arms is gone."""
    for rule in rules:
        if not any(rule.applies(cell.cell, arm) for cell in planned for arm in cell.arms):
            raise InputError(rule.field, rule.when, "values that at least one planned cell has")
    kept = []
    for cell in planned:
        arms = tuple(arm for arm in cell.arms if not any(rule.drops(cell.cell, arm) for rule in rules))
        if arms:
            kept.append(replace(cell, arms=arms))
    if not kept:
        raise InputError("cells", len(planned), "at least one that no rule drops")
    return tuple(kept)
