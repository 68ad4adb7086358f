"""From inputs and a policy to a decision: a pure function, so that a stored decision can be made again bit for bit.

PASS is an intersection of claims: every one is shown at its own level, and none needs a correction for
that. FAIL needs one regression, and those are many tests over many cells: they are held to a false
discovery rate. The static arm's replicate goes through the same code as a control. What is neither is
INCONCLUSIVE, and what could not be judged at all ends with exit code 3.
"""

import hashlib
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from msgspec.structs import replace

from db import gate_inputs
from db.gate_inputs import CellRows, Inputs
from suite.e2e.gate.cells import Judged, judge_cells
from suite.e2e.gate.policy import Policy
from suite.e2e.gate.statistics import false_discovery_q
from suite.e2e.gate.verdicts import (
    EXIT_FAIL,
    EXIT_INCONCLUSIVE,
    EXIT_NO_DATA,
    EXIT_PASS,
    CellDecision,
    Decision,
    Evidence,
    GateRefusedError,
    Smoke,
    Verdict,
)
from suite.errors import InputError
from suite.records import content_hash

LIBRARIES = ("numpy", "scipy", "statsmodels", "msgspec")
SmokeSet = Callable[[Policy, Inputs], Smoke]


def decide(policy: Policy, inputs: Inputs, smoke_set: SmokeSet) -> Decision:
    """The decision on `inputs` under `policy`.

    `smoke_set` plants the gate's own faults and says which were missed. Raises GateRefusedError when there is
    nothing to decide from or the smoke set was not caught, InputError for inputs that no decision may use.
    """
    refuse(inputs)
    smoke = smoke_set(policy, inputs)
    if policy.smoke != "not_required" and (smoke.missed or not smoke.planted):
        missed = f"missed {', '.join(smoke.missed)}" if smoke.missed else "no fault was planted"
        raise GateRefusedError(
            f"smoke set: {missed}, expected every one of {smoke.planted} planted faults to be caught"
        )
    judged = judge(policy, inputs)
    candidates = [cell for cell in judged.cells if not cell.control]
    if not candidates:
        raise GateRefusedError(f"run {inputs.run}: no row of a cell that policy {policy.name!r} names could be judged")
    verdict, exit_code, reason = overall(policy, inputs, judged, candidates)
    return Decision(
        run=inputs.run,
        runs=inputs.runs,
        policy=policy.name,
        policy_sha=content_hash(policy),
        inputs_sha=gate_inputs.pack(inputs)[0],
        engine_sha=engine_sha(),
        verdict=verdict,
        exit_code=exit_code,
        reason=reason,
        cells=tuple(judged.cells),
        left_out=tuple(judged.left_out),
        unjudged=tuple(judged.unjudged),
        smoke=smoke,
        noise=tuple(judged.noise),
        steps=tuple(judged.steps),
    )


def judge(policy: Policy, inputs: Inputs) -> Judged:
    """Every cell judged, excused by its control and held to the false discovery rate."""
    judged = judge_cells(policy, inputs)
    cells = control_discoveries(policy, excuse(judged.cells))
    return judged._replace(cells=[settle(cell) for cell in cells])


def refuse(inputs: Inputs) -> None:
    """Raise for inputs that no decision may be made from."""
    if inputs.state == "running":
        raise GateRefusedError(f"run {inputs.run} is still running, or was killed: `kvproof resume` ends it")
    if not any(arm.rows for cell in inputs.cells for arm in cell.arms):
        raise GateRefusedError(f"run {inputs.run} has no rows: it measured nothing")
    for cell in inputs.cells:
        for arm in cell.arms:
            if arm.plants:
                raise InputError(
                    "run", inputs.run, f"a run without planted faults, {cell.name} has {', '.join(arm.plants)}"
                )
        refuse_same_rows(cell)
        for series in cell.series:
            if series.pinned_run in inputs.runs:
                raise InputError("baseline", series.pinned_run, "a run other than the one that is judged")


def refuse_same_rows(cell: CellRows) -> None:
    """A row may not be held against itself."""
    seen: set[str] = set()
    for row in (row for arm in cell.arms for row in arm.rows):
        if row.id in seen:
            raise InputError("baseline", row.id, f"rows other than the candidate's, in {cell.name}")
        seen.add(row.id)


def excuse(cells: list[CellDecision]) -> list[CellDecision]:
    """Regressions that the static arm's own replicate shows as well are the machine's: nobody can tell."""
    wrong = {c.cell_id for c in cells if c.control and c.verdict == "FAIL"}
    guilty = {(c.cell_id, e.endpoint) for c in cells if c.control for e in c.evidence if e.verdict == "FAIL"}

    def excused(cell: CellDecision, found: Evidence) -> Evidence:
        if cell.control or found.verdict != "FAIL" or (cell.cell_id, found.endpoint) not in guilty:
            return found
        return replace(found, verdict="INCONCLUSIVE", reason=f"{found.reason}; the static arm's replicate fails it too")

    def judged(cell: CellDecision) -> CellDecision:
        cell = replace(cell, evidence=tuple(excused(cell, found) for found in cell.evidence))
        if cell.control or cell.verdict != "FAIL" or cell.cell_id not in wrong:
            return cell
        return replace(cell, verdict="INCONCLUSIVE", reason=f"{cell.reason}; the static arm's replicate fails too")

    return [judged(cell) for cell in cells]


def control_discoveries(policy: Policy, cells: list[CellDecision]) -> list[CellDecision]:
    """Keep the regressions whose false discovery rate over all tests of all candidates is low enough.

    A test at a look's level enters as if it had been taken at the policy's alpha, once.
    """
    tests = [
        (cell.cell_id, cell.arm_id, found.endpoint, adjusted_p(policy, found))
        for cell in cells
        if not cell.control
        for found in cell.evidence
        if found.p_beyond is not None
    ]
    q_values = dict(zip((test[:3] for test in tests), false_discovery_q([test[3] for test in tests]), strict=True))

    def kept(cell: CellDecision, found: Evidence) -> Evidence:
        q = q_values.get((cell.cell_id, cell.arm_id, found.endpoint))
        if cell.control or found.verdict != "FAIL" or q is None or q <= policy.fdr:
            return found
        reason = f"{found.reason}; over {len(tests)} tests q is {q:.2g}, above {policy.fdr:g}"
        return replace(found, verdict="QUIET" if found.margin is None else "INCONCLUSIVE", reason=reason)

    return [replace(cell, evidence=tuple(kept(cell, found) for found in cell.evidence)) for cell in cells]


def adjusted_p(policy: Policy, found: Evidence) -> float:
    alpha = policy.alpha_of(policy.endpoints[found.endpoint])
    scale = alpha / found.level if found.level else 1.0
    return min(1.0, float(found.p_beyond or 0.0) * scale)


def settle(cell: CellDecision) -> CellDecision:
    """The cell's verdict from its evidence; what its rows said by themselves stands already."""
    if cell.verdict == "FAIL" or cell.no_data:
        failed = [found for found in cell.evidence if found.verdict == "FAIL"]
        return replace(cell, verdict="FAIL", reason=failed[0].reason) if failed else cell
    for verdict in ("FAIL", "INCONCLUSIVE"):
        for found in sorted(cell.evidence, key=lambda found: not found.no_data):
            if found.verdict == verdict:
                reason = f"{found.endpoint}: {found.reason}"
                lacks = any(other.no_data for other in cell.evidence)
                return replace(cell, verdict=verdict, reason=reason, no_data=lacks)  # type: ignore[arg-type]
    if cell.verdict == "INCONCLUSIVE" and cell.reason:
        return cell
    claims = [found for found in cell.evidence if found.verdict == "PASS"]
    if not claims:
        return replace(cell, no_data=True, reason="nothing was claimed that could hold")
    return replace(cell, verdict="PASS", reason=f"{len(claims)} of {len(claims)} claims hold")


def overall(policy: Policy, inputs: Inputs, judged: Judged, candidates: list[CellDecision]) -> tuple[Verdict, int, str]:
    """The verdict of the run, its exit code and the reason in a sentence."""
    failed = [cell for cell in candidates if cell.verdict == "FAIL"]
    if failed:
        return (
            "FAIL",
            EXIT_FAIL,
            f"{len(failed)} of {len(candidates)} cells regressed: {failed[0].cell}: {failed[0].reason}",
        )
    for number, rule in enumerate(policy.cells):
        if judged.by_rule[number] < rule.min_cells:
            reason = f"cells[{number}]: {judged.by_rule[number]} cells were judged, at least {rule.min_cells} must be"
            return "INCONCLUSIVE", EXIT_NO_DATA, reason
    blind = [cell for cell in candidates if cell.no_data]
    if blind:
        reason = f"{len(blind)} of {len(candidates)} cells have no data: {blind[0].cell}: {blind[0].reason}"
        return "INCONCLUSIVE", EXIT_NO_DATA, reason
    unsure = [cell for cell in candidates if cell.verdict != "PASS"]
    if unsure:
        reason = f"{len(unsure)} of {len(candidates)} cells are not decided: {unsure[0].cell}: {unsure[0].reason}"
        return "INCONCLUSIVE", EXIT_INCONCLUSIVE, reason
    return "PASS", EXIT_PASS, f"every claim holds in all {len(candidates)} cells"


def engine_sha() -> str:
    """The hash of the code that decides: this package's sources, its inputs' and the libraries' versions."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(gate_inputs.__file__)]
    texts = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources}
    return content_hash([texts, {name: version(name) for name in LIBRARIES}, platform.python_version()])
