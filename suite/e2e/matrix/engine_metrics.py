"""What an engine run left behind, as metrics and samples: drafts, prefix cache, pool behaviour, the mix shift."""

from collections.abc import Sequence

import numpy as np

from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.records import Metric, Samples


def draft_metrics(served: Sequence[Request]) -> dict[str, Metric]:
    """Accept length (bonus token included) and accept rate (without), also apart by how a request began.

    `first_batch` came in the first step, `cached` found a part of its prompt in the prefix cache, `uncached` neither.
    """
    verified = [request for request in served if request.drafts.verify_passes]
    if not verified:
        return {}
    first = min(request.first_step or 0 for request in served)
    strata: dict[str, list[Request]] = {"": verified}
    for request in verified:
        began_first = request.first_step == first and not request.cached_tokens
        kind = "first_batch" if began_first else "cached" if request.cached_tokens else "uncached"
        strata.setdefault(f".{kind}", []).append(request)
    metrics = {}
    for suffix, mine in strata.items():
        passes = sum(request.drafts.verify_passes for request in mine)
        proposed = sum(sum(request.drafts.proposed_at) for request in mine)
        accepted = sum(sum(request.drafts.accepted_at) for request in mine)
        tokens = sum(request.drafts.accept_tokens for request in mine)
        metrics[f"accept_length{suffix}"] = Metric.of("accept_length", tokens / passes, passes)
        if proposed:
            metrics[f"accept_rate{suffix}"] = Metric.of("accept_rate", accepted / proposed, proposed)
    return metrics


def draft_samples(served: Sequence[Request], draft_tokens: int) -> tuple[Samples, ...]:
    """Counters per prompt: `accept_tokens`, `verify_passes` [prompts], `accepted_at`, `proposed_at` [prompts, places].

    `accept_histogram` [draft_tokens + 1]: passes that committed 1, 2, ... tokens.
    """
    counters = [request.drafts for request in served]

    def padded(rows: list[list[int]]) -> np.ndarray:
        return np.array([row + [0] * (draft_tokens - len(row)) for row in rows], dtype=np.float32)

    lengths = [length for each in counters for length in each.lengths]
    return (
        Samples.pack("accept_tokens", [each.accept_tokens for each in counters]),
        Samples.pack("verify_passes", [each.verify_passes for each in counters]),
        Samples.pack("accepted_at", padded([each.accepted_at for each in counters])),
        Samples.pack("proposed_at", padded([each.proposed_at for each in counters])),
        Samples.pack("accept_histogram", np.bincount(lengths, minlength=draft_tokens + 2)[1:]),
    )


def cache_metrics(served: Sequence[Request]) -> dict[str, Metric]:
    """Prompt tokens that the prefix cache had, over all requests."""
    cached = sum(request.cached_tokens for request in served)
    return {"cached_tokens": Metric.of("cached_tokens", cached, len(served))}


def pool_metrics(engine: Engine) -> dict[str, Metric]:
    """Pool behaviour of the run before; how far the churn stage moved pages where there are pages to move."""
    meter, scheduler = engine.meter, engine.scheduler
    metrics = {
        "retractions": Metric.of("retractions", scheduler.retractions, scheduler.clock),
        "largest_batch": Metric.of("largest_batch", scheduler.largest_batch, scheduler.clock),
        "steps": Metric.of("steps", scheduler.clock, 1),
        "free_pages": Metric.of("free_pages", meter.free_pages.mean, meter.free_pages.n),
    }
    for kind, seen in meter.live_bytes.items():
        metrics[f"live_bytes.{kind}"] = Metric.of("live_bytes", seen.peak, seen.n)
    for kind, seen in meter.fragmented_bytes.items():
        metrics[f"fragmented_bytes.{kind}"] = Metric.of("fragmented_bytes", seen.peak, seen.n)
    if engine.config.pool != "static":
        churn = engine.churn
        metrics["moved_share"] = Metric.of("moved_share", churn.moved_share, churn.observed)
        metrics["pages_moved"] = Metric.of("pages_moved", engine.pages_moved, 1)
        metrics["compact_ms"] = Metric.of("compact_ms", meter.compact_s * 1e3, meter.compactions)
    return metrics


def mix_metrics(engine: Engine) -> dict[str, Metric]:
    """What a mix shift came to: most short and most long requests at once, steps and retractions."""
    scheduler, largest = engine.scheduler, engine.meter.largest
    return {
        "largest_batch.short": Metric.of("largest_batch", largest["short"], scheduler.clock),
        "largest_batch.long": Metric.of("largest_batch", largest["long"], scheduler.clock),
        "steps.mix_shift": Metric.of("steps", scheduler.clock, 1),
        "retractions.mix_shift": Metric.of("retractions", scheduler.retractions, scheduler.clock),
    }
