"""Whether the arms of a block ran alike. Where they did not, the block is void and enters no mean.

A guard judges the measurement, never the arm: a wrong row stays wrong in a void block. Rows that did not
answer have nothing to be held against, and planted arms are meant to differ. Pure functions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suite.records import Arm, Outcome

CLOCK_TOLERANCE = 0.05  # of the SM clock: more than what boost clocks breathe, less than one step of throttling
# NVML: hardware slowdown, software thermal, hardware thermal, power brake. The software power cap is daily life.
THROTTLE_MASK = 0x8 | 0x20 | 0x40 | 0x80
TRANSIENT = frozenset({"throttled", "clocks_changed", "clocks_differ", "gpus_differ"})  # another attempt may be sound

Fact = Callable[[Outcome], Any]


def void_reason(block: Sequence[tuple[Arm, Outcome]]) -> str | None:
    """`code: words` of the first guard that the block does not pass; None when it passes them all."""
    answered = {name(arm): o for arm, o in block if not arm.plants and o.status in ("passed", "wrong")}
    passed = {arm: outcome for arm, outcome in answered.items() if outcome.status == "passed"}
    for code, fact, outcomes in (
        ("launchers_differ", lambda o: o.launcher, answered),
        ("prompts_differ", lambda o: o.prompt_hash, answered),
        ("requests_differ", lambda o: tokens(o)[1], passed),
        ("tokens_differ", lambda o: tokens(o)[0], passed),
        ("gpus_differ", lambda o: o.guards and o.guards.gpu_uuid, passed),
        ("kernels_differ", lambda o: (o.guards and o.guards.kernels) or None, passed),
    ):
        if reason := unequal(code, fact, outcomes):
            return reason
    return next(filter(None, (disturbed(arm, outcome) for arm, outcome in passed.items())), None) or clocks(passed)


def transient(reason: str | None) -> bool:
    """Whether the block may pass when it is run again."""
    return reason is not None and reason.partition(":")[0] in TRANSIENT


def name(arm: Arm) -> str:
    return arm.label or arm.pool


def tokens(outcome: Outcome) -> tuple[float | None, int | None]:
    """(generated tokens, requests served), None where the cell generates none."""
    found = outcome.metrics.get("generated_tokens")
    return (found.value, found.n) if found else (None, None)


def unequal(code: str, fact: Fact, outcomes: Mapping[str, Outcome]) -> str | None:
    """The void reason when the arms' facts are not all one; a fact that nobody can tell is left out."""
    found = {arm: fact(outcome) for arm, outcome in outcomes.items()}
    told = {arm: value for arm, value in found.items() if value is not None}
    if all(value == next(iter(told.values())) for value in told.values()):
        return None
    return f"{code}: {', '.join(f'{value} in {arm}' for arm, value in told.items())}"


def disturbed(arm: str, outcome: Outcome) -> str | None:
    """Why the timed window of one arm cannot count."""
    seen = outcome.guards
    if seen is None:
        return None
    if seen.compiles:
        return f"compiled: {seen.compiles} kernels inside the timed window of {arm}"
    if seen.throttle is not None and seen.throttle & THROTTLE_MASK:
        return f"throttled: {arm} ran under NVML's reasons {seen.throttle:#x}"
    if seen.sm_mhz and apart(*seen.sm_mhz):
        return f"clocks_changed: {seen.sm_mhz[0]:g} to {seen.sm_mhz[1]:g} MHz in the timed window of {arm}"
    return None


def clocks(outcomes: Mapping[str, Outcome]) -> str | None:
    found = {arm: sum(o.guards.sm_mhz) / 2 for arm, o in outcomes.items() if o.guards and o.guards.sm_mhz}
    if found and apart(min(found.values()), max(found.values())):
        return f"clocks_differ: {', '.join(f'{mhz:g} MHz in {arm}' for arm, mhz in found.items())}"
    return None


def apart(a: float, b: float) -> bool:
    return abs(a - b) > CLOCK_TOLERANCE * max(a, b)
