"""Every operation of the kernel cells at tiny shapes: equal to the bit in every pool, and wrong when an id is."""

from pathlib import Path

import pytest

from suite.e2e.matrix.judge import judge
from suite.e2e.matrix.kernel_state import StateBench
from suite.e2e.matrix.measure_kernel import BENCHES, measure_kernel
from suite.e2e.matrix.plan import load_plan, parse_plan
from suite.errors import RefusedError
from suite.kernels.pools.unified import UnifiedPool
from suite.kernels.shapes import STATE_SHAPES
from suite.kernels.translator import KVIndexTranslator
from suite.records import KERNEL_OPS, CellJob, Outcome
from tests.test_matrix_kernel import matrix

WORKLOADS = {
    "verify": {"op": "verify", "batch": 2, "tokens": 21, "query_tokens": 4, "samples": 1},
    "write": {"op": "write", "batch": 3, "tokens": 21, "query_tokens": 5, "samples": 2},
    "translate": {"op": "translate", "batch": 3, "tokens": 21, "query_tokens": 2, "samples": 2},
    "state_decode": {"op": "state_decode", "batch": 2, "tokens": 9, "samples": 1},
    "state_prefill": {"op": "state_prefill", "batch": 2, "tokens": 9, "query_tokens": 5, "samples": 1},
    "state_begin": {"op": "state_prefill", "batch": 2, "tokens": 3, "query_tokens": 3, "samples": 1},
    "state_verify": {"op": "state_verify", "batch": 2, "tokens": 9, "query_tokens": 2, "samples": 1},
}


def jobs(workload: str, **changes) -> list[CellJob]:
    plan = matrix(workload=workload, **changes)
    plan["workloads"] = {workload: WORKLOADS[workload]}
    (planned,) = parse_plan(plan).cells
    return [CellJob(cell=planned.cell, arm=arm, block=0, timeout_s=60) for arm in planned.arms]


def passed(workload: str, **changes) -> dict[str, Outcome]:
    """Pool mode -> outcome, each passed and equal to the static one to the bit."""
    ruled: dict[str, Outcome] = {}
    for job in jobs(workload, **changes):
        outcome = judge(job.cell, job.arm, measure_kernel(job), ruled.get("static")).outcome
        assert (outcome.status, outcome.reason) == ("passed", None)
        assert outcome.metrics["error_ratio"].value <= 1.0
        if job.arm.pool != "static":
            assert outcome.metrics["max_output_diff"].value == 0.0
            assert outcome.metrics["moved_share"].value > 0.5
        ruled[job.arm.pool] = outcome
    return ruled


@pytest.mark.parametrize(
    ("model", "backend", "launcher"),
    [("gpt-oss-20b", "fa3", "reference"), ("deepseek-v2-lite", "flashinfer_mla", "reference"),
     ("llama-8b", "triton", "interpreter")],
)  # fmt: skip
def test_verify(model, backend, launcher):
    ruled = passed("verify", model=model, backend=backend, launcher=launcher, pool=["static", "unified"])
    assert ruled["unified"].metrics["layer_us.full"].value > 0


@pytest.mark.parametrize("model", ["gpt-oss-20b", "deepseek-v2-lite"])
def test_write_stores_exactly_the_rows(model):
    ruled = passed("write", model=model, backend="triton")
    row = 2 * 8 * 64 * 4 if model == "gpt-oss-20b" else 576 * 4
    for outcome in ruled.values():
        assert outcome.metrics["kv_bytes.full"].value == 2 * 3 * 5 * row  # read and written
        assert outcome.metrics["write_us.full"].n == 2


@pytest.mark.parametrize("page_size", [1, 4])
def test_translations_lead_to_the_rows(page_size):
    ruled = passed("translate", backend="triton", page_size=page_size)
    columns = -(-21 // page_size)
    for mode, outcome in ruled.items():
        assert outcome.metrics["table_us.window"].value > 0
        assert outcome.metrics["index_bytes.window"].value == 3 * columns * 16
        assert outcome.metrics["index_bytes.full"].value == 3 * columns * (8 if mode == "static" else 16)
        assert ("write_loc_us.full" in outcome.metrics) is (mode != "static")


@pytest.mark.parametrize("workload", ["state_decode", "state_prefill", "state_begin", "state_verify"])
@pytest.mark.parametrize("model", STATE_SHAPES)
def test_recurrent_state(model, workload):
    ruled = passed(workload, model=model, backend=STATE_SHAPES[model][0], pool=["static", "unified"])
    assert ruled["unified"].metrics["state_bytes.state"].value > 0
    assert ruled["unified"].metrics["moved_share"].value == 1.0


def test_our_state_kernels_by_the_interpreter(monkeypatch):
    monkeypatch.setitem(STATE_SHAPES, "ring-mini-linear", ("lightning", 2, 2, 16))
    for workload in ("state_decode", "state_prefill", "state_verify"):
        changes = {"model": "ring-mini-linear", "backend": "lightning", "launcher": "interpreter"}
        passed(workload, **changes, pool=["static", "unified"])


@pytest.mark.parametrize("workload", ["write", "translate"])
def test_an_untranslated_id_is_wrong(monkeypatch, workload):
    bench = BENCHES[workload]
    if workload == "translate":
        monkeypatch.setattr(KVIndexTranslator, "read_map", lambda self, kind: (None, 1))
    else:  # rows that land one further
        real = UnifiedPool.write

        def write(self, layer, ids, k, v):
            real(self, layer, type(ids)(ids.tensor + 1, ids.kind), k, v)

        (job,) = jobs(workload, backend="triton", pool=["unified"])
        made = bench(job.cell, job.cell.workload, "unified")
        monkeypatch.setattr(UnifiedPool, "write", write)
        assert made.check()[1] == float("inf")
        return
    (job,) = jobs(workload, backend="triton", pool=["unified"])
    outcome = measure_kernel(job)
    assert (outcome.status, outcome.reason_code) == ("wrong", "inaccurate")
    assert not any(name.endswith("_us.full") for name in outcome.metrics)


def test_a_state_of_another_request_is_wrong(monkeypatch):
    (job,) = jobs("state_decode", model="kimi-linear", backend="kda", pool=["unified"])
    real = StateBench._plan
    bench = StateBench(job.cell, job.cell.workload, "unified")
    slots = bench.slots.clone()

    def swapped(self):
        self.slots = slots.flip(0)
        metadata = real(self)
        self.slots = slots
        return metadata

    monkeypatch.setattr(StateBench, "_plan", swapped)
    assert bench.check()[1] > 1.0


def test_what_cannot_run_is_refused():
    for changes, reason in (
        ({"workload": "write", "backend": "fa3"}, "write: needs backend triton, whose operations these are, got fa3"),
        (
            {"workload": "write", "backend": "triton", "launcher": "interpreter"},
            "write: needs launcher reference on cpu",
        ),
        ({"workload": "state_decode", "backend": "gdn"}, "state_decode: needs model qwen3-next or .*, got gpt-oss-20b"),
        (
            {"workload": "state_decode", "model": "kimi-linear", "backend": "gdn"},
            "state_decode: needs backend kda for kimi-linear, got gdn",
        ),
    ):
        with pytest.raises(RefusedError, match=reason):
            measure_kernel(jobs(**changes, pool=["static"])[0])


def test_the_shipped_matrix_has_every_operation():
    plan = load_plan(Path(__file__).parents[1] / "matrices" / "kernels.toml")
    assert {planned.cell.workload.op for planned in plan.cells} == set(KERNEL_OPS) == set(BENCHES)
    families = {planned.cell.backend for planned in plan.cells}
    assert families >= {"triton", "fa3", "flashinfer", "flashinfer_mla", "trtllm_mha", "flashmla", "gdn", "kda"}
