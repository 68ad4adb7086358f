"""How records become rows: pure functions, one per table."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from db.keys import uuid7
from suite.records import CellJob, Outcome, Provenance, canonical_json, content_hash, metric_kind

COMPARABLE = ("device_name", "driver", "cuda", "torch", "triton", "kernel_library", "kernel_version")
SAMPLE_CODEC = "zlib+f4le"
Rows = list[dict[str, Any]]


def payload_sha(run_id: str, job: CellJob, attempt: int, outcome: Outcome) -> str:
    key = [run_id, content_hash(job.cell), content_hash(job.arm), job.block, attempt]
    return hashlib.sha256(canonical_json([key, outcome])).hexdigest()


def cell_row(job: CellJob) -> dict[str, Any]:
    cell = job.cell
    same = ("family", "model", "backend", "launcher", "device", "dtype", "page_size", "graph")
    columns = {name: getattr(cell, name) for name in same}
    return {"id": content_hash(cell), **columns, "workload": cell.workload.name, "params": cell}


def arm_row(job: CellJob) -> dict[str, Any]:
    return {"id": content_hash(job.arm), "pool": job.arm.pool, "plants": list(job.arm.plants)}


def block_rows(run_id: str, jobs: Sequence[CellJob]) -> Rows:
    """One row per cell and block number, with its arms in the order in which they run."""
    blocks: dict[tuple[str, int], dict[str, Any]] = {}
    for job in jobs:
        cell_id = content_hash(job.cell)
        block = blocks.setdefault(
            (cell_id, job.block),
            {
                "id": uuid7(),
                "run_id": run_id,
                "cell_id": cell_id,
                "number": job.block,
                "arm_order": [],
                "seed": job.cell.seed,
            },
        )
        block["arm_order"].append(content_hash(job.arm))
    return list(blocks.values())


def environment_row(provenance: Provenance) -> dict[str, Any]:
    document = {
        name: getattr(provenance, name) for name in provenance.__struct_fields__ if name not in ("commit", "dirty")
    }
    columns = {name: document[name] for name in COMPARABLE}
    return {"id": content_hash(document), "comparable_hash": content_hash(columns), **columns, "document": document}


def metric_row(name: str) -> dict[str, Any]:
    kind = metric_kind(name)
    return {"name": name, "unit": kind.unit, "better": kind.better, "timing": kind.timing}


def sample_rows(row_id: str, outcome: Outcome) -> Rows:
    seen: Counter[str] = Counter()
    rows = []
    for samples in outcome.samples:
        same = {"metric": samples.metric, "data": samples.data, "sha256": samples.sha256, "codec": SAMPLE_CODEC}
        n = samples.unpack().size
        rows.append({"cell_run_id": row_id, "seq": seen[samples.metric], "n": n, "shape": list(samples.shape), **same})
        seen[samples.metric] += 1
    return rows


def item_rows(row_id: str, outcome: Outcome) -> tuple[Rows, Rows]:
    """The questions, and this row's answers; a question asked again is its next repeat."""
    seen: Counter[str] = Counter()
    items, results = [], []
    for item in outcome.items:
        hashes = {"doc_hash": item.doc_hash, "prompt_hash": item.prompt_hash, "target_hash": item.target_hash}
        key = content_hash({"task": item.task, **hashes})
        items.append({"id": key, "task": item.task, **hashes})
        answer = {"correct": item.correct, "answer": item.answer}
        results.append({"cell_run_id": row_id, "item_id": key, "repeat": seen[key], **answer})
        seen[key] += 1
    return items, results
