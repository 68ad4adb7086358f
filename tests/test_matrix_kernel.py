"""Kernel cells: planned from TOML, measured in every pool mode, equal to the bit, and wrong when a read is."""

import pytest
import torch

from suite.e2e.matrix.judge import judge
from suite.e2e.matrix.kernel_rig import KernelRig
from suite.e2e.matrix.measure_kernel import measure_kernel
from suite.e2e.matrix.plan import parse_plan, with_plant
from suite.errors import InputError, RefusedError, UnknownNameError
from suite.kernels.shapes import SHAPES
from suite.kernels.translator import KVIndexTranslator
from suite.records import Arm, CellJob

MODES = ("static", "unified", "unified_token_major")


def matrix(**changes) -> dict:
    cell = {
        "family": "kernel",
        "model": "gpt-oss-20b",
        "backend": "reference",
        "launcher": "reference",
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "graph": False,
        "seed": 1,
        "timeout_s": 60,
        "pool": list(MODES),
        "workload": "decode",
    }
    workloads = {
        "decode": {"batch": 3, "tokens": 50, "samples": 2},
        "extend": {"op": "extend", "batch": 2, "tokens": 30, "query_tokens": 7, "samples": 2},
        "past_the_window": {"batch": 2, "tokens": 150, "samples": 1},
    }
    return {"name": "kernels", "workloads": workloads, "cells": [cell | changes]}


def outcomes(**changes) -> dict:
    """Pool mode -> outcome, ruled against the static one."""
    (planned,) = parse_plan(matrix(**changes)).cells
    ruled: dict = {}
    for arm in planned.arms:
        outcome = measure_kernel(CellJob(cell=planned.cell, arm=arm, block=0, timeout_s=60))
        ruled[arm.pool] = judge(planned.cell, arm, outcome, ruled.get("static")).outcome
    return ruled


@pytest.mark.parametrize(
    ("model", "backend", "workload"),
    [
        ("gpt-oss-20b", "reference", "decode"),
        ("gpt-oss-20b", "fa3", "extend"),
        ("gpt-oss-20b", "fa3", "past_the_window"),
        ("deepseek-v2-lite", "reference", "extend"),
        ("qwen3.5-9b", "fa3", "decode"),
    ],
)
def test_every_pool_gives_the_same_bits(model, backend, workload):
    ruled = outcomes(model=model, backend=backend, workload=workload)
    kinds = ("full", "window") if model == "gpt-oss-20b" else ("full",)
    for mode, outcome in ruled.items():
        assert (outcome.status, outcome.reason) == ("passed", None)
        assert outcome.metrics["error_ratio"].value <= 1.0
        for kind in kinds:
            assert outcome.metrics[f"layer_us.{kind}"].value > 0
            assert outcome.metrics[f"metadata_us.{kind}"].n in (1, 2)
        if mode != "static":
            assert outcome.metrics["max_output_diff"].value == 0.0
            assert outcome.metrics["moved_share"].value > 0.5


def test_bytes_are_those_of_the_rows_that_must_be_read():
    ruled = outcomes()
    # 3 requests x 50 tokens x (K and V) x 8 heads x 64 x 4 bytes; the window of 128 holds them all
    assert ruled["unified"].metrics["kv_bytes.full"].value == 3 * 50 * 2 * 8 * 64 * 4
    assert ruled["unified"].metrics["kv_bytes.window"].value == 3 * 50 * 2 * 8 * 64 * 4


@pytest.mark.parametrize("mode", MODES[1:])
def test_an_untranslated_read_is_wrong_and_has_no_time(monkeypatch, mode):
    monkeypatch.setattr(KVIndexTranslator, "read_map", lambda self, kind: (None, 1))
    (planned,) = parse_plan(matrix(pool=[mode])).cells
    outcome = measure_kernel(CellJob(cell=planned.cell, arm=planned.arms[0], block=0, timeout_s=60))
    assert (outcome.status, outcome.reason_code) == ("wrong", "inaccurate")
    assert "error against fp32" in outcome.reason
    assert not any(name.startswith(("layer_us", "tb_per_s")) for name in outcome.metrics)


def test_a_large_pool_moves_as_much_as_a_small_one():
    """More pages than one lazy packing moves."""
    large = matrix(model="llama-8b", page_size=1, pool=["unified"])
    large["workloads"]["decode"] = {"batch": 2, "tokens": 4000}
    (planned,) = parse_plan(large).cells
    share, pages = KernelRig(planned.cell, planned.cell.workload, "unified").moved_share()
    assert pages == 8000
    assert share >= 0.7


def test_both_arms_hold_the_same_numbers():
    (planned,) = parse_plan(matrix()).cells
    rigs = [KernelRig(planned.cell, planned.cell.workload, mode) for mode in MODES]
    for layer in rigs[0].layers:
        for request in range(3):
            k, v = rigs[0].rows(layer, request)
            for rig in rigs:
                table = rig.translator.index_table_for_batch(rig.batch).of(layer.kind)
                size = table.entry_page_size
                row = table.ids[table.row_ids[request], 17 // size] * size + 17 % size
                assert rig.allocator.pool.k_view(layer.index)[row].equal(k[17])
                assert rig.allocator.pool.v_view(layer.index)[row].equal(v[17])


def test_a_backend_that_cannot_serve_refuses():
    (planned,) = parse_plan(matrix(backend="fa3", page_size=3)).cells
    job = CellJob(cell=planned.cell, arm=Arm(pool="unified"), block=0, timeout_s=60)
    with pytest.raises(RefusedError, match=r"fa3: needs .*power"):
        measure_kernel(job)


def test_plans_check_shape_and_workload():
    with pytest.raises(UnknownNameError, match=r"cells\[0\].model: got 'gpt-oss-2b'.*did you mean 'gpt-oss-20b'"):
        parse_plan(matrix(model="gpt-oss-2b"))
    with pytest.raises(
        InputError, match=r"cells\[0\].workload: got 'decode', expected a workload of the engine family"
    ):
        parse_plan(matrix(family="engine", model="gpt-oss-mini"))
    bad = matrix()
    bad["workloads"]["decode"]["query_tokens"] = 51
    with pytest.raises(InputError, match=r"workloads.decode.query_tokens: got 51, expected 1 of a decode"):
        parse_plan(bad)
    bad["workloads"]["decode"]["op"] = "extend"
    with pytest.raises(InputError, match=r"workloads.decode.query_tokens: got 51, expected at most 50"):
        parse_plan(bad)
    bad["workloads"]["decode"]["op"] = "extent"
    with pytest.raises(UnknownNameError, match=r"workloads.decode.op: got 'extent'"):
        parse_plan(bad)
    assert "gpt-oss-20b" in SHAPES


def test_a_kernel_cell_takes_no_plant():
    """Faults are planted into engines: a plan that would run one as if it were planted is refused."""
    with pytest.raises(InputError, match=r"plant: got 'read_skips_translation', expected a matrix with an engine cell"):
        with_plant(parse_plan(matrix()), "read_skips_translation")


def test_raw_times_are_kept():
    outcome = outcomes(pool=["static"])["static"]
    kept = {samples.metric: samples.shape for samples in outcome.samples}
    assert kept["layer_us.full"] == kept["metadata_us.window"] == (2,)
    assert "output" in kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("launcher", ["native", "reference"])
def test_a_missing_gpu_is_a_refusal(launcher):
    (planned,) = parse_plan(matrix(device="cuda", launcher=launcher)).cells
    with pytest.raises(RefusedError, match="reference: needs a CUDA device, got a machine where torch finds none"):
        measure_kernel(CellJob(cell=planned.cell, arm=planned.arms[0], block=0, timeout_s=60))
