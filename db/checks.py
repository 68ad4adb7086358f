"""What an outcome must satisfy before it may become a row.

A status decides which fields may exist: only a passed row has a latency, and a row that did not pass
has a reason. Not-a-number and infinity are no measurements.
"""

import math
from collections.abc import Iterator

from suite.errors import InputError, UnknownNameError
from suite.records import METRICS, Metric, Outcome, Samples, metric_kind

NUL = "\x00"  # PostgreSQL's text cannot hold it, so no row may
LARGEST_INT = 2**31 - 1  # what an integer column holds in every database


def check_outcome(outcome: Outcome) -> None:
    """InputError naming the first field of `outcome` that no row may have."""
    passed = outcome.status == "passed"
    if passed:
        for field in ("launcher", "provenance"):
            if getattr(outcome, field) is None:
                raise InputError(field, None, "what executed it, for a passed row")
    elif not outcome.reason:
        raise InputError("reason", outcome.reason, f"why the row is {outcome.status}")
    if not 0 <= outcome.duration_s < math.inf:
        raise InputError("duration_s", outcome.duration_s, "a finite number of seconds, not negative")
    for name, metric in outcome.metrics.items():
        check_metric(name, metric, passed)
    for samples in outcome.samples:
        check_samples(samples, passed)
    check_texts(outcome)


def check_metric(name: str, metric: Metric, passed: bool) -> None:
    field = f"metrics.{name}"
    try:
        kind = metric_kind(name)
    except KeyError:
        raise UnknownNameError("metrics", name, METRICS) from None
    if kind.timing and not passed:
        raise InputError(field, metric.value, "no timing in a row that did not pass: a wrong result has no latency")
    if not math.isfinite(metric.value):
        raise InputError(field, metric.value, "a finite number")
    if metric.unit != kind.unit:
        raise InputError(f"{field}.unit", metric.unit, repr(kind.unit))
    if not 1 <= metric.n <= LARGEST_INT:
        raise InputError(f"{field}.n", metric.n, f"1 to {LARGEST_INT} observations")


def check_samples(samples: Samples, passed: bool) -> None:
    field = f"samples.{samples.metric}"
    if is_timing(samples.metric) and not passed:
        raise InputError(field, samples.shape, "no timing in a row that did not pass: a wrong result has no latency")
    if any(length < 0 for length in samples.shape):
        raise InputError(field, samples.shape, "no negative lengths")
    try:
        samples.unpack()
    except Exception as error:  # zlib, numpy and the hash each have their own
        raise InputError(field, samples.shape, f"the bytes that were packed ({error})") from error


def is_timing(metric: str) -> bool:
    """Whether `metric` is a time; raw observations such as logits need not be metrics at all."""
    kind = METRICS.get(metric.partition(".")[0])
    return kind is not None and kind.timing


def check_texts(outcome: Outcome) -> None:
    for field, text in texts_of(outcome):
        if isinstance(text, str) and NUL in text:
            raise InputError(field, text, "text without NUL characters")


def texts_of(outcome: Outcome) -> Iterator[tuple[str, object]]:
    """Every value of `outcome` that becomes a text of its own in some table, with the field it stands in."""
    for name in ("reason", "reason_code", "stderr_tail", "prompt_hash"):
        yield name, getattr(outcome, name)
    for name in outcome.metrics:
        yield "metrics", name
    for samples in outcome.samples:
        yield "samples", samples.metric
    for number, item in enumerate(outcome.items):
        for name in item.__struct_fields__:
            yield f"items[{number}].{name}", getattr(item, name)
    if outcome.provenance is not None:
        for name in outcome.provenance.__struct_fields__:
            yield f"provenance.{name}", getattr(outcome.provenance, name)
