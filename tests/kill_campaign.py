"""kill -9 at random points: of the parent of a run, or of a child. The resumed table must equal an unbroken one.

    python -m tests.kill_campaign --points 200

Each point runs a small plan into a database of its own, in a forked process, with children that take
milliseconds. The parent is killed at a random moment, so may be whoever resumes; or one child is killed.
Then the run is resumed to its end and compared, row by row, with a run that nobody disturbed.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import sqlalchemy as sa

from db import models
from db.invariants import broken_rows
from db.runs import is_latest
from db.session import open_db
from suite.e2e.matrix import run as running
from suite.e2e.matrix.execution import Options
from suite.e2e.matrix.planned import Plan, PlannedCell
from suite.e2e.matrix.spool import CHILD, SPOOL
from suite.errors import InputError
from suite.provenance import CodeRevision
from suite.records import Arm
from tests.matrix_fakes import make_cell, make_outcome

REVISION = CodeRevision(repo="kvproof", sha="c0ffee", patch_sha="", branch=None, dirty=False)
ARMS = (Arm(pool="static"), Arm(pool="unified"))
CELLS = tuple(
    PlannedCell(cell=make_cell(backend=name), arms=ARMS, timeout_s=20.0, blocks=2) for name in ("reference", "fa3")
)
PLAN = Plan(name="campaign", cells=CELLS)
SEED = 1
CHILD_SCRIPT = 'sleep 0.01; cp "$0" "$2.partial" && mv "$2.partial" "$2"'

Table = dict[tuple[Any, ...], tuple[Any, ...]]


class Lab:
    """A folder with an empty database, the children's answer, and what an undisturbed run leaves."""

    def __init__(self, folder: Path, jobs: int = 2) -> None:
        self.folder, self.hits = folder, {"parent": 0, "child": 0}
        answer = folder / "answer.json"
        answer.write_bytes(msgspec.json.encode(make_outcome()))
        command = ("/bin/sh", "-c", CHILD_SCRIPT, str(answer))
        self.options = Options(command=command, gpus=(None,) * jobs)
        self.empty = folder / "empty.db"
        open_db(self.empty).dispose()
        started = time.monotonic()
        self.unbroken = self.finish(self.fresh("unbroken"))
        self.typical_s = time.monotonic() - started

    def fresh(self, name: str) -> Path:
        path = self.folder / name / "results.db"
        path.parent.mkdir()
        shutil.copy(self.empty, path)
        return path

    def finish(self, db: Path) -> Table:
        assert wait(fork(lambda: self.run_or_resume(db))) == 0
        return table_of(db)

    def run_or_resume(self, db: Path) -> None:
        engine = open_db(db)
        try:
            running.resume_run(engine, None, self.options)
        except InputError:  # killed before the run was announced
            running.run_plan(PLAN, engine, self.options, seed=SEED)

    def point(self, number: int, rng: random.Random) -> list[str]:
        """What is wrong after one campaign point; nothing in a sound runner."""
        db, victim = self.fresh(f"point-{number}"), rng.choice(("parent", "child"))
        if victim == "child":
            process = fork(lambda: self.run_or_resume(db))
            time.sleep(rng.random() * self.typical_s)
            self.hits["child"] += kill_a_child(db.parent, rng)
            wait(process)
        else:
            for _ in range(rng.randint(1, 3)):
                process = fork(lambda: self.run_or_resume(db))
                time.sleep(rng.random() * self.typical_s)
                os.kill(process, signal.SIGKILL)
                self.hits["parent"] += wait(process) == -signal.SIGKILL
        table = self.finish(db)
        wrong = [f"{key}: {table.get(key)} != {row}" for key, row in self.unbroken.items() if table.get(key) != row]
        wrong += [f"{key}: doubled or unplanned" for key in table.keys() - self.unbroken.keys()]
        engine = open_db(db)
        wrong += [str(row) for row in broken_rows(engine)]
        if victim == "parent" and attempts_of(engine) != {1}:
            wrong.append(f"attempts {attempts_of(engine)} != {{1}}: outcomes that were there are run again")
        engine.dispose()
        wrong += [f"left behind: {path.name}" for path in db.parent.glob(f"{SPOOL}*")]
        if not wrong:
            shutil.rmtree(db.parent)
        return [f"point {number}, {victim} killed: {text}" for text in wrong]


def fork(work: Callable[[], None]) -> int:
    """A process of our own that does `work`; ends with 0 when that returned."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_a_child(folder: Path, rng: random.Random) -> bool:
    """SIGKILL to one child that is noted in the spool; whether there was one."""
    notes = sorted(folder.glob(f"{SPOOL}-*/*/*/*/{CHILD}"))
    for note in rng.sample(notes, len(notes)):
        try:
            os.killpg(int(note.read_text().split()[0]), signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            continue
        return True
    return False


def table_of(db: Path) -> Table:
    """What a run left, apart from keys and times: status, metrics and raw samples of every latest row."""
    engine = open_db(db)
    row, block, value, sample = models.CellRun, models.Block, models.Measurement, models.SampleBlock
    query = sa.select(
        row.id, row.cell_id, row.arm_id, block.number, row.status, row.reason, block.arm_order, block.seed
    )
    table: Table = {}
    with engine.connect() as connection:
        assert connection.scalars(sa.select(models.Run.state)).all() == ["finished"]
        for found in connection.execute(query.join(block, row.block_id == block.id).where(is_latest())).all():
            key = (found.cell_id, found.arm_id, found.number)
            assert key not in table, f"{key} is there twice"
            values = connection.execute(sa.select(value.metric, value.value).where(value.cell_run_id == found.id))
            samples = connection.execute(sa.select(sample.metric, sample.sha256).where(sample.cell_run_id == found.id))
            facts = (sorted(map(tuple, values)), sorted(map(tuple, samples)), found.arm_order, found.seed)
            table[key] = (found.status, found.reason, *facts)
    engine.dispose()
    return table


def attempts_of(engine: sa.Engine) -> set[int]:
    with engine.connect() as connection:
        return set(connection.scalars(sa.select(models.CellRun.attempt)))


def campaign(points: int, seed: int, folder: Path) -> tuple[list[str], dict[str, int]]:
    """What went wrong over `points` points, and how many kills met somebody alive."""
    same = {"code_revision": lambda: REVISION, "machine": lambda: {"cpu": "one"}}  # the checkout may change meanwhile
    with mock.patch.multiple(running, **same):
        lab, rng = Lab(folder), random.Random(seed)
        return [text for number in range(points) for text in lab.point(number, rng)], lab.hits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvproof-kill-") as folder:
        wrong, hits = campaign(arguments.points, arguments.seed, Path(folder))
    print(*wrong, sep="\n")
    print(f"{arguments.points} points in {time.monotonic() - started:.0f} s: {len(wrong)} differences; killed: {hits}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
