"""What an outcome must satisfy before it may become a row.

A status decides which fields may exist: only a passed row has a latency, and a row that did not pass
has a reason. Not-a-number and infinity are no measurements.
"""

import math

from suite.errors import InputError, UnknownNameError
from suite.records import METRICS, Metric, Outcome, Samples, metric_kind

NUL = "\x00"  # PostgreSQL's text cannot hold it, so no row may


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
    if metric.n < 1:
        raise InputError(f"{field}.n", metric.n, "at least one observation")


def check_samples(samples: Samples, passed: bool) -> None:
    field = f"samples.{samples.metric}"
    if is_timing(samples.metric) and not passed:
        raise InputError(field, samples.shape, "no timing in a row that did not pass: a wrong result has no latency")
    try:
        samples.unpack()
    except Exception as error:  # zlib, numpy and the hash each have their own
        raise InputError(field, samples.shape, f"the bytes that were packed ({error})") from error


def is_timing(metric: str) -> bool:
    """Whether `metric` is a time; raw observations such as logits need not be metrics at all."""
    kind = METRICS.get(metric.partition(".")[0])
    return kind is not None and kind.timing


def check_texts(outcome: Outcome) -> None:
    texts = {"reason": outcome.reason, "reason_code": outcome.reason_code, "stderr_tail": outcome.stderr_tail}
    for number, item in enumerate(outcome.items):
        texts[f"items[{number}].answer"] = item.answer
    for field, text in texts.items():
        if text is not None and NUL in text:
            raise InputError(field, text, "text without NUL characters")
