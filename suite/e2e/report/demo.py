"""The demo's verdict: every real row passed, and the planted fault, and only it, was caught."""

from typing import NamedTuple

from db.queries import Ended


class Verdict(NamedTuple):
    """Whether the demo proved its point, in one line."""

    proved: bool
    text: str


def demo_verdict(rows: list[Ended]) -> Verdict:
    """Proved exactly when all rows without a plant are `passed` and the one with a plant is `wrong`."""
    real = [row for row in rows if not row.plants]
    planted = [row for row in rows if row.plants]
    not_passed = [
        f"{row.show['backend']} {row.show['pool']} {row.show['status']}"
        for row in real
        if row.show["status"] != "passed"
    ]
    if not real or not_passed:
        return Verdict(False, f"NOT PROVED: {', '.join(not_passed) or 'no real row'}; every real row must pass")
    if len(planted) != 1:
        return Verdict(False, f"NOT PROVED: {len(planted)} planted rows, expected 1")
    fault, status = ", ".join(planted[0].plants), planted[0].show["status"]
    if status != "wrong":
        return Verdict(False, f"NOT PROVED: the planted fault {fault} ended as {status}, expected wrong")
    return Verdict(True, f"PROVED: {len(real)} of {len(real)} rows passed, and the planted fault {fault} was caught")
