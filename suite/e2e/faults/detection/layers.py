"""The scenario of the rig: the unified arm with the fault, the static arm without, and all that looks at both."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from suite.e2e.faults.detection.rig import HEAD_DIM, KV_HEADS, Q_HEADS, Rig, RigConfig, RigRun, static_twin
from suite.e2e.faults.detection.signals import cell_of, first_of_each, moved, outputs, passed, ruled
from suite.e2e.faults.fault import Scenario, Setting, Signal
from suite.e2e.faults.seams import unplanted
from suite.kernels.geometry import AttentionLayer
from suite.records import Arm


def layers(config: RigConfig) -> Scenario:
    """Serve the rig's script from `config`'s pool and hold it against the static arm and against dense attention."""

    def scenario(setting: Setting) -> Iterator[Signal]:
        mine = replace(config, seed=setting.seed, churn=not setting.fresh, device=setting.device)
        with unplanted():
            static = served(static_twin(mine))
        run = Rig(mine).serve()
        yield from first_of_each(run.findings)
        if not run.crashed:
            yield from compared(mine, run, static, fresh=setting.fresh)

    return scenario


@functools.lru_cache(maxsize=64)
def served(config: RigConfig) -> RigRun:
    return Rig(config).serve()


def compared(config: RigConfig, run: RigRun, static: RigRun, *, fresh: bool) -> Iterator[Signal]:
    """The judge's ruling on the pair, then the error against dense attention in fp64."""
    share = (1.0, 1) if fresh else (run.moved_share, run.observed)  # a naive suite does not ask what moved
    outcome = passed(metrics=moved(*share), samples=outputs(flat(run)))
    reference = passed(samples=outputs(flat(static)))
    yield from ruled(cell_of(page_size=config.page_size, graph=config.graph), Arm(pool=config.mode), outcome, reference)
    with unplanted():
        ratio = error_ratio(run)
    if not ratio <= 1.0:
        text = f"error against fp64 is {ratio:.3g} of what {config.dtype} arithmetic earns, expected at most 1"
        yield Signal(name="kernel.inaccurate", text=text)


def flat(run: RigRun) -> torch.Tensor:
    return torch.cat([forward.out.float().cpu().reshape(-1) for forward in run.forwards])


def error_ratio(run: RigRun) -> float:
    """The largest error over the earned tolerance; infinity where an output is not finite."""
    worst = 0.0
    for forward in run.forwards:
        at = 0
        for request, first, end in forward.spans:
            mine, (k, v) = slice(at, at + end - first), run.memory[forward.layer.index, request]
            at += end - first
            exact = dense(forward.q[mine], k[:end], v[:end], forward.layer, torch.float64)
            rough = dense(forward.q[mine], k[:end], v[:end], forward.layer, forward.q.dtype)
            error = (forward.out[mine].double() - exact).abs().max()
            eps = torch.finfo(forward.q.dtype).eps * float(exact.abs().max())
            allowed = 2 * float((rough.double() - exact).abs().max()) + eps
            worst = max(worst, float("inf") if not bool(error.isfinite()) else float(error) / allowed)
    return worst


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, dtype: torch.dtype) -> torch.Tensor:
    """One request: the newest queries q [queries, q_heads, dim] over all of k, v [keys, kv_heads, dim], in `dtype`.

    Written out here and not taken from the oracle: a fault may stand in that.
    """
    queries, keys = q.shape[0], k.shape[0]
    groups = Q_HEADS // KV_HEADS
    heads_k, heads_v = (each.to(dtype).repeat_interleave(groups, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), heads_k) * HEAD_DIM**-0.5
    position = torch.arange(keys - queries, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)[None]
    hidden = key > position
    if layer.window is not None:
        hidden |= key <= position - layer.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks.to(dtype)[:, None, None].expand(-1, queries, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :keys], heads_v)


REFERENCE = RigConfig()
PAGE_TABLE = RigConfig(backend="fa3")
EAGER = RigConfig(graph=False)
EAGER_PAGE_TABLE = RigConfig(backend="fa3", graph=False)
TOKEN_MAJOR = RigConfig(mode="unified_token_major")
OVERLAP = RigConfig(overlap=True, poison=False, graph=False)
INTERPRETED = RigConfig(backend="triton", launcher="interpreter", graph=False)
