"""What one child measures: accuracy, then exactness, then (only if both hold) time.

A red gate writes a row without latency: nobody should quote the speed of a wrong answer.
"""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from suite.e2e.accuracy.documents import workload_text
from suite.e2e.accuracy.lm import evaluate_tasks
from suite.e2e.accuracy.task import load_task
from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.e2e.engine.runner import NonFiniteLogitsError
from suite.e2e.engine.workload import Text, longest_context, mix_shift, schedule, static_split
from suite.e2e.faults.planting import planting
from suite.e2e.matrix.device import DTYPES, prepare_device
from suite.e2e.matrix.engine_metrics import cache_metrics, draft_metrics, draft_samples, mix_metrics, pool_metrics
from suite.e2e.matrix.judge import without_timings
from suite.e2e.matrix.watch import watch
from suite.kernels.attention.support import kernel_library
from suite.models.drafts import find_draft, load_draft
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer
from suite.provenance import provenance
from suite.records import BLOCK_DRAFTS, CellJob, Guards, Metric, Outcome, Samples, Workload, canonical_json

SNAPSHOT_TOKENS = 64  # how far apart recurrent states are kept for the prefix cache


def measure(job: CellJob) -> Outcome:
    """Run one (cell, arm). Raises RefusedError when the backend cannot serve, InputError for bad input."""
    with planting(job.arm.plants):
        return measured(job)


def measured(job: CellJob) -> Outcome:
    cell, workload = job.cell, job.cell.workload
    prepare_device(cell)
    folder = resolve_model(cell.model)
    model = load_model(folder, dtype=DTYPES[cell.dtype], device=cell.device)
    tokenizer = load_tokenizer(folder)
    text = workload_text(tokenizer, cell.seed, workload.language)
    engine = build(job, model, text)
    prompts = [request.prompt for request in schedule(workload, text, cell.seed)]
    facts = {
        "launcher": engine.backend.launcher,
        "provenance": provenance(cell.device, kernel_library(cell.backend, engine.backend.launcher)),
        "effective": {
            "page_size": engine.translator.page_size,
            "captured_sizes": engine.runner.graphs.sizes if engine.runner.graphs else [],
            "attention_layers": len(model.attention_layers),
            "simulated_accept": workload.speculation == "simulated",
        },
        "prompt_hash": hashlib.sha256(canonical_json(prompts)).hexdigest(),
    }
    try:
        metrics, items = evaluate_tasks(engine, tokenizer, workload.tasks, cell.seed)
        served = serve(engine, text, workload, keep_logits=True)
    except NonFiniteLogitsError as error:
        return Outcome(status="wrong", reason_code="not_finite", reason=str(error), **facts)
    metrics |= run_metrics(engine, served)
    samples = exactness_samples(served, workload)
    if workload.speculation not in ("none", "simulated"):
        metrics |= draft_metrics(served)
        samples += draft_samples(served, workload.draft_tokens)
    if below := below_floor(metrics, workload):
        low = Outcome(
            status="wrong",
            reason_code=below[0],
            reason=below[1],
            metrics=metrics,
            samples=samples,
            items=items,
            **facts,
        )
        return without_timings(low)
    if workload.sized_for is not None:
        metrics |= shift(job, model, text)
    times, time_samples, guards = timing(engine, text, workload)
    return Outcome(
        status="passed",
        metrics=metrics | times,
        samples=samples + time_samples,
        items=items,
        guards=guards,
        **facts,
    )


def build(job: CellJob, model: Any, text: Text) -> Engine:
    """The engine that `job` asks for, with what its drafts come from."""
    cell, workload = job.cell, job.cell.workload
    config, draft, truth = engine_config(job), None, None
    if workload.speculation == "model":
        draft = load_model(resolve_model(workload.draft), dtype=DTYPES[cell.dtype], device=cell.device)
    elif workload.speculation in BLOCK_DRAFTS:
        named = None if workload.draft is None else Path(workload.draft)
        found = find_draft(resolve_model(cell.model), workload.speculation.upper(), named)  # type: ignore[arg-type]
        draft = load_draft(found, model, dtype=DTYPES[cell.dtype], device=cell.device)
    elif workload.speculation == "scripted":
        plain = Engine(model, replace(config, speculation="none", draft_tokens=0, script=()))
        truth = {tuple(request.prompt): request.output for request in serve(plain, text, workload)}
    return Engine(model, config, draft=draft, truth=truth)


def engine_config(job: CellJob) -> EngineConfig:
    """The engine that `job` asks for, with room for the longest of its prompts."""
    cell, workload = job.cell, job.cell.workload
    config = EngineConfig(
        backend=cell.backend,
        launcher=cell.launcher,
        pool=job.arm.pool,
        page_size=cell.page_size,
        max_batch=workload.batch,
        max_context=max(longest_context(workload), *(load_task(name).longest for name in workload.tasks), 1),
        chunk_tokens=workload.chunk_tokens,
        dtype=DTYPES[cell.dtype],
        device=cell.device,
        graph=cell.graph,
        seed=cell.seed,
        prefix_cache=workload.prefix_cache,
        snapshot_tokens=-(-SNAPSHOT_TOKENS // cell.page_size) * cell.page_size,
        snapshots=2 * workload.batch,
        mixed=workload.mixed,
        speculation=workload.speculation,
        draft_tokens=workload.draft_tokens,
        script=workload.script,
        fused_draft=workload.fused_draft,
    )
    if workload.pool_share is None:
        return config
    longest = -(-(config.max_context + config.draft_tokens) // cell.page_size)
    return replace(config, pool_pages=max(longest, int(workload.pool_share * config.request_pages)))


def serve(
    engine: Engine, text: Text, workload: Workload, *, keep_logits: bool = False, churn: bool = True
) -> list[Request]:
    """The workload's requests, all turns of a conversation one after the other, each of exactly `new_tokens` tokens."""
    requests = schedule(workload, text, engine.config.seed, keep_logits=keep_logits)
    engine.run(requests, churn=churn)
    turns = []
    for request in requests:
        turn: Request | None = request
        while turn is not None:
            turns.append(turn)
            turn = turn.next
    return turns


def shift(job: CellJob, model: Any, text: Text) -> dict[str, Metric]:
    """The mix shift, in the bytes of a static pool that is sized for one of the two mixes, with no other limit."""
    workload = job.cell.workload
    windows = [layer.window for layer in model.attention_layers if layer.window is not None]
    split = static_split(workload, job.cell.page_size, max(windows, default=None))
    config = replace(
        engine_config(job),
        max_batch=workload.requests + workload.long_requests,
        max_context=longest_context(workload),
        graph=False,
        pool_pages=None,
        split=split,
        speculation="none",
        draft_tokens=0,
        script=(),
        mixed=False,
    )
    engine = Engine(model, config)
    engine.run(mix_shift(workload, text), churn=False)
    return mix_metrics(engine)


def run_metrics(engine: Engine, served: Sequence[Request]) -> dict[str, Metric]:
    generated = sum(len(request.output) for request in served)
    metrics = pool_metrics(engine) | {"generated_tokens": Metric.of("generated_tokens", generated, len(served))}
    return metrics | (cache_metrics(served) if engine.config.prefix_cache else {})


def exactness_samples(served: Sequence[Request], workload: Workload) -> tuple[Samples, ...]:
    """Every generated token and the logits that chose it: what the arms are compared by."""
    logits = torch.stack([row for request in served for row in request.logits]).cpu().numpy()
    tokens = np.full((len(served), workload.new_tokens), -1, dtype=np.int64)
    for row, request in zip(tokens, served, strict=True):
        row[: len(request.output)] = request.output
    return Samples.pack("logits", logits), Samples.pack("tokens", tokens)


def below_floor(metrics: dict[str, Metric], workload: Workload) -> tuple[str, str] | None:
    """What is too low for this row to count, and how low; accuracy first. None: nothing is."""
    floors = {"accuracy": (workload.min_accuracy, "items"), "accept_length": (workload.min_accept_length, "verifies")}
    for name, (floor, what) in floors.items():
        if floor is not None and (found := metrics[name]).value < floor:
            return name, f"{name} {found.value:.4f} over {found.n} {what}, expected at least {floor}"
    return None


def timing(engine: Engine, text: Text, workload: Workload) -> tuple[dict[str, Metric], tuple[Samples, ...], Guards]:
    """Host-clock latencies of the workload without churn, after one untimed pass, and what happened meanwhile.

    Inter-token latency is the time between two consecutive tokens of one request; time to first token
    counts from the moment that all requests were handed over.
    """
    serve(engine, text, workload, churn=False)
    itl: list[float] = []
    ttft: list[float] = []
    rates: list[float] = []
    with watch(engine.config.device) as seen:
        timed = [serve(engine, text, workload, churn=False) for _ in range(workload.timing_repeats)]
    for served in timed:
        start, end = served[0].arrival_s, max(request.token_times_s[-1] for request in served)
        rates.append(sum(len(request.output) for request in served) / (end - start))
        for request in served:
            ttft.append((request.token_times_s[0] - request.arrival_s) * 1e3)
            itl += (np.diff(request.token_times_s) * 1e3).tolist()
    found = {"itl_ms": itl, "ttft_ms": ttft, "tok_per_s": rates}
    metrics = {
        name: Metric.of(name, statistics.median(values), len(values)) for name, values in found.items() if values
    }
    return metrics, tuple(Samples.pack(name, values) for name, values in found.items() if values), seen.guards()
