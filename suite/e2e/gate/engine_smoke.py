"""The engine's smoke set: planted faults and their clean twins, run in a child before a gate decides.

The gate's own smoke set shows that its policy would fire on made-up rows. This one shows that the detectors of this
checkout, on this machine, see real mistakes in real code. What they saw is kept in the decision, for its replay.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from db.gate_inputs import Inputs
from suite.e2e.faults.child import detection_rows
from suite.e2e.gate.policy import Policy
from suite.e2e.gate.smoke import smoke_set
from suite.e2e.gate.verdicts import EngineFault, GateRefusedError, Smoke
from suite.errors import KvproofError

TIMEOUT_S = 900.0  # a busy machine's: the set takes 20 s of a quiet core
SEEN = EngineFault.__struct_fields__
EngineFaults = Callable[[], Sequence[EngineFault]]


def whole_smoke_set(policy: Policy, inputs: Inputs, engine_faults: EngineFaults) -> Smoke:
    """The gate's own smoke set and, where the policy requires it, the engine's; what was missed of either."""
    smoke = smoke_set(policy, inputs)
    if policy.smoke != "required":
        return smoke
    seen = tuple(engine_faults())
    missed = [text for each in seen for text in complaints(each)]
    return replace(smoke, planted=smoke.planted + len(seen), missed=(*smoke.missed, *missed), engine=seen)


def complaints(seen: EngineFault) -> list[str]:
    found = [] if seen.caught else [f"{seen.fault}, planted into the engine"]
    return found if seen.clean_twin_passed else [*found, f"the clean twin of {seen.fault}"]


def plant_into_engine() -> list[EngineFault]:
    """Run the engine's smoke set in a child. GateRefusedError when it does not come to an end, or plants nothing."""
    try:
        rows = detection_rows("--smoke", timeout_s=TIMEOUT_S)
        seen = [msgspec.convert({name: row[name] for name in SEEN}, EngineFault) for row in rows]
    except (KvproofError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise GateRefusedError(f"smoke set of the engine: {type(error).__name__}: {error}") from error
    if not seen:
        raise GateRefusedError("smoke set of the engine: no fault was planted, expected some of every kind")
    return seen
