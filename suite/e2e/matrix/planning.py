"""What the command's options make of a plan: scaled to a CPU, cut to a shard, listed before anything runs."""

import os
import re
from typing import Any

from msgspec.structs import replace

from db.runs import typical_durations
from db.session import database_exists, open_db
from suite.e2e.matrix.executors import VISIBLE_GPUS
from suite.e2e.matrix.plan import cell_text
from suite.e2e.matrix.planned import Plan, PlannedCell
from suite.e2e.matrix.schedule import History, cell_blocks, schedule, shard, within_budget
from suite.errors import InputError
from suite.provenance import gpus
from suite.records import Cell, KernelWorkload, Workload, content_hash

SCALED_MODEL_TOKENS = 96  # of prompts, on a CPU


def cut(plan: Plan, db: str, launcher: str | None = None, part: str | None = None) -> tuple[Plan, str | None]:
    """`plan` on `launcher` and of shard `part` ("2/4"), with that shard's name. Times come from the rows of `db`."""
    if launcher is not None:
        if launcher != "reference":
            raise InputError("launcher", launcher, "'reference', which any CPU has; a matrix names the others itself")
        plan = on_cpu(plan)
    if part is None:
        return plan, None
    if not (found := re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)):
        raise InputError("shard", part, "I/N, such as 2/4")
    return shard(plan, int(found[1]), int(found[2]), history(db))


def history(db: str) -> History:
    """How long arms took before, when `db` is there to tell."""
    return typical_durations(open_db(db, create=False)) if database_exists(db) else {}


def slots(plan: Plan, jobs: int) -> list[str | None]:
    """One GPU a slot where several share a machine's; None leaves a child all of them."""
    if jobs == 1 or all(planned.cell.device == "cpu" for planned in plan.cells):
        return [None] * jobs
    visible = os.environ.get(VISIBLE_GPUS)
    here: list[str | None] = [*(gpus() if visible is None else visible.split(","))]
    if jobs > len(here):
        raise InputError("jobs", jobs, f"at most {len(here)}, the GPUs here: two blocks on one would time each other")
    return here[:jobs]


def on_cpu(plan: Plan) -> Plan:
    """`plan` on a CPU with the reference launcher, its workloads small; cells that become the same are one."""
    cells: dict[str, PlannedCell] = {}
    for planned in plan.cells:
        small = replace(planned, cell=small_cell(planned.cell))
        cells.setdefault(content_hash(small.cell), small)
    return replace(plan, cells=tuple(cells.values()))


def small_cell(cell: Cell) -> Cell:
    return replace(cell, device="cpu", launcher="reference", dtype="float32", workload=small_workload(cell.workload))


def small_workload(workload: Workload | KernelWorkload) -> Workload | KernelWorkload:
    """At most two requests of at most 96 tokens and, per task, four questions of that length: seconds on a CPU."""
    if isinstance(workload, KernelWorkload):
        queries = min(workload.query_tokens, 8)
        tokens = min(workload.tokens, SCALED_MODEL_TOKENS)
        return replace(workload, batch=min(workload.batch, 2), tokens=tokens, query_tokens=queries, samples=2)
    tasks = {f"{name.partition('@')[0]}@{SCALED_MODEL_TOKENS}": min(n, 4) for name, n in workload.tasks.items()}
    return replace(
        workload,
        requests=min(workload.requests, 2),
        prompt_tokens=min(workload.prompt_tokens, SCALED_MODEL_TOKENS),
        new_tokens=min(workload.new_tokens, 8),
        batch=min(workload.batch, 2),
        tasks=tasks,
        min_accuracy=None,  # over four questions it says nothing
        timing_repeats=1,
    )


def dry_run_rows(plan: Plan, db: str, budget_s: float | None, jobs: int) -> list[dict[str, Any]]:
    """Every cell that would run: its hash, arms, blocks, estimated seconds, and the blocks that the budget drops."""
    known = history(db)
    blocks = schedule(plan, 0, known)
    fit = len(blocks) if budget_s is None else within_budget(blocks, budget_s, jobs)
    dropped = [block.key[0] for block in blocks[fit:]]
    return [
        {
            "cell": cell_text(planned.cell),
            "hash": (key := content_hash(planned.cell)),
            "arms": [arm.label or "+".join((arm.pool, *arm.plants)) for arm in planned.arms],
            "blocks": planned.blocks,
            "priority": planned.priority,
            "estimate_s": round(sum(block.estimate_s for block in cell_blocks(planned, 0, known)), 3),
            "dropped_blocks": dropped.count(key),
        }
        for planned in plan.cells
    ]
