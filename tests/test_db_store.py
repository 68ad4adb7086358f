"""The writer: each outcome whole or not at all, once however often it comes, and never what no row may be."""

import math

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from db import models
from db.checks import check_outcome
from db.keys import utc_now
from db.session import open_db
from db.store import Comparison, Store
from suite.errors import InputError, InvariantError
from suite.provenance import CodeRevision
from suite.records import ItemOutcome, Metric, Outcome, Samples, content_hash
from tests.db_support import empty_postgres, postgres
from tests.matrix_fakes import make_job, make_outcome

REVISION = CodeRevision(repo="kvproof", sha="c0ffee", patch_sha="", branch="main", dirty=False)
STATIC, UNIFIED = make_job("static"), make_job("unified")


@pytest.fixture(scope="module")
def server():
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    if request.param == "sqlite":
        engine = open_db(tmp_path / "results.db")
    else:
        server = request.getfixturevalue("server")
        empty_postgres(server)
        engine = open_db(server)
    yield Store(engine)
    engine.dispose()


@pytest.fixture
def run_id(store):
    return store.begin_run("tiny", {"name": "tiny"}, [STATIC, UNIFIED], REVISION)


def contents(store):
    """Every row of every table."""
    with store.engine.connect() as connection:
        return {t.name: connection.execute(sa.select(t)).all() for t in models.Base.metadata.sorted_tables}


def counts(store):
    return {name: len(rows) for name, rows in contents(store).items() if rows}


def ingest(store, run_id, job, outcome, **more):
    return store.ingest(run_id, job, outcome, started_at=utc_now(), **more)


def test_a_run_is_announced_whole(store, run_id):
    assert counts(store) == {"code_rev": 1, "cell": 1, "arm": 2, "run": 1, "block": 1}
    with store.engine.connect() as connection:
        block = connection.execute(sa.select(models.Block)).one()
        run = connection.execute(sa.select(models.Run)).one()
    assert block.arm_order == [content_hash(STATIC.arm), content_hash(UNIFIED.arm)]
    assert (run.id, run.suite, run.planned, run.state, run.finished_at) == (run_id, "tiny", 2, "running", None)
    assert run.plan == {"name": "tiny"}


def test_dimensions_are_shared_between_runs(store, run_id):
    store.begin_run("tiny", {"name": "tiny"}, [STATIC, UNIFIED], REVISION)
    assert counts(store) == {"code_rev": 1, "cell": 1, "arm": 2, "run": 2, "block": 2}


def test_an_outcome_is_kept_whole(store, run_id):
    outcome = make_outcome()
    row_id = ingest(store, run_id, STATIC, outcome)
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(models.CellRun)).one()
        values = {m.metric: (m.stat, m.value, m.n) for m in connection.execute(sa.select(models.Measurement))}
        blocks = connection.execute(sa.select(models.SampleBlock).order_by(models.SampleBlock.metric)).all()
        answers = sorted((r.correct, r.answer) for r in connection.execute(sa.select(models.ItemResult)))
        environment = connection.execute(sa.select(models.Environment)).one()
    assert (row.id, row.status, row.launcher, row.revision, row.dirty) == (
        row_id,
        "passed",
        "reference",
        "c0ffee",
        False,
    )
    assert (row.effective, row.prompt_hash, row.duration_s) == ({"page_size": 16}, "prompts", 1.5)
    assert values == {name: ("value", metric.value, metric.n) for name, metric in outcome.metrics.items()}
    assert [block.metric for block in blocks] == ["itl_ms", "logits", "tokens"]
    kept = blocks[1]
    packed = Samples(metric=kept.metric, shape=tuple(kept.shape), data=kept.data, sha256=kept.sha256)
    assert np.array_equal(packed.unpack(), outcome.samples[0].unpack())
    assert kept.n == 8 * 16
    assert answers == [(False, ""), (True, "blue")]
    assert environment.id == row.environment_id
    assert "commit" not in environment.document


def test_the_same_payload_twice_is_one_row(store, run_id):
    first = ingest(store, run_id, STATIC, make_outcome())
    before = contents(store)
    assert ingest(store, run_id, STATIC, make_outcome()) == first
    assert contents(store) == before


def test_another_outcome_for_the_same_attempt_is_refused(store, run_id):
    ingest(store, run_id, STATIC, make_outcome())
    before = contents(store)
    with pytest.raises(InvariantError, match="already ended as passed"):
        ingest(store, run_id, STATIC, make_outcome(seed=1))
    assert contents(store) == before
    ingest(store, run_id, STATIC, make_outcome(seed=1), attempt=2)
    assert counts(store)["cell_run"] == 2


def test_what_was_not_planned_is_refused(store, run_id):
    with pytest.raises(InvariantError, match="not planned"):
        ingest(store, run_id, make_job(backend="triton"), make_outcome())
    assert "cell_run" not in counts(store)


def test_a_question_asked_twice_has_two_results(store, run_id):
    outcome = make_outcome()
    ingest(store, run_id, STATIC, replace(outcome, items=outcome.items + outcome.items[:1]))
    assert (counts(store)["item"], counts(store)["item_result"]) == (2, 3)
    with store.engine.connect() as connection:
        repeats = sorted(connection.scalars(sa.select(models.ItemResult.repeat)))
    assert repeats == [0, 0, 1]


def test_comparisons_enter_with_their_row(store, run_id):
    static_id = ingest(store, run_id, STATIC, make_outcome())
    fact = {"metric": "max_logit_diff", "method": "bit_identity", "version": 1, "effect": 0.0, "verdict": "equal"}
    row_id = ingest(store, run_id, UNIFIED, make_outcome(), comparisons=[Comparison(static_id=static_id, **fact)])
    with store.engine.connect() as connection:
        comparison = connection.execute(sa.select(models.Comparison)).one()
    assert (comparison.static_id, comparison.candidate_id, comparison.verdict) == (static_id, row_id, "equal")
    assert comparison.kind == "AB"


def test_a_failure_in_the_last_insert_undoes_the_first(store, run_id):
    before = contents(store)
    fact = {"metric": "max_logit_diff", "method": "bit_identity", "version": 1, "effect": 0.0, "verdict": "equal"}
    with pytest.raises(sa.exc.IntegrityError):
        ingest(store, run_id, UNIFIED, make_outcome(), comparisons=[Comparison(static_id="absent", **fact)])
    assert contents(store) == before


def metrics(**values):
    return {"metrics": {"accuracy": Metric(value=1.0, unit="share", n=1), **values}}


def tampered():
    samples = Samples.pack("logits", np.ones(4))
    return replace(samples, sha256="0" * 64)


REFUSED = {"status": "refused", "reason": "needs sm_90, got cpu"}
POISON = {
    "nan": (metrics(itl_ms=Metric(value=math.nan, unit="ms", n=1)), "metrics.itl_ms"),
    "infinity": (metrics(ttft_ms=Metric(value=math.inf, unit="ms", n=1)), "metrics.ttft_ms"),
    "minus infinity": (metrics(mean_loglikelihood=Metric(value=-math.inf, unit="nat", n=1)), "mean_loglikelihood"),
    "unknown metric": (metrics(latency=Metric(value=1.0, unit="ms", n=1)), "latency"),
    "wrong unit": (metrics(itl_ms=Metric(value=1.0, unit="s", n=1)), "metrics.itl_ms.unit"),
    "no observations": (metrics(itl_ms=Metric(value=1.0, unit="ms", n=0)), "metrics.itl_ms.n"),
    "passed by nobody": ({"launcher": None}, "launcher"),
    "passed nowhere": ({"provenance": None}, "provenance"),
    "no reason": ({"status": "crashed", "metrics": {}, "samples": ()}, "reason"),
    "timing when wrong": ({"status": "wrong", "reason": "differs", "samples": ()}, "metrics.itl_ms"),
    "timing samples when refused": (REFUSED | {"metrics": {}}, "samples.itl_ms"),
    "tampered samples": ({"samples": (tampered(),)}, "samples.logits"),
    "broken samples": ({"samples": (replace(tampered(), data=b"no zlib"),)}, "samples.logits"),
    "wrong shape": ({"samples": (replace(Samples.pack("logits", np.ones(4)), shape=(5,)),)}, "samples.logits"),
    "negative duration": ({"duration_s": -1.0}, "duration_s"),
    "NUL in an answer": (
        {"items": (ItemOutcome(task="t", doc_hash="", prompt_hash="", target_hash="", correct=True, answer="a\0"),)},
        "items[0].answer",
    ),
    "more observations than a column holds": (
        metrics(itl_ms=Metric(value=1.0, unit="ms", n=2**31)),
        "metrics.itl_ms.n",
    ),
    "negative shape": ({"samples": (replace(Samples.pack("logits", np.ones(4)), shape=(-1, 2)),)}, "samples.logits"),
    "NUL in a task": (
        {"items": (ItemOutcome(task="t\0", doc_hash="", prompt_hash="", target_hash="", correct=True, answer=""),)},
        "items[0].task",
    ),
    "NUL in a metric": (metrics(**{"accuracy.a\0": Metric(value=1.0, unit="share", n=1)}), "metrics"),
    "NUL in a sample's name": ({"samples": (Samples.pack("logits\0", np.ones(4)),)}, "samples"),
    "NUL in a hash": ({"prompt_hash": "a\0"}, "prompt_hash"),
    "NUL in a device": (
        {"provenance": replace(make_outcome().provenance, device_name="a\0")},
        "provenance.device_name",
    ),
    "NUL in a reason": ({"status": "crashed", "metrics": {}, "samples": (), "reason": "a\0"}, "reason"),
}


@pytest.mark.parametrize(("change", "field"), POISON.values(), ids=POISON)
def test_a_poisoned_payload_leaves_nothing(store, run_id, change, field):
    before = contents(store)
    with pytest.raises(InputError) as caught:
        ingest(store, run_id, STATIC, make_outcome(**change))
    assert field in str(caught.value)
    assert contents(store) == before


@pytest.mark.parametrize("status", ["wrong", "refused", "crashed", "timed_out", "skipped"])
def test_only_a_passed_row_has_timings(status):
    bare = {"accuracy": Metric(value=0.5, unit="share", n=2)}
    check_outcome(Outcome(status=status, reason="why", metrics=bare))
    with pytest.raises(InputError, match="a wrong result has no latency"):
        check_outcome(Outcome(status=status, reason="why", metrics=make_outcome().metrics))


def test_a_run_ends(store, run_id):
    store.end_run(run_id, "finished")
    with store.engine.connect() as connection:
        run = connection.execute(sa.select(models.Run)).one()
    assert run.state == "finished"
    assert run.finished_at >= run.started_at


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.floats(allow_nan=False, allow_infinity=False),
    answer=st.text(max_size=20).map(lambda t: t.replace("\0", "")),
)
def test_finite_numbers_and_texts_come_back_as_they_were(store, value, answer):
    run = store.begin_run("tiny", {}, [STATIC], REVISION)
    item = ItemOutcome(task="t", doc_hash="d", prompt_hash="p", target_hash=answer, correct=True, answer=answer)
    ingest(
        store,
        run,
        STATIC,
        make_outcome(metrics=metrics(accuracy=Metric(value=value, unit="share", n=1))["metrics"], items=(item,)),
    )
    measurement, result, row = models.Measurement, models.ItemResult, models.CellRun
    with store.engine.connect() as connection:
        mine = sa.select(row.id).where(row.run_id == run).scalar_subquery()
        assert connection.scalar(sa.select(measurement.value).where(measurement.cell_run_id == mine)) == value
        assert connection.scalar(sa.select(result.answer).where(result.cell_run_id == mine)) == answer
