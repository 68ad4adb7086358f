"""Reading values out of a parsed TOML table: each is checked, each error names its dotted field."""

from collections.abc import Callable, Collection
from typing import Any

from suite.errors import InputError, UnknownNameError

Table = dict[str, Any]
Check = Callable[[str, object], Any]
MAX_INTEGER = 2**31 - 1  # what every column and every tensor of ours can hold


def check_keys(field: str, table: object, known: Collection[str]) -> Table:
    """`table`, when it is one and has no key that is not known."""
    if not isinstance(table, dict):
        raise InputError(field, table, "a table")
    for key in table:
        if key not in known:
            raise UnknownNameError(f"{field}.{key}" if field else key, key, known)
    return table


def integer(minimum: int) -> Check:
    def check(field: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InputError(field, value, f"an integer, at least {minimum}")
        if value > MAX_INTEGER:
            raise InputError(field, value, f"an integer, at most {MAX_INTEGER}")
        return value

    return check


def number(minimum: float, maximum: float, *, above: bool = False) -> Check:
    """A number of [minimum, maximum], or of (minimum, maximum] when `above`. Refuses NaN."""

    def check(field: str, value: object) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not minimum <= value <= maximum or (above and value == minimum):
            low = f"above {minimum:g}" if above else f"at least {minimum:g}"
            raise InputError(field, value, f"a number {low} and at most {maximum:g}")
        return float(value)

    return check


def boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(field, value, "true or false")
    return value


def text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(field, value, "a string, not empty")
    if not value.isprintable():
        raise InputError(field, value, "a string without line breaks and control characters")
    return value


def one_of(names: Callable[[], Collection[str]]) -> Check:
    """A name of `names()`, which is asked only when a value is checked."""

    def check(field: str, value: object) -> str:
        name = text(field, value)
        if name not in (known := names()):
            raise UnknownNameError(field, name, known)
        return name

    return check


def axis(check: Check) -> Check:
    """One value or a list of distinct ones; always a list of checked values."""

    def check_all(field: str, value: object) -> list[Any]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise InputError(field, value, "at least one value")
        checked = [check(field, entry) for entry in values]
        for entry in checked:
            if checked.count(entry) > 1:
                raise InputError(field, value, f"distinct values, {entry!r} is there twice")
        return checked

    return check_all
