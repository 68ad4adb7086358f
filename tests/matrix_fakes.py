"""Small records, and fake children that end as a test wants them to. Light, for children import it."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from suite.records import Arm, Cell, CellJob, ItemOutcome, Metric, Outcome, Provenance, Samples, Workload

PROVENANCE = Provenance(
    python="3.11.7",
    torch="2.13.0",
    triton="3.7.1",
    platform="Linux",
    device_name="a processor",
    driver=None,
    cuda=None,
    kernel_library="triton",
    kernel_version="3.7.1",
    commit="c0ffee",
    dirty=False,
)


def make_cell(**changes: Any) -> Cell:
    fields: dict[str, Any] = {
        "family": "engine",
        "model": "gpt-oss-mini",
        "backend": "fa3",
        "launcher": "reference",
        "device": "cpu",
        "dtype": "float32",
        "page_size": 16,
        "graph": True,
        "seed": 1,
        "workload": Workload(name="tiny", requests=2, prompt_tokens=8, new_tokens=4, batch=2, chunk_tokens=8),
    }
    return Cell(**(fields | changes))


def make_job(
    pool: str = "static",
    plants: tuple[str, ...] = (),
    timeout_s: float = 30.0,
    block: int = 0,
    label: str | None = None,
    memory_gib: float | None = None,
    **changes: Any,
) -> CellJob:
    arm = Arm(pool=pool, plants=plants, label=label)
    return CellJob(cell=make_cell(**changes), arm=arm, block=block, timeout_s=timeout_s, memory_gib=memory_gib)


def make_outcome(seed: int = 0, **changes: Any) -> Outcome:
    """A passed outcome with metrics, samples and items."""
    logits = np.random.default_rng(seed).normal(size=(8, 16))
    fields: dict[str, Any] = {
        "status": "passed",
        "launcher": "reference",
        "provenance": PROVENANCE,
        "effective": {"page_size": 16},
        "prompt_hash": "prompts",
        "metrics": {
            "accuracy": Metric(value=0.98, unit="share", n=64),
            "accuracy.recall": Metric(value=0.98, unit="share", n=64),
            "moved_share": Metric(value=0.9, unit="share", n=40),
            "itl_ms": Metric(value=3.25, unit="ms", n=12),
        },
        "samples": (
            Samples.pack("logits", logits),
            Samples.pack("tokens", np.arange(8).reshape(2, 4)),
            Samples.pack("itl_ms", np.full(12, 3.25)),
        ),
        "items": (
            ItemOutcome(task="recall", doc_hash="d1", prompt_hash="p1", target_hash="t1", correct=True, answer="blue"),
            ItemOutcome(task="recall", doc_hash="d2", prompt_hash="p2", target_hash="t2", correct=False, answer=""),
        ),
        "duration_s": 1.5,
    }
    return Outcome(**(fields | changes))


CHILD_PRELUDE = """
import os, signal, subprocess, sys, time
import msgspec
from msgspec.structs import replace
from suite.records import CellJob, Metric, Samples
from tests.matrix_fakes import make_outcome

job_path, outcome_path = sys.argv[1:]
job = msgspec.json.decode(open(job_path, "rb").read(), type=CellJob)

def write(outcome):
    with open(outcome_path, "wb") as file:
        file.write(msgspec.json.encode(outcome))

"""


def child(folder: Path, body: str) -> tuple[str, ...]:
    """The command of a fake child: `body` sees `job` and `outcome_path`, and may call `write(make_outcome())`."""
    script = folder / "child.py"
    root = Path(__file__).parents[1]
    script.write_text(f"import sys\nsys.path.insert(0, {str(root)!r})\n" + CHILD_PRELUDE + textwrap.dedent(body))
    return (sys.executable, str(script))
