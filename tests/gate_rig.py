"""Policies and databases for the tests of the gate."""

import numpy as np

from db.keys import utc_now
from db.store import Comparison, Store
from suite.e2e.gate.policy import parse_policy
from suite.provenance import CodeRevision
from suite.records import CellJob, ItemOutcome, Metric, Samples
from tests.matrix_fakes import make_job, make_outcome

BLOCKS = 8
ITEMS = 120
REVISION = CodeRevision(repo="r", sha="abc", patch_sha="", branch="main", dirty=False)


def policy_table(**changes):
    """A strict policy of every endpoint that a small database can answer, as TOML would give it."""
    table = {
        "name": "test",
        "alpha": 0.05,
        "fdr": 0.05,
        "power": 0.8,
        "baseline": "static",
        "candidates": ["unified"],
        "launchers": ["reference"],
        "smoke": "not_required",
        "rows": {"refused": "ignore", "crashed": "fail", "timed_out": "fail", "skipped": "inconclusive"},
        "endpoints": {
            "exact": {"kind": "exact"},
            "accuracy": {"kind": "accuracy", "margin": 0.05, "min_items": 100, "fail_when": "worse_than_zero"},
            "flips": {"kind": "flips", "psi0": 0.01},
            "itl": {
                **{"kind": "latency", "metric": "itl_ms", "margin": 0.02, "looks": [BLOCKS]},
                "fail_when": "beyond_margin",
            },
        },
        "cells": [{"select": {"family": "engine"}, "endpoints": ["exact", "accuracy", "flips", "itl"], "min_cells": 1}],
    }
    return table | changes


def make_policy(**changes):
    return parse_policy(policy_table(**changes))


def itl_outcome(itl_ms, correct=None, **changes):
    """A passed outcome of that inter-token latency which answered the questions in `correct` right, all by default."""
    correct = np.ones(ITEMS, bool) if correct is None else correct
    items = tuple(
        ItemOutcome(
            task="recall", doc_hash=f"d{n}", prompt_hash=f"p{n}", target_hash=f"t{n}", correct=bool(right), answer=""
        )
        for n, right in enumerate(correct)
    )
    metrics = {
        "itl_ms": Metric(value=itl_ms, unit="ms", n=12),
        "moved_share": Metric(value=0.9, unit="share", n=40),
    }
    fields = {"metrics": metrics, "items": items, "samples": (Samples.pack("itl_ms", np.full(12, itl_ms)),)}
    return make_outcome(**(fields | changes))


def store_run(
    engine, *, slowdown=0.0, blocks=BLOCKS, seed=0, correct=None, plants=(), diff=0.0, state="finished", changes=None,
    replicate=False, sha="abc", void=(), suite="matrix",
):  # fmt: skip
    """A run of one cell: static and unified in every block, with tau 0.3 % of noise. `changes` are the candidate's."""
    random = np.random.default_rng(seed)
    store, jobs = Store(engine), []
    arms = [{"pool": "static"}, *([{"pool": "static", "label": "replicate"}] if replicate else [])]
    arms.append({"pool": "unified", "plants": plants})
    jobs = [make_job(block=block, **arm) for block in range(blocks) for arm in arms]
    revision = CodeRevision(repo="r", sha=sha, patch_sha="", branch="main", dirty=False)
    run_id = store.begin_run(suite, {"name": suite}, jobs, revision)
    static_id = ""
    for job in jobs:
        unified = job.arm.pool == "unified"
        itl_ms = 3.0 * float(np.exp(random.normal(0.0, 0.003))) * (1.0 + slowdown * unified)
        outcome = itl_outcome(itl_ms, correct if unified else None, **(changes or {} if unified else {}))
        comparisons = () if job.arm.is_reference else exactness(static_id, diff * unified)
        if outcome.status != "passed":
            comparisons = ()
        void_reason = "throttled" if job.block in void else None
        row_id = ingest(store, run_id, job, outcome, comparisons, void_reason)
        static_id = row_id if job.arm.is_reference else static_id
    if state != "running":
        store.end_run(run_id, state)
    return run_id


def ingest(store: Store, run_id: str, job: CellJob, outcome, comparisons, void_reason):
    kinds = {"started_at": utc_now(), "comparisons": comparisons, "void_reason": void_reason}
    return store.ingest(run_id, job, outcome, **kinds)


def exactness(static_id, diff):
    same = {"static_id": static_id, "method": "bit_identity", "version": 1}
    verdict = "equal" if diff == 0.0 else "differs"
    return (Comparison(metric="max_logit_diff", effect=float(diff), verdict=verdict, **same),)
