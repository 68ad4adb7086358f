"""The serving engine: deterministic for a workload and a seed, the same schedule in every arm.

Builds a runner (pool, allocator, translator, backend) around a model and serves requests through
the scheduler. It serves two doors: `run` for workloads, and `generate` / `score` for evaluation.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from suite.e2e.engine.churn import Churn
from suite.e2e.engine.requests import Request
from suite.e2e.engine.runner import CausalModel, Runner
from suite.e2e.engine.scheduler import Scheduler, Step
from suite.errors import InputError, RefusedError
from suite.kernels.allocators.paged import PageAllocator, StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.attention.support import backend_class
from suite.kernels.geometry import RunnerGeometry, bytes_for_pages, pages_for
from suite.kernels.ids import KVKind
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.kernels.translator import KVIndexTranslator
from suite.kernels.upload import upload
from suite.records import Launcher, PoolMode

INTEGRITY_EVERY_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built for. `max_context` in tokens, prompt and generated together."""

    backend: str
    launcher: Launcher
    pool: PoolMode
    page_size: int
    max_batch: int
    max_context: int
    chunk_tokens: int
    dtype: torch.dtype
    device: str
    graph: bool
    seed: int
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch", "max_context", "chunk_tokens"):
            if (value := getattr(self, name)) < 1:
                raise InputError(name, value, "a positive number")


class Engine:
    """Raises RefusedError when the backend cannot serve the model here, before any pool is allocated."""

    def __init__(self, model: CausalModel, config: EngineConfig) -> None:
        self.model, self.config = model, config
        if config.max_context > model.max_positions:
            raise InputError("max_context", config.max_context, f"at most {model.max_positions}, the model's positions")
        layers = model.attention_layers
        geometry = RunnerGeometry.from_layers(layers, config.dtype, config.page_size)
        cls = backend_class(config.backend)
        sinks = any(layer.sinks is not None for layer in layers)
        if reason := cls.refusal(geometry, config.pool, config.device, config.launcher, sinks):
            raise RefusedError(reason)
        request_pages = config.max_batch * pages_for(config.max_context, config.page_size)
        self.allocator = build_allocator(
            geometry,
            config.pool,
            request_pages + Churn.ballast_pages(request_pages),
            config.max_context,
            config.device,
            poison=config.poison,
        )
        self.churn = Churn(self.allocator, request_pages, config.seed)
        pool = self.allocator.pool
        columns = pages_for(config.max_context, config.page_size) * config.page_size
        self.req_to_token = torch.zeros(config.max_batch + 1, columns, dtype=torch.int32, device=pool.device)
        self.translator = KVIndexTranslator(pool=pool, allocator=self.allocator, req_to_token=self.req_to_token)
        self.backend = cls(pool=pool, translator=self.translator, launcher=config.launcher, sinks=sinks)
        self.runner = Runner(
            model, self.allocator, self.translator, self.backend, max_batch=config.max_batch, graph=config.graph
        )

    def run(self, requests: Iterable[Request], *, churn: bool = True) -> None:
        """Serve all requests to their end; results stand in the requests.

        With `churn`, pages move before every step. Timed runs go without: moves cost one arm only.
        """
        config = self.config
        scheduler = Scheduler(
            self.allocator, self.req_to_token, max_batch=config.max_batch, chunk_tokens=config.chunk_tokens
        )
        for request in requests:
            request.arrival_s = time.perf_counter()
            scheduler.add(request)
        steps = 0
        while scheduler.has_work:
            if churn:
                self.churn.shuffle()
            step = scheduler.next_step()
            if churn:
                self.churn.observe([page for request in step.requests for page in self._written_pages(request)])
            self._run_step(step)
            scheduler.finish(step)
            if churn and steps % INTEGRITY_EVERY_STEPS == 0:
                self.allocator.check()
            steps += 1
        self.churn.finish()
        self.allocator.check()

    @property
    def pages_moved(self) -> int:
        return self.allocator.pages_moved

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], stop: list[tuple[int, ...]]
    ) -> list[list[int]]:
        """Greedy continuations, without their stop token."""
        requests = [
            Request(prompt=prompt, max_new_tokens=limit, stop=frozenset(ends))
            for prompt, limit, ends in zip(prompts, max_new_tokens, stop, strict=True)
        ]
        self.run(requests)
        return [request.output for request in requests]

    def score(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Per pair: the sum of log p over the continuation's tokens, and whether greedy decoding would say them."""
        requests = [
            Request(prompt=prompt + continuation, score_from=len(prompt))
            for prompt, continuation in zip(prompts, continuations, strict=True)
        ]
        self.run(requests)
        return [(request.loglikelihood, request.is_greedy) for request in requests]

    # -- inside ----------------------------------------------------------------------------------

    def _written_pages(self, request: Request) -> list[int]:
        """Pages that held rows of the request before this step."""
        return request.pages[: pages_for(request.computed, self.config.page_size)]

    def _run_step(self, step: Step) -> None:
        """Forward, then scores for scored prompts and one new token for every request past its prompt."""
        wanted = _wanted_rows(step)
        offsets = [0]
        for length in step.query_lens:
            offsets.append(offsets[-1] + length)
        rows = upload([offsets[i] + at for i, picked in wanted.items() for at in picked], self.backend.pool.device)
        logits = self.runner.forward(step, rows)
        tokens = logits.argmax(-1).tolist()
        now, row = time.perf_counter(), 0
        for i, picked in wanted.items():
            request, block = step.requests[i], logits[row : row + len(picked)]
            if request.score_from is not None:
                request.add_scores(request.computed + picked[0], block)
            else:
                request.accept(tokens[row])
                request.token_times_s.append(now)
                if request.keep_logits:
                    request.logits.append(block[0].clone())
            row += len(picked)


def _wanted_rows(step: Step) -> dict[int, list[int]]:
    """Per request index, the new tokens (counted from 0 in its chunk) whose logits somebody reads."""
    wanted: dict[int, list[int]] = {}
    for i, (request, length) in enumerate(zip(step.requests, step.query_lens, strict=True)):
        if request.score_from is not None:
            first = max(request.score_from - 1 - request.computed, 0)
            last = min(len(request.prompt) - 1 - request.computed, length)
            if first < last:
                wanted[i] = list(range(first, last))
        elif request.computed + length >= len(request.prompt):
            wanted[i] = [length - 1]
    return wanted


def build_allocator(
    geometry: RunnerGeometry,
    mode: PoolMode,
    pages: int,
    max_context: int,
    device: torch.device | str,
    *,
    poison: bool = False,
) -> PageAllocator:
    """A pool of `mode` and its allocator, with room for `pages` joint pages beside the sink."""
    if mode == "static":
        counts: dict[KVKind, int] = {pool.kind: pages + 1 for pool in geometry.pools}
        return StaticAllocator(StaticPool(geometry, counts, device, poison=poison))
    need = bytes_for_pages(geometry, mode, pages)
    return UnifiedAllocator(UNIFIED_POOLS[mode](geometry, need, max_context, device, poison=poison))
