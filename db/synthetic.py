"""A year of results that nobody measured, to time the database with.

    python -m db.synthetic URL [--nights 365] [--cells 1000]

Fills an empty database with one run a night: every cell once in a static and a unified arm, eight
measurements, one packed block of 200 samples and one comparison each. Then times what people ask, and the
merge of one more night. Cells carry made-up names: no such row can be mistaken for a measurement.
"""

import argparse
import datetime
import random
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db import models
from db.base import Base
from db.keys import uuid7
from db.merge import merge
from db.rows import arm_row, cell_row, code_rev_row, metric_row
from db.session import open_db, writer
from db.trends import cell_trend, night_pairs
from suite.provenance import CodeRevision
from suite.records import Arm, Cell, CellJob, Workload, content_hash

METRICS = (
    "itl_ms",
    "ttft_ms",
    "tok_per_s",
    "accuracy",
    "max_logit_diff",
    "token_mismatches",
    "moved_share",
    "pages_moved",
)
ARMS = (Arm(pool="static"), Arm(pool="unified"))
FIRST_NIGHT = datetime.datetime(2026, 1, 1, 2, tzinfo=datetime.UTC)
SAMPLES, PACKS = 200, 64
REVISION = CodeRevision(repo="synthetic", sha="0" * 40, patch_sha="", branch=None, dirty=False)
WORKLOAD = Workload(name="synthetic", requests=64, prompt_tokens=512, new_tokens=32, batch=32, chunk_tokens=4096)

Rows = list[dict[str, Any]]


def jobs(cells: int) -> list[CellJob]:
    """Both arms of every made-up cell."""
    same: dict[str, Any] = {"family": "engine", "backend": "fa3", "launcher": "native", "device": "cuda"}
    same |= {"dtype": "bfloat16", "page_size": 16, "graph": True, "seed": 1, "workload": WORKLOAD}
    return [
        CellJob(cell=Cell(model=f"synthetic-{number:04d}", **same), arm=arm, block=0, timeout_s=60.0)
        for number in range(cells)
        for arm in ARMS
    ]


def packs(rng: random.Random) -> list[tuple[bytes, str]]:
    raw = [struct.pack(f"<{SAMPLES}f", *(rng.gauss(3.0, 0.03) for _ in range(SAMPLES))) for _ in range(PACKS)]
    return [(zlib.compress(data, 1), sha256(data).hexdigest()) for data in raw]


def dimensions(planned: list[CellJob]) -> dict[type[Base], Rows]:
    document = {"device_name": "synthetic", "driver": None, "cuda": None, "torch": "0", "triton": "0"}
    document |= {"kernel_library": None, "kernel_version": None}
    columns = {"id": content_hash(document), "comparable_hash": content_hash(document), **document}
    return {
        models.CodeRev: [code_rev_row(REVISION)],
        models.Environment: [columns | {"document": document}],
        models.Metric: [metric_row(name) for name in METRICS],
        models.Cell: [cell_row(job) for job in planned[:: len(ARMS)]],
        models.Arm: [arm_row(job) for job in planned[: len(ARMS)]],
    }


def night(
    number: int, planned: list[CellJob], environment: str, packed: list[tuple[bytes, str]]
) -> dict[type[Base], Rows]:
    """Every row of one night."""
    rng, at, run_id = random.Random(number), FIRST_NIGHT + datetime.timedelta(days=number), uuid7()
    plan = {"name": "synthetic", "night": number}
    arms = [content_hash(arm) for arm in ARMS]
    facts: dict[type[Base], Rows] = {table: [] for table in FACTS}
    run: dict[str, Any] = {
        "id": run_id,
        "suite": "synthetic",
        "code_rev_id": code_rev_row(REVISION)["id"],
        "plan": plan,
    }
    run |= {"plan_sha": content_hash(plan), "planned": len(planned), "state": "finished", "started_at": at}
    facts[models.Run].append(run | {"finished_at": at + datetime.timedelta(hours=3), "seed": number})
    for pair in range(0, len(planned), len(ARMS)):
        cell_id, block_id = content_hash(planned[pair].cell), uuid7()
        block = {"id": block_id, "run_id": run_id, "cell_id": cell_id, "number": 0, "arm_order": arms, "seed": number}
        facts[models.Block].append(block)
        ids = []
        for arm_id in arms:
            ids.append(row_id := uuid7())
            row: dict[str, Any] = {
                "id": row_id,
                "run_id": run_id,
                "cell_id": cell_id,
                "arm_id": arm_id,
                "block_id": block_id,
            }
            row |= {"attempt": 1, "status": "passed", "launcher": "native", "environment_id": environment}
            row |= {"effective": {}, "started_at": at + datetime.timedelta(seconds=pair), "duration_s": 5.0}
            facts[models.CellRun].append(row | {"prompt_hash": "p", "revision": REVISION.sha, "dirty": False})
            facts[models.Measurement] += [
                {"cell_run_id": row_id, "metric": name, "stat": "value", "value": rng.gauss(3.0, 0.03), "n": SAMPLES}
                for name in METRICS
            ]
            data, digest = packed[rng.randrange(PACKS)]
            sample: dict[str, Any] = {
                "cell_run_id": row_id,
                "metric": "itl_ms",
                "seq": 0,
                "n": SAMPLES,
                "shape": [SAMPLES],
            }
            facts[models.SampleBlock].append(sample | {"codec": "zlib+f4le", "data": data, "sha256": digest})
            log = {"source_sha": sha256(row_id.encode()).hexdigest(), "cell_run_id": row_id, "ingested_at": at}
            facts[models.IngestLog].append(log)
        comparison: dict[str, Any] = {
            "id": uuid7(),
            "run_id": run_id,
            "kind": "AB",
            "static_id": ids[0],
            "candidate_id": ids[1],
        }
        comparison |= {"metric": "max_logit_diff", "method": "bit_identity", "version": 1, "effect": 0.0}
        facts[models.Comparison].append(comparison | {"verdict": "equal", "inputs_sha": "0", "created_at": at})
    return facts


FACTS = (
    *(models.Run, models.Block, models.CellRun, models.Measurement, models.SampleBlock, models.IngestLog),
    models.Comparison,
)


def fill(engine: sa.Engine, nights: range, cells: int) -> Iterator[int]:
    """Write the nights, telling the number of each once it is in."""
    planned, packed = jobs(cells), packs(random.Random(0))
    shared = dimensions(planned)
    environment = shared[models.Environment][0]["id"]
    with writer(engine).begin() as connection:
        for table, rows in shared.items():
            connection.execute(sa.insert(table), rows)
    for number in nights:
        facts = night(number, planned, environment, packed)
        with writer(engine).begin() as connection:
            for table in FACTS:
                connection.execute(sa.insert(table), facts[table])
        yield number


def median_ms(ask: Callable[[], object], times: int = 25) -> tuple[float, float]:
    """(wall, CPU of this process) of one call, medians; the first call, which compiles the statement, is not timed."""
    found = []
    for _ in range(times + 1):
        start, cpu = time.perf_counter(), time.process_time()
        ask()
        found.append(((time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3))
    return statistics.median(wall for wall, _ in found[1:]), statistics.median(cpu for _, cpu in found[1:])


def timings(engine: sa.Engine, nights: int, cells: int) -> dict[str, tuple[float, float]]:
    """(wall, CPU) in ms of the questions; and of the merge of one night more, which is then there."""
    with engine.connect() as connection:
        run_id = connection.scalar(sa.select(models.Run.id).order_by(models.Run.started_at.desc()).limit(1))
    cell_ids = [content_hash(job.cell) for job in jobs(cells)[:: len(ARMS)]]
    rng = random.Random(1)
    if len(cell_trend(engine, cell_ids[0], "itl_ms")) != nights * len(ARMS):
        raise AssertionError("the trend lacks nights")
    if len(night_pairs(engine, str(run_id), "itl_ms")) != cells:
        raise AssertionError("the night lacks pairs")
    found = {
        "trend_ms": median_ms(lambda: cell_trend(engine, rng.choice(cell_ids), "itl_ms")),
        "night_pairs_ms": median_ms(lambda: night_pairs(engine, str(run_id), "itl_ms")),
    }
    with tempfile.TemporaryDirectory(prefix="kvproof-night-") as folder:
        one = open_db(Path(folder) / "night.db")
        list(fill(one, range(nights, nights + 1), cells))
        start, cpu = time.perf_counter(), time.process_time()
        merge(one, engine)
        found["merge_one_night_ms"] = ((time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3)
        one.dispose()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill an empty database with a synthetic year, and time it.")
    parser.add_argument("url")
    parser.add_argument("--nights", type=int, default=365)
    parser.add_argument("--cells", type=int, default=1000)
    given = parser.parse_args(arguments)
    engine = open_db(given.url)
    start = time.perf_counter()
    for _ in fill(engine, range(given.nights), given.cells):
        pass
    seconds, rows = time.perf_counter() - start, given.nights * given.cells * len(ARMS)
    print(f"{rows} cell runs in {seconds:.0f} s, {rows / seconds:.0f} a second")
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    for name, (wall, cpu) in timings(engine, given.nights, given.cells).items():
        print(f"{name} {wall:.2f} wall, {cpu:.2f} of this process's CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
