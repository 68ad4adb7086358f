"""What one child measures: accuracy, then exactness, then (only if both hold) time.

A red gate writes a row without latency: nobody should quote the speed of a wrong answer.
"""

import hashlib
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from suite.e2e.accuracy.lm import evaluate_tasks, workload_prompts
from suite.e2e.accuracy.task import load_task
from suite.e2e.engine.engine import Engine, EngineConfig
from suite.e2e.engine.requests import Request
from suite.e2e.engine.runner import NonFiniteLogitsError
from suite.e2e.faults.planting import plant
from suite.e2e.matrix.device import DTYPES, prepare_device
from suite.kernels.attention.support import kernel_library
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer
from suite.provenance import provenance
from suite.records import CellJob, Metric, Outcome, Samples, Workload, canonical_json


def measure(job: CellJob) -> Outcome:
    """Run one (cell, arm). Raises RefusedError when the backend cannot serve, InputError for bad input."""
    cell, workload = job.cell, job.cell.workload
    prepare_device(cell)
    folder = resolve_model(cell.model)
    model = load_model(folder, dtype=DTYPES[cell.dtype], device=cell.device)
    tokenizer = load_tokenizer(folder)
    engine = Engine(model, engine_config(job))
    for name in job.arm.plants:
        plant(name, engine)
    prompts = workload_prompts(tokenizer, workload.requests, workload.prompt_tokens, cell.seed)
    facts = {
        "launcher": engine.backend.launcher,
        "provenance": provenance(cell.device, kernel_library(cell.backend, engine.backend.launcher)),
        "effective": {
            "page_size": engine.translator.page_size,
            "captured_sizes": engine.runner.graphs.sizes if engine.runner.graphs else [],
            "attention_layers": len(model.attention_layers),
        },
        "prompt_hash": hashlib.sha256(canonical_json(prompts)).hexdigest(),
    }
    try:
        metrics, items = evaluate_tasks(engine, tokenizer, workload.tasks, cell.seed)
        served = serve(engine, prompts, workload, keep_logits=True)
    except NonFiniteLogitsError as error:
        return Outcome(status="wrong", reason_code="not_finite", reason=str(error), **facts)
    generated = sum(len(request.output) for request in served)
    metrics |= pool_metrics(engine) | {"generated_tokens": Metric.of("generated_tokens", generated, len(served))}
    samples = exactness_samples(served, workload)
    if reason := below_floor(metrics, workload):
        return Outcome(
            status="wrong",
            reason_code="accuracy",
            reason=reason,
            metrics=metrics,
            samples=samples,
            items=items,
            **facts,
        )
    times, time_samples = timing(engine, prompts, workload)
    return Outcome(status="passed", metrics=metrics | times, samples=samples + time_samples, items=items, **facts)


def engine_config(job: CellJob) -> EngineConfig:
    """The engine that `job` asks for, with room for the longest of its prompts."""
    cell, workload = job.cell, job.cell.workload
    return EngineConfig(
        backend=cell.backend,
        launcher=cell.launcher,
        pool=job.arm.pool,
        page_size=cell.page_size,
        max_batch=workload.batch,
        max_context=max(
            workload.prompt_tokens + workload.new_tokens, *(load_task(name).longest for name in workload.tasks), 1
        ),
        chunk_tokens=workload.chunk_tokens,
        dtype=DTYPES[cell.dtype],
        device=cell.device,
        graph=cell.graph,
        seed=cell.seed,
    )


def serve(
    engine: Engine, prompts: Sequence[list[int]], workload: Workload, *, keep_logits: bool = False, churn: bool = True
) -> list[Request]:
    """The workload's prompts, each decoded for exactly `new_tokens` tokens."""
    requests = [
        Request(prompt=list(prompt), max_new_tokens=workload.new_tokens, keep_logits=keep_logits) for prompt in prompts
    ]
    engine.run(requests, churn=churn)
    return requests


def exactness_samples(served: Sequence[Request], workload: Workload) -> tuple[Samples, ...]:
    """Every generated token and the logits that chose it: what the arms are compared by."""
    logits = torch.stack([row for request in served for row in request.logits]).cpu().numpy()
    tokens = np.full((len(served), workload.new_tokens), -1, dtype=np.int64)
    for row, request in zip(tokens, served, strict=True):
        row[: len(request.output)] = request.output
    return Samples.pack("logits", logits), Samples.pack("tokens", tokens)


def pool_metrics(engine: Engine) -> dict[str, Metric]:
    """How far the churn stage moved the pages; nothing on a static pool, which has no page to move."""
    if engine.config.pool == "static":
        return {}
    churn = engine.churn
    return {
        "moved_share": Metric.of("moved_share", churn.moved_share, churn.observed),
        "pages_moved": Metric.of("pages_moved", engine.pages_moved, 1),
    }


def below_floor(metrics: dict[str, Metric], workload: Workload) -> str | None:
    """Why the accuracy is too low for this row to count, or None."""
    if workload.min_accuracy is None:
        return None
    accuracy = metrics["accuracy"]
    if accuracy.value >= workload.min_accuracy:
        return None
    return f"accuracy {accuracy.value:.4f} over {accuracy.n} items, expected at least {workload.min_accuracy}"


def timing(
    engine: Engine, prompts: Sequence[list[int]], workload: Workload
) -> tuple[dict[str, Metric], tuple[Samples, ...]]:
    """Host-clock latencies of the workload without churn, after one untimed pass.

    Inter-token latency is the time between two consecutive tokens of one request; time to first token
    counts from the moment that all requests were handed over.
    """
    serve(engine, prompts, workload, churn=False)
    itl: list[float] = []
    ttft: list[float] = []
    rates: list[float] = []
    for _ in range(workload.timing_repeats):
        served = serve(engine, prompts, workload, churn=False)
        start, end = served[0].arrival_s, max(request.token_times_s[-1] for request in served)
        rates.append(sum(len(request.output) for request in served) / (end - start))
        for request in served:
            ttft.append((request.token_times_s[0] - request.arrival_s) * 1e3)
            itl += (np.diff(request.token_times_s) * 1e3).tolist()
    found = {"itl_ms": itl, "ttft_ms": ttft, "tok_per_s": rates}
    metrics = {
        name: Metric.of(name, statistics.median(values), len(values)) for name, values in found.items() if values
    }
    return metrics, tuple(Samples.pack(name, values) for name, values in found.items() if values)
