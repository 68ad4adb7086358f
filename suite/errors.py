"""Every error kvproof raises on purpose.

`InputError` is what a user can mend: it names the field, the value and what was
expected, and ends the command with exit code 4. `InvariantError` is ours: it
prints the equation that broke, with its values. Everything else that escapes is
a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable

MAX_SHOWN_CHARS = 200  # of a value: more of it tells nobody more


def one_line(text: str) -> str:
    """`text` with its line breaks and control characters spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class KvproofError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 3


class InputError(KvproofError):
    """Bad input: one line that names the field, the value and what was expected, whatever characters are in them."""

    exit_code = 4

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        shown = repr(value)
        if len(shown) > MAX_SHOWN_CHARS:
            shown = f"{shown[:MAX_SHOWN_CHARS]}... ({len(shown)} characters)"
        super().__init__(one_line(f"{field}: got {shown}, expected {expected}"))


class UnknownNameError(InputError):
    """A name that is not registered; suggests the nearest one that is. `also` says what else would do."""

    def __init__(self, field: str, value: str, known: Iterable[str], also: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        super().__init__(field, value, f"one of {', '.join(names)}{also}{hint}")


class UnequalRowsError(InputError):
    """K and V rows of different width on a pool whose page is a uniform array of rows."""


class PageMapRangeError(InputError):
    """A pool whose kernel ids would not fit the int32 that page tables hold."""


class PoolTooSmallError(InputError):
    """A pool that cannot hold its sink and one request: that request would be retracted forever."""


class CheckpointError(InputError):
    """A checkpoint that does not fit the model: missing, extra, wrongly shaped or unreadable tensors."""


class RefusedError(KvproofError):
    """A backend that cannot serve here; the reason states need and got. Becomes a `refused` row."""


class OutOfPagesError(KvproofError):
    """The pool has no room for an allocation; nothing was taken."""


class InvariantError(KvproofError):
    """An equation that must hold does not; the message prints it with its values."""
