"""Reading back: which run is meant, what show and compare say of each kind of row."""

import pytest

from db.compare import compare_rows
from db.keys import utc_now
from db.queries import ended_rows, find_run, show_rows
from db.runs import run_counts
from db.session import open_db
from db.store import Store
from suite.errors import InputError, UnknownNameError
from suite.provenance import CodeRevision
from suite.records import Metric, Outcome
from tests.matrix_fakes import make_job, make_outcome

REVISION = CodeRevision(repo="kvproof", sha="c0ffee", patch_sha="", branch="main", dirty=False)
STATIC, UNIFIED = make_job("static"), make_job("unified")
PLANTED = make_job("unified", plants=("read_skips_translation",))


@pytest.fixture
def store(tmp_path):
    engine = open_db(tmp_path / "results.db")
    yield Store(engine)
    engine.dispose()


def write_run(store, outcomes):
    run_id = store.begin_run("tiny", {}, [job for job, _ in outcomes], REVISION)
    for job, outcome in outcomes:
        store.ingest(run_id, job, outcome, started_at=utc_now())
    return run_id


def measured(**values):
    units = {
        "accuracy": "share",
        "max_logit_diff": "logit",
        "itl_ms": "ms",
        "moved_share": "share",
        "tok_per_s": "tok/s",
    }
    return make_outcome(metrics={name: Metric(value=v, unit=units[name], n=3) for name, v in values.items()})


def test_the_latest_run_is_meant_unless_one_is_named(store):
    with pytest.raises(InputError, match="has none"):
        find_run(store.engine)
    runs = [write_run(store, [(STATIC, make_outcome())]) for _ in range(3)]
    assert find_run(store.engine) == runs[-1]
    assert [find_run(store.engine, run) for run in runs] == runs
    assert find_run(store.engine, runs[0][:-1]) == runs[0]


@pytest.mark.parametrize("name", ["nonsense", "0", "", "%"])
def test_an_unknown_or_ambiguous_run_is_an_error_naming_the_latest(store, name):
    runs = [write_run(store, [(STATIC, make_outcome())]) for _ in range(2)]
    with pytest.raises(InputError) as caught:
        find_run(store.engine, name)
    assert caught.value.field == "run"
    assert runs[-1] in str(caught.value) or "more than one" in str(caught.value)


def test_show_says_how_each_row_ended(store):
    refused = Outcome(status="refused", reason_code="refused", reason="needs sm_90, got cpu")
    run_id = write_run(store, [(STATIC, measured(itl_ms=3.25, accuracy=1.0)), (UNIFIED, refused)])
    first, second = show_rows(store.engine, run_id)
    keys = ["cell", "family", "model", "backend", "pool", "label", "launcher", "block", "attempt", "status", "reason"]
    assert list(first) == [*keys, "void_reason", "metrics"]
    assert first["metrics"] == {
        "accuracy": {"value": 1.0, "unit": "share", "n": 3},
        "itl_ms": {"value": 3.25, "unit": "ms", "n": 3},
    }
    assert list(first["metrics"]) == ["accuracy", "itl_ms"]
    assert (first["pool"], first["status"], first["reason"]) == ("static", "passed", None)
    assert (second["status"], second["reason"]) == ("refused", "refused: needs sm_90, got cpu")
    assert second["launcher"] == "reference"
    assert first["cell"] == second["cell"]
    assert first["cell"].startswith("gpt-oss-mini/fa3/reference/cpu/float32/page16/graph/tiny/")
    assert run_counts(store.engine, run_id) == {"passed": 1, "refused": 1}


def test_show_narrows_to_one_metric(store):
    run_id = write_run(store, [(STATIC, make_outcome())])
    assert list(show_rows(store.engine, run_id, "accuracy.recall")[0]["metrics"]) == ["accuracy.recall"]
    assert show_rows(store.engine, run_id, "ttft_ms")[0]["metrics"] == {}
    with pytest.raises(UnknownNameError, match="did you mean 'itl_ms'"):
        show_rows(store.engine, run_id, "itl")
    with pytest.raises(UnknownNameError):
        compare_rows(store.engine, run_id, "accuracy.needle")


def verdicts(store, static, unified):
    outcomes = [(job, outcome) for job, outcome in ((STATIC, static), (UNIFIED, unified)) if outcome]
    rows = compare_rows(store.engine, write_run(store, outcomes))
    return {row["metric"]: (row["static"], row["unified"], row["delta"], row["verdict"]) for row in rows}


def test_compare_gives_each_metric_its_verdict(store):
    found = verdicts(
        store,
        measured(accuracy=0.98, itl_ms=3.0, tok_per_s=10.0),
        measured(accuracy=0.97, itl_ms=3.5, max_logit_diff=0.0, moved_share=0.9),
    )
    assert found["accuracy"] == (0.98, 0.97, pytest.approx(-0.01), "differs")
    assert found["itl_ms"] == (3.0, 3.5, 0.5, "not judged: 1 block")
    assert found["tok_per_s"] == (10.0, None, None, "missing")
    assert found["max_logit_diff"] == (None, 0.0, 0.0, "equal")
    assert found["token_mismatches"] == (None, None, None, "missing")
    assert found["moved_share"] == (None, 0.9, None, "not judged: only the unified arm has it")


def test_equal_times_are_still_not_judged(store):
    found = verdicts(store, measured(itl_ms=3.0, accuracy=1.0), measured(itl_ms=3.0, accuracy=1.0, max_logit_diff=0.25))
    assert found["itl_ms"] == (3.0, 3.0, 0.0, "not judged: 1 block")
    assert found["accuracy"][3] == "equal"
    assert found["max_logit_diff"] == (None, 0.25, 0.25, "differs")


def test_a_row_that_ended_badly_is_missing_and_never_equal(store):
    crashed = Outcome(status="crashed", reason="SIGSEGV")
    for pair in ((crashed, crashed), (make_outcome(), crashed), (None, crashed)):
        found = verdicts(store, *pair)
        assert found["max_logit_diff"] == (None, None, None, "missing")
        assert "equal" not in {verdict for *_, verdict in found.values()}


def test_a_planted_row_is_named_and_no_arm_of_the_real_pair(store):
    outcomes = [(STATIC, measured(accuracy=1.0)), (UNIFIED, measured(accuracy=1.0, max_logit_diff=0.0))]
    wrong = Outcome(status="wrong", reason="differs", metrics=measured(accuracy=0.1, max_logit_diff=9.0).metrics)
    run_id = write_run(store, [*outcomes, (PLANTED, wrong)])
    real, planted = compare_rows(store.engine, run_id, "max_logit_diff")
    assert planted["cell"] == real["cell"] + "+read_skips_translation"
    assert (real["verdict"], planted["verdict"]) == ("equal", "differs")
    assert [row.plants for row in ended_rows(store.engine, run_id)] == [[], [], ["read_skips_translation"]]
    assert show_rows(store.engine, run_id)[2]["cell"] == planted["cell"]


def test_cells_do_not_mix(store):
    jobs = [
        (make_job(pool, backend=b), measured(accuracy=a))
        for b, a in (("fa3", 1.0), ("triton", 0.5))
        for pool in ("static", "unified")
    ]
    rows = compare_rows(store.engine, write_run(store, jobs), "accuracy")
    assert [(row["static"], row["unified"]) for row in rows] == [(1.0, 1.0), (0.5, 0.5)]
