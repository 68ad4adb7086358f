"""Made-up inputs that a policy must pass: what the gate plants its own faults into, and what campaigns draw."""

import math
from typing import Any

import numpy as np

from db.gate_inputs import ArmRows, CellRows, Exact, Inputs, Row, Series
from suite.e2e.gate import policy
from suite.e2e.gate.policy import CellRule, Policy
from suite.records import Cell

RUN = "synthetic"
PROMPTS = 60
POSITIONS = 4
CALM = 20.0  # a margin is this many standard deviations of a clean block


def clean_inputs(rules: Policy, rule: CellRule, random: np.random.Generator) -> Inputs:
    """One cell that `rule` selects: a static arm, its replicate, and a candidate that differs in noise alone."""
    fields = dict.fromkeys(Cell.__struct_fields__) | {"launcher": rules.launchers[0], "family": "engine"}
    fields |= {name: values[0] for name, values in rule.select.items()}
    parts = [rules.endpoints[name] for name in rule.endpoints]
    tasks = tuple(["synthetic"] * questions(parts))
    if any(isinstance(part, policy.Accuracy) and part.tasks for part in parts):
        wanted = {task for part in parts if isinstance(part, policy.Accuracy) for task in part.tasks}
        tasks = tuple(task for task in sorted(wanted) for _ in range(questions(parts)))
    answers = "".join("1" if value else "0" for value in random.random(len(tasks)) < 0.8)
    arms = []
    for pool, label in ((rules.baseline, None), (rules.baseline, "replicate"), (rules.candidates[0], None)):
        name = label or pool
        rows = tuple(
            make_row(name, block, fields["launcher"], parts, answers, random) for block in range(blocks_of(parts))
        )
        planned = tuple((RUN, row.block) for row in rows)
        arms.append(ArmRows(id=name, pool=pool, label=label, plants=(), planned=planned, rows=rows))
    series = tuple(
        make_series(part, arm.id, random) for part in parts if isinstance(part, policy.History) for arm in arms[1:]
    )
    cell = CellRows(
        id="cell", name="a synthetic cell", family=str(fields["family"]), fields=fields, tasks=tasks, arms=tuple(arms),
        series=series,
    )  # fmt: skip
    return Inputs(
        run=RUN,
        suite=RUN,
        code_rev=RUN,
        state="finished",
        runs=(RUN,),
        cells=(cell,) * max(1, rule.min_cells),
        planted=(),
    )


def questions(parts: list[policy.Endpoint]) -> int:
    """Enough questions for every accuracy margin where no answer flips."""
    return max([max(p.min_items, math.ceil(20 / p.margin)) for p in parts if isinstance(p, policy.Accuracy)] + [100])


def blocks_of(parts: list[policy.Endpoint]) -> int:
    return max([p.looks[-1] for p in parts if isinstance(p, policy.Latency)] + [1])


def make_row(
    arm: str, block: int, launcher: object, parts: list[policy.Endpoint], answers: str, random: np.random.Generator
) -> Row:
    """A passed row; its times vary by a `CALM`-th of the margin."""
    values = {
        part.metric: 10.0 * math.exp(random.normal(0.0, part.margin / CALM))
        for part in parts
        if isinstance(part, policy.Latency)
    }
    drafts = any(isinstance(part, policy.Accept | policy.Positions) for part in parts)
    counters = make_counters(block, parts) if drafts else {}
    same = {"id": f"{arm} {block}", "block": block, "launcher": str(launcher), "values": values}
    exact = (Exact(metric="max_logit_diff", effect=0.0, verdict="equal"),)
    return blank_row(**same, answers=(answers,), exact=exact, counters=counters)


def make_counters(block: int, parts: list[policy.Endpoint]) -> dict[str, Any]:
    """What a draft was believed, the same in every arm: placement changes no bit."""
    random = np.random.default_rng(block)
    prompts = max([part.min_prompts for part in parts if isinstance(part, policy.Accept)] + [PROMPTS])
    proposed = random.integers(40, 60, prompts)[:, None].repeat(POSITIONS, axis=1)
    accepted = random.binomial(proposed, 0.7)
    return {
        "verify_passes": proposed[:, 0].tolist(),
        "accept_tokens": (proposed[:, 0] + accepted.sum(axis=1)).tolist(),
        "accepted_at": accepted.tolist(),
        "proposed_at": proposed.tolist(),
    }


def blank_row(**changes: Any) -> Row:
    """A passed row in which nothing was measured, with `changes`."""
    fields: dict[str, Any] = {
        **{"id": "row", "run": RUN, "block": 0, "attempt": 1, "started_at": "2026-12-01T00:00:00+00:00"},
        **{"status": "passed", "reason_code": None, "reason": None, "void_reason": None, "launcher": "native"},
        **{"prompt_hash": "prompts", "comparable_hash": "environment", "device_name": "a device"},
        **{"values": {}, "answers": (), "exact": (), "counters": {}},
    }
    return Row(**(fields | changes))


def make_series(part: policy.History, arm: str, random: np.random.Generator) -> Series:
    """A history without a step."""
    return series_of_values(random.normal(0.0, 0.001, part.window), arm, part.metric)


def series_of_values(values: np.ndarray, arm: str = "unified", metric: str = "itl_ms") -> Series:
    runs = tuple(f"night {number}" for number in range(values.size))
    return Series(arm=arm, metric=metric, runs=runs, values=tuple(values.tolist()), pinned=None, pinned_run=None)
