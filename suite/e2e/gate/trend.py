"""Evidence from history: a recent step, or a slow creep, in a cell's nightly log ratios.

The static arm's replicate is the negative control: a step that both series take is the machine's, not the pool's.
"""

import numpy as np

from db.gate_inputs import Series
from suite.e2e.gate import history, policy
from suite.e2e.gate.verdicts import Evidence, StepFound, make_evidence

NEAR = 2  # nights by which two estimates of one step may differ
MAD_TO_SD = 1.4826  # of a normal distribution


def night_to_night_tau(series: np.ndarray) -> float:
    """The SD of a night, from differences of neighbours: neither a step nor a creep enters it, nor does one outlier."""
    return float(np.median(np.abs(np.diff(series))) * MAD_TO_SD / np.sqrt(2.0))


def recent_steps(series: Series, endpoint: policy.History, level: float) -> list[history.Step]:
    """Upward steps in the last `window` nights, counted from the series' first night."""
    values = np.array(series.values[-endpoint.window :])
    offset = len(series.values) - values.size
    found = history.find_steps(values, level)
    return [step._replace(night=step.night + offset) for step in found if step.rise > 0.0]


def history_evidence(
    name: str, endpoint: policy.History, cell_id: str, series: Series | None, control: Series | None
) -> tuple[Evidence, list[StepFound]]:
    """The alarm, and every upward step with it."""
    nights = 0 if series is None else len(series.values)
    if series is None or nights < endpoint.min_nights:
        reason = f"{nights} nights of {endpoint.metric}, {endpoint.min_nights} say something"
        return make_evidence(name, "history", "QUIET", reason, nights, needed=endpoint.min_nights), []
    steps = recent_steps(series, endpoint, endpoint.alpha)
    found = [
        StepFound(
            cell_id=cell_id, arm_id=series.arm, metric=series.metric, run=series.runs[s.night], p=s.p, rise=s.rise
        )
        for s in steps
    ]
    controls = recent_steps(control, endpoint, endpoint.alpha) if control is not None else []
    excused = {control.runs[s.night] for s in controls} if control is not None else set()
    fresh = [s for s in steps if s.night >= nights - endpoint.recent]
    own = [s for s in fresh if not excused & set(series.runs[max(0, s.night - NEAR) : s.night + NEAR + 1])]
    tau = night_to_night_tau(np.array(series.values))
    start = series.runs.index(series.pinned_run) + 1 if series.pinned_run in series.runs else 0
    crept = None
    if series.pinned is not None and tau > 0.0:
        crept = history.creep(np.array(series.values[start:]), series.pinned, tau)
    if own:
        worst = max(own, key=lambda step: step.rise)
        reason = f"{series.metric} stepped up by {worst.rise:.2%} at run {series.runs[worst.night]}, p {worst.p:.2g}"
        effect, p = worst.rise, worst.p
    elif crept is not None and series.pinned is not None:
        reason = f"{series.metric} has crept away from the release pinned at run {series.pinned_run}"
        effect, p = float(np.mean(series.values[-endpoint.recent :])) - series.pinned, None
    else:
        aside = f", {len(fresh) - len(own)} of the machine's own" if len(fresh) > len(own) else ""
        reason = f"no step of {series.metric} in the last {endpoint.recent} of {nights} nights{aside}"
        return make_evidence(name, "history", "QUIET", reason, nights, level=endpoint.alpha), found
    alarm = make_evidence(name, "history", "FAIL", reason, nights, effect=effect, p_beyond=p, level=endpoint.alpha)
    return alarm, found
