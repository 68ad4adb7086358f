"""When what runs: the blocks of a plan in their order, cut to a shard and to a budget.

A block is one fresh paired run of a cell's arms. All cells run their first block before any runs its
second, so that whatever ends a run early costs repeats and not cells. The order of the arms is drawn
for every two blocks and reversed in the second of them (ABBA or BAAB), so that a drift in time costs
both arms the same; where buffers lie is drawn anew for every arm of every attempt.
"""

import random
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from suite.e2e.matrix.planned import Plan, PlannedCell
from suite.errors import InputError
from suite.records import Arm, Cell, CellJob, Record, content_hash

SEED_BITS = 31  # what an integer column holds in every database
TYPICAL_S = {"native": 25.0, "interpreter": 20.0, "reference": 12.0}  # per arm, for what no run has timed yet

History = Mapping[tuple[str, str], float]  # seconds that an arm took before, by keys of cell and arm


class Block(Record):
    """One fresh paired run of `jobs`, in the order in which they run."""

    number: int
    seed: int
    jobs: tuple[CellJob, ...]
    priority: int
    estimate_s: float

    @property
    def cell(self) -> Cell:
        return self.jobs[0].cell

    @property
    def key(self) -> tuple[str, int]:
        """What a run has this block once of: its cell's key and its number."""
        return content_hash(self.cell), self.number

    def attempt(self, number: int) -> tuple[CellJob, ...]:
        """The jobs of one attempt, each with its own draw of where its buffers lie."""
        return tuple(
            replace(job, placement_seed=draw(f"{self.seed}/{number}/{content_hash(job.arm)}").getrandbits(SEED_BITS))
            for job in self.jobs
        )


def draw(text: str) -> random.Random:
    """A generator seeded by `text`, the same on every machine."""
    return random.Random(text)


def draw_seed() -> int:
    """A new seed for a run."""
    return random.SystemRandom().getrandbits(SEED_BITS)


def schedule(plan: Plan, seed: int, history: History | None = None) -> list[Block]:
    """Every block of `plan`: by priority, then by number, then in the plan's order."""
    blocks = [block for cell in plan.cells for block in cell_blocks(cell, seed, history or {})]
    return sorted(blocks, key=lambda block: (-block.priority, block.number))


def cell_blocks(planned: PlannedCell, seed: int, history: History) -> list[Block]:
    rng = draw(f"{seed}/{content_hash(planned.cell)}")
    order: list[Arm] = list(planned.arms)
    blocks = []
    for number in range(planned.blocks):
        if planned.blocks > 1:  # a single block cannot be balanced
            order = rng.sample(planned.arms, len(planned.arms)) if number % 2 == 0 else order[::-1]
        arms = [arm for arm in order if number == 0 or not arm.plants]
        if not arms:
            continue
        jobs = tuple(
            CellJob(
                cell=planned.cell, arm=arm, block=number, timeout_s=planned.timeout_s, memory_gib=planned.memory_gib
            )
            for arm in arms
        )
        estimate_s = sum(estimate(job, history) for job in jobs)
        block_seed = rng.getrandbits(SEED_BITS)
        blocks.append(
            Block(number=number, seed=block_seed, jobs=jobs, priority=planned.priority, estimate_s=estimate_s)
        )
    return blocks


def estimate(job: CellJob, history: History) -> float:
    """Seconds that `job` will take: as before, else what its launcher typically takes, never over its timeout."""
    known = history.get((content_hash(job.cell), content_hash(job.arm)))
    return min(job.timeout_s, TYPICAL_S[job.cell.launcher] if known is None else known)


def shard(plan: Plan, index: int, count: int, history: History | None = None) -> tuple[Plan, str]:
    """The part of `plan` that shard `index` of `count` (from 1) runs, and its name.

    Whole cells, the longest first, each to the shard that has least to do. The name ends with a hash of the whole
    split: shards that disagree about it, having seen other histories, would lose cells or run them twice.
    """
    if not 1 <= index <= count:
        raise InputError("shard", f"{index}/{count}", f"I/N with I from 1 to N, here 1 to {count}")
    costs = {
        content_hash(planned.cell): sum(block.estimate_s for block in cell_blocks(planned, 0, history or {}))
        for planned in plan.cells
    }
    loads, owner = [0.0] * count, {}
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        owner[key] = lightest = loads.index(min(loads))
        loads[lightest] += costs[key]
    mine = tuple(planned for planned in plan.cells if owner[content_hash(planned.cell)] == index - 1)
    if not mine:
        raise InputError("shard", f"{index}/{count}", f"at most {len(plan.cells)} shards, the plan's cells")
    return replace(plan, cells=mine), f"{index}/{count} of {content_hash(owner)[:12]}"


def within_budget(blocks: Sequence[Block], budget_s: float, slots: int = 1) -> int:
    """How many of `blocks`, from the first, are estimated to be done in `budget_s` seconds; the rest is dropped."""
    spent, fit = 0.0, 0
    for fit, block in enumerate(blocks):
        spent += block.estimate_s / slots
        if spent > budget_s:
            return fit
    return len(blocks)
