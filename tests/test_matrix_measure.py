"""What a child measures where a run's accuracy is too low: the row has to be one that the database takes."""

from db.checks import check_outcome
from suite.e2e.matrix.measure import measure
from suite.records import Workload
from tests.matrix_fakes import make_job

FLOORED = Workload(
    name="floored",
    requests=2,
    prompt_tokens=48,
    new_tokens=4,
    batch=2,
    chunk_tokens=64,
    tasks={"recall@64": 8},
    min_accuracy=0.9,
    timing_repeats=1,
)


def test_a_unified_row_under_the_floor_is_one_that_can_be_stored():
    job = make_job(pool="unified", plants=("read_skips_translation",), workload=FLOORED, graph=False)
    outcome = measure(job)
    assert (outcome.status, outcome.reason_code) == ("wrong", "accuracy")
    assert "pages_moved" in outcome.metrics
    assert "compact_ms" not in outcome.metrics
    check_outcome(outcome)
