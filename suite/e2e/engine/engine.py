"""The serving engine: deterministic for a workload and a seed, the same schedule in every arm.

Builds a runner (pool, allocator, translator, backends) around a model and serves requests through
the scheduler. It serves two doors: `run` for workloads, and `generate` / `score` for evaluation.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from suite.e2e.engine.block_drafts import BlockDrafter, drafting_model
from suite.e2e.engine.churn import Churn
from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.drafts import Drafter, ModelDrafter, NgramDrafter, ScriptedDrafter, SimulatedDrafter
from suite.e2e.engine.memory import RequestMemory
from suite.e2e.engine.meter import PoolMeter
from suite.e2e.engine.pools import engine_allocator
from suite.e2e.engine.requests import Request
from suite.e2e.engine.runner import CausalModel, Runner, RunnerConfig
from suite.e2e.engine.sampler import pick
from suite.e2e.engine.scheduler import Scheduler, Step
from suite.e2e.engine.speculative import commit
from suite.errors import InputError, RefusedError
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import RunnerGeometry, pages_for
from suite.kernels.pools import KVPool
from suite.kernels.pools.static import StaticPool
from suite.kernels.translator import KVIndexTranslator
from suite.kernels.upload import upload
from suite.models.dspark import BlockDraft
from suite.records import PoolMode

INTEGRITY_EVERY_STEPS = 16


class Engine:
    """Raises RefusedError when the backend cannot serve the model here, before any pool is allocated.

    `draft`: the model of `speculation = "model"`, or the block draft. `truth`: what the target says, of
    `speculation = "scripted"`.
    """

    def __init__(
        self,
        model: CausalModel,
        config: EngineConfig,
        *,
        draft: CausalModel | BlockDraft | None = None,
        truth: dict[tuple[int, ...], list[int]] | None = None,
    ) -> None:
        self.model, self.config = model, config
        drafting, features, block = drafting_model(draft, config)
        tokens = config.max_context + config.draft_tokens
        positions = min(each.max_positions for each in (model, drafting) if each is not None)
        if tokens > positions:
            raise InputError("max_context", tokens, f"at most {positions}, the model's positions")
        geometry = self._geometry(model, drafting if config.fused_draft else None)
        self._refuse(geometry, config.pool, model)
        if drafting is not None and not config.fused_draft:
            self._refuse(self._geometry(drafting, None), "static", drafting)
        self.allocator = engine_allocator(geometry, config)
        self.churn = Churn(self.allocator, config.pool_pages or config.request_pages, config.seed)
        pool = self.allocator.pool
        columns = pages_for(tokens, config.page_size) * config.page_size
        self.req_to_token = torch.zeros(config.max_batch + 1, columns, dtype=torch.int32, device=pool.device)
        self.req_to_token[0] = torch.arange(columns) % config.page_size  # padding reads what page tables read
        self.req_to_slot = torch.zeros(config.max_batch + 1, dtype=torch.int64, device=pool.device)
        self.meter = PoolMeter(self.allocator)
        self.runner = self._runner(model, pool, draft_tokens=config.draft_tokens, feature_layers=features)
        self.translator, self.backend = self.runner.translator, self.runner.backend
        self.drafter = self._drafter(drafting, block, truth)
        self.scheduler = self._scheduler()

    def run(self, requests: Iterable[Request], *, churn: bool = True) -> None:
        """Serve all requests to their end; results stand in the requests.

        With `churn`, pages move before every step. Timed runs go without: moves cost one arm only.
        """
        self.scheduler = scheduler = self._scheduler()
        self.meter.reset()
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
            stored = self._run_step(step)
            self.meter.sample(scheduler.running)
            scheduler.finish(step, stored)
            for request in step.requests:
                if request.done and (turn := request.next_turn(scheduler.clock)) is not None:
                    turn.arrival_s = time.perf_counter()
                    scheduler.add(turn)
            if churn and steps % INTEGRITY_EVERY_STEPS == 0:
                self.check()
            steps += 1
        self.churn.finish()
        self.check()
        scheduler.memory.clear()
        self.allocator.check()

    def check(self) -> None:
        """Raise InvariantError where a page or slot is not accounted for."""
        self.allocator.check()
        self.scheduler.memory.check(self.scheduler.running)

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

    # -- building --------------------------------------------------------------------------------

    def _geometry(self, model: CausalModel, fused: CausalModel | None) -> RunnerGeometry:
        config = self.config
        geometry = RunnerGeometry.from_layers(model.attention_layers, config.dtype, config.page_size)
        state = model.state_geometry(config.dtype)
        return replace(geometry, state=state, draft=None if fused is None else self._geometry(fused, None))

    def _refuse(self, geometry: RunnerGeometry, pool: PoolMode, model: CausalModel) -> None:
        config = self.config
        sinks = any(layer.sinks is not None for layer in model.attention_layers)
        cls = backend_class(config.backend)
        if reason := cls.refusal(geometry, pool, config.device, config.launcher, sinks):
            raise RefusedError(reason)

    def _runner(self, model: CausalModel, pool: KVPool, **work: Any) -> Runner:
        """`work`: what RunnerConfig is told of drafts."""
        config = self.config
        translator = KVIndexTranslator(pool=pool, allocator=self.allocator, req_to_token=self.req_to_token)
        sinks = any(layer.sinks is not None for layer in model.attention_layers)
        backend = backend_class(config.backend)(pool=pool, translator=translator, launcher=config.launcher, sinks=sinks)
        runner = RunnerConfig(
            max_batch=config.max_batch,
            graph=config.graph,
            linear_family=model.linear_family,
            expand_tokens=config.expand_tokens,
            **work,
        )
        slots = self.allocator.slots if model.linear_family else None
        return Runner(model, self.allocator, translator, backend, runner, slots=slots, req_to_slot=self.req_to_slot)

    def _drafter(
        self, draft: CausalModel | None, block: int, truth: dict[tuple[int, ...], list[int]] | None
    ) -> Drafter | None:
        config = self.config
        if config.speculation == "none":
            return None
        if config.speculation == "ngram":
            return NgramDrafter(config.draft_tokens)
        if config.speculation == "simulated":
            return SimulatedDrafter(config.draft_tokens, config.script)
        if config.speculation == "scripted":
            if truth is None:
                raise InputError("truth", None, "what the target says, for a scripted draft")
            return ScriptedDrafter(config.draft_tokens, config.script, truth)
        assert draft is not None  # every other speculation has a model
        pool = self.allocator.pool.draft if config.fused_draft else self._private_pool(draft)
        assert pool is not None  # the geometry has a draft where it is fused
        runner = self._runner(draft, pool, block_tokens=block)
        return BlockDrafter(runner, config.draft_tokens, block) if block else ModelDrafter(runner, config.draft_tokens)

    def _private_pool(self, draft: CausalModel) -> KVPool:
        """A pool that the target's virtual ids index as they are: as many pages as there are of those."""
        geometry = self._geometry(draft, None)
        pages: dict[str, int] = {pool.kind: self.allocator.virtual_pages for pool in geometry.pools}
        return StaticPool(geometry, pages, self.config.device, poison=self.config.poison)

    def _scheduler(self) -> Scheduler:
        config = self.config
        memory = RequestMemory(
            self.allocator,
            self.req_to_token,
            slots=self.runner.slots,
            req_to_slot=self.req_to_slot,
            limit=None if config.split is not None else config.pool_pages or config.request_pages,
            foreign=lambda: self.churn.held,
            look_ahead=config.draft_tokens,
            chunk_tokens=config.chunk_tokens,
            prefix_cache=config.prefix_cache,
            snapshot_tokens=config.snapshot_tokens,
            max_snapshots=config.snapshots,
        )
        return Scheduler(
            memory,
            max_batch=config.max_batch,
            chunk_tokens=config.chunk_tokens,
            mixed=config.mixed,
            draft_tokens=config.draft_tokens,
        )

    # -- a step ----------------------------------------------------------------------------------

    def _written_pages(self, request: Request) -> list[int]:
        """Pages that held rows of the request before this step."""
        return request.pages[: pages_for(request.computed, self.config.page_size)]

    def _run_step(self, step: Step) -> list[int] | None:
        """Forward, then scores for scored prompts and new tokens for every request past its prompt.

        Returns how many new tokens of each request stay stored; None: all of them.
        """
        if step.mode is ForwardMode.VERIFY:
            return self._verify(step)
        wanted = _wanted_rows(step)
        offsets = [0]
        for length in step.query_lens:
            offsets.append(offsets[-1] + length)
        rows = upload([offsets[i] + at for i, picked in wanted.items() for at in picked], self.backend.pool.device)
        done = self.runner.forward(step, rows)
        if self.drafter is not None:
            self.drafter.follow(step, done.features)
        spoken = [(i, picked[-1]) for i, picked in wanted.items() for _ in picked]
        asked = [step.requests[i].sampling for i, _ in spoken]
        tokens = pick(done.logits, asked, [step.seq_lens[i] for i, _ in spoken])
        now, row = time.perf_counter(), 0
        for i, picked in wanted.items():
            request, block = step.requests[i], done.logits[row : row + len(picked)]
            if request.score_from is not None:
                request.add_scores(request.computed + picked[0], block)
            else:
                self._accept(request, tokens[row : row + 1], block, now)
            row += len(picked)
        return None

    def _verify(self, step: Step) -> list[int]:
        """Draft, verify, commit: every request gets what its drafts foretold and one token more."""
        assert self.drafter is not None  # the scheduler verifies only with a drafter
        proposals = self.drafter.propose(step)
        step = step.with_drafts([proposal.tokens for proposal in proposals])
        width = step.query_lens[0]
        done = self.runner.forward(step, torch.arange(len(step.input_ids), device=self.backend.pool.device))
        asked = [request.sampling for request in step.requests for _ in range(width)]
        positions = [request.computed + 1 + at for request in step.requests for at in range(width)]
        targets, now, stored = pick(done.logits, asked, positions), time.perf_counter(), []
        for i, (request, proposal) in enumerate(zip(step.requests, proposals, strict=True)):
            mine = slice(i * width, (i + 1) * width)
            committed = commit(proposal, targets[mine], done.logits[mine], request.sampling, positions[mine])
            request.drafts.add(len(proposal.tokens), len(committed) - 1)
            kept = self._accept(request, committed, done.logits[mine], now)
            stored.append(min(len(committed), kept + 1))
        self.runner.commit(stored)
        self.drafter.settle(step, stored, done.features)
        return stored

    @staticmethod
    def _accept(request: Request, tokens: list[int], logits: torch.Tensor, now: float) -> int:
        """Take tokens until the request is done; returns how many were kept."""
        kept = 0
        for token, row in zip(tokens, logits, strict=False):
            before = len(request.tokens)
            request.accept(token)
            kept += len(request.tokens) - before
            request.token_times_s.append(now)
            if request.keep_logits:
                request.logits.append(row.clone())
            if request.done:
                break
        return kept


def _wanted_rows(step: Step) -> dict[int, list[int]]:
    """Per request index, the new tokens (counted from 0 in its chunk) whose logits somebody reads."""
    wanted: dict[int, list[int]] = {}
    for i, (request, length) in enumerate(zip(step.requests, step.query_lens, strict=True)):
        if request.score_from is not None:
            first = max(request.scored - 1 - request.computed, 0)
            last = min(len(request.prompt) - 1 - request.computed, length)
            if first < last:
                wanted[i] = list(range(first, last))
        elif request.computed + length >= len(request.tokens):
            wanted[i] = [length - 1]
    return wanted
