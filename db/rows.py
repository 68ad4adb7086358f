"""How records become rows: pure functions, one per table."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from db.keys import uuid7
from suite.provenance import CodeRevision
from suite.records import CellJob, Outcome, Provenance, canonical_json, content_hash, metric_kind

COMPARABLE = ("device_name", "driver", "cuda", "torch", "triton", "kernel_library", "kernel_version")
VALUE = "value"  # the only statistic of a metric so far; intervals and quantiles will be others
OUTCOME_COLUMNS = (
    *("status", "reason_code", "reason", "launcher", "effective"),
    *("prompt_hash", "duration_s", "exit_code", "signal", "stderr_tail"),
)
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
    return {"id": content_hash(job.arm), "pool": job.arm.pool, "plants": list(job.arm.plants), "label": job.arm.label}


def code_rev_row(revision: CodeRevision) -> dict[str, Any]:
    rev = {"repo": revision.repo, "sha": revision.sha, "patch_sha": revision.patch_sha}
    return {"id": content_hash(rev), **rev, "branch": revision.branch, "dirty": revision.dirty}


def block_rows(run_id: str, jobs: Sequence[CellJob], seeds: Mapping[tuple[str, int], int]) -> Rows:
    """One row per cell and block number, with its arms in the order in which they run; its seed is else its cell's."""
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
                "seed": seeds.get((cell_id, job.block), job.cell.seed),
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


def outcome_columns(outcome: Outcome) -> dict[str, Any]:
    """The columns of a row that are its outcome's."""
    provenance, guards = outcome.provenance, outcome.guards
    return {
        "environment_id": environment_row(provenance)["id"] if provenance else None,
        "revision": provenance.commit if provenance else None,
        "dirty": provenance.dirty if provenance else None,
        "gpu_uuid": guards.gpu_uuid if guards else None,
        "guards": msgspec.to_builtins(guards) if guards else None,
        **{name: getattr(outcome, name) for name in OUTCOME_COLUMNS},
    }


def measurement_rows(row_id: str, outcome: Outcome) -> Rows:
    return [
        {"cell_run_id": row_id, "metric": name, "stat": VALUE, "value": metric.value, "n": metric.n}
        for name, metric in outcome.metrics.items()
    ]


def sample_rows(row_id: str, outcome: Outcome) -> Rows:
    seen: Counter[str] = Counter()
    rows = []
    for samples in outcome.samples:
        same = {"metric": samples.metric, "data": samples.data, "sha256": samples.sha256, "codec": samples.codec}
        n = math.prod(samples.shape)
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
