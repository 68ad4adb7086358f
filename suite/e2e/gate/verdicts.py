"""What a gate says: the evidence of each endpoint, what that makes of a cell, and of the whole run."""

from typing import Any, Literal

from suite.errors import KvproofError
from suite.records import Record

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
EXIT_PASS, EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_NO_DATA = 0, 1, 2, 3


class GateRefusedError(KvproofError):
    """The gate does not decide: there is nothing to decide from, or what there is cannot be trusted."""

    exit_code = EXIT_NO_DATA


class Evidence(Record):
    """What one endpoint says of one arm of one cell.

    A *claim* must be shown to hold (PASS) before the cell may pass; an *alarm* can only be raised (FAIL) or stay
    QUIET. `effect` is positive where the candidate is worse, `lo` and `hi` are one-sided bounds at `level`.
    `p_within` is the p value that the effect is inside the margin, `p_beyond` that it is a regression; both are None
    where no test is needed. `n` counts blocks, questions, prompts or nights, `needed` how many give the power that
    the policy asks for (None where nobody can tell). `no_data` says that the endpoint could not be judged at all.
    """

    endpoint: str
    kind: str
    effect: float | None
    lo: float | None
    hi: float | None
    p_within: float | None
    p_beyond: float | None
    margin: float | None
    level: float | None
    power: float | None
    n: int
    needed: int | None
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE", "QUIET"]
    reason: str
    no_data: bool


class CellDecision(Record):
    """What the evidence makes of one arm of one cell. A control is the static arm's replicate, judged likewise."""

    cell_id: str
    cell: str
    arm_id: str
    arm: str
    control: bool
    verdict: Verdict
    no_data: bool
    reason: str
    blocks: int
    void_blocks: int
    evidence: tuple[Evidence, ...]


class EngineFault(Record):
    """How one fault of the engine's smoke set went: planted it must be caught, and its clean twin must be silent."""

    fault: str
    caught: bool
    clean_twin_passed: bool
    first_signal: str | None


class Smoke(Record):
    """Whether the smoke set was caught: how many faults were planted, and which were missed.

    `engine`: those that were planted into the engine; none where the policy asks for none.
    """

    planted: int
    missed: tuple[str, ...]
    engine: tuple[EngineFault, ...] = ()


class Noise(Record):
    """The noise of one metric in one family and environment, from A/A rows: tau of log ratios, or psi0 of answers."""

    family: str
    comparable_hash: str
    metric: str
    spread: float
    n: int


class StepFound(Record):
    """A change point in a cell's history; `run` is the first night after it."""

    cell_id: str
    arm_id: str
    metric: str
    run: str
    p: float
    rise: float


class Decision(Record):
    """What the gate says of a run, and of each of its cells. `unjudged` names cells that the policy does not name."""

    run: str
    runs: tuple[str, ...]
    policy: str
    policy_sha: str
    inputs_sha: str
    engine_sha: str
    verdict: Verdict
    exit_code: int
    reason: str
    cells: tuple[CellDecision, ...]
    left_out: tuple[str, ...]
    unjudged: tuple[str, ...]
    smoke: Smoke
    noise: tuple[Noise, ...]
    steps: tuple[StepFound, ...]


UNKNOWN: dict[str, None] = dict.fromkeys(
    ("effect", "lo", "hi", "p_within", "p_beyond", "margin", "level", "power", "needed")
)


def make_evidence(endpoint: str, kind: str, verdict: str, reason: str, n: int = 0, **known: Any) -> Evidence:
    """An Evidence in which whatever is not `known` is None."""
    fields = {**UNKNOWN, "no_data": False, **known}
    return Evidence(endpoint=endpoint, kind=kind, verdict=verdict, reason=reason, n=n, **fields)  # type: ignore[arg-type]


def lacking(endpoint: str, kind: str, reason: str, n: int = 0) -> Evidence:
    """The evidence of an endpoint that could not be judged: never a pass."""
    return make_evidence(endpoint, kind, "INCONCLUSIVE", reason, n, no_data=True)
