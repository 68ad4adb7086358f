"""Blocks: balanced order, fresh placements, guards that void, digests that stay small, and plans cut to size."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from suite.e2e.matrix import planning
from suite.e2e.matrix.digest import MAX_DIGESTS, bounded
from suite.e2e.matrix.guards import transient, void_reason
from suite.e2e.matrix.placement import draw_padding, placement
from suite.e2e.matrix.planned import Plan, PlannedCell
from suite.e2e.matrix.ruling import rule_block
from suite.e2e.matrix.schedule import schedule, shard, within_budget
from suite.e2e.matrix.spool import Concluded
from suite.errors import InputError
from suite.records import Arm, CellJob, Guards, Metric, Outcome, Samples, content_hash
from tests.matrix_fakes import make_cell, make_outcome
from tests.test_db_queries import REVISION
from tests.test_matrix_plan import matrix

ROOT = Path(__file__).parents[1]
STATIC, UNIFIED, TOKEN_MAJOR = Arm(pool="static"), Arm(pool="unified"), Arm(pool="unified_token_major")
REPLICATE = Arm(pool="static", label="replicate")
PLANTED = Arm(pool="unified", plants=("read_skips_translation",))


def plan_of(*backends, arms=(STATIC, UNIFIED), **more):
    cells = (PlannedCell(cell=make_cell(backend=b), arms=arms, timeout_s=20.0, **more) for b in backends)
    return Plan(name="blocks", cells=tuple(cells))


def orders(plan, seed):
    return [tuple(job.arm for job in block.jobs) for block in schedule(plan, seed)]


@given(seed=st.integers(0, 2**31 - 1), pairs=st.integers(1, 6), arms=st.sampled_from([2, 3]))
def test_every_two_blocks_run_the_arms_in_both_orders(seed, pairs, arms):
    plan = plan_of("fa3", arms=(STATIC, UNIFIED, TOKEN_MAJOR)[:arms], blocks=2 * pairs)
    found = orders(plan, seed)
    assert all(found[2 * i] == found[2 * i + 1][::-1] for i in range(pairs))
    assert found == orders(plan, seed)
    first = sum(order.index(STATIC) for order in found)
    assert first == sum(len(order) - 1 - order.index(STATIC) for order in found)  # balanced


def test_the_order_is_drawn_and_a_single_block_keeps_the_plans():
    drawn = {orders(plan_of("fa3", blocks=2), seed)[0] for seed in range(20)}
    assert drawn == {(STATIC, UNIFIED), (UNIFIED, STATIC)}
    assert {orders(plan_of("fa3"), seed)[0] for seed in range(20)} == {(STATIC, UNIFIED)}


def test_all_cells_run_once_before_any_runs_twice_and_priority_comes_first():
    plan = plan_of("reference", "fa3", blocks=2)
    urgent = replace(plan.cells[1], priority=1)
    found = [(b.cell.backend, b.number) for b in schedule(replace(plan, cells=(plan.cells[0], urgent)), 1)]
    assert found == [("fa3", 0), ("fa3", 1), ("reference", 0), ("reference", 1)]
    found = [(b.cell.backend, b.number) for b in schedule(plan, 1)]
    assert found == [("reference", 0), ("fa3", 0), ("reference", 1), ("fa3", 1)]


def test_every_arm_of_every_attempt_is_placed_anew_and_the_same_seed_repeats_it():
    blocks = schedule(plan_of("fa3", "triton", blocks=3), 5)
    seeds = [job.placement_seed for block in blocks for n in (1, 2) for job in block.attempt(n)]
    assert len(set(seeds)) == len(seeds) == 24
    again = schedule(plan_of("fa3", "triton", blocks=3), 5)
    assert seeds == [job.placement_seed for block in again for n in (1, 2) for job in block.attempt(n)]


def test_a_planted_arm_runs_in_one_block():
    plan = plan_of("fa3", arms=(STATIC, UNIFIED, PLANTED), blocks=4)
    blocks = schedule(plan, 1)
    assert [sum(job.arm == PLANTED for job in block.jobs) for block in blocks] == [1, 0, 0, 0]
    key = content_hash
    planned = {(key(job.arm), job.block) for job in plan.jobs()}
    assert planned == {(key(job.arm), job.block) for block in blocks for job in block.jobs}


@given(count=st.integers(1, 4), seed=st.integers(0, 1000))
def test_shards_split_the_cells_whole_and_evenly(count, seed):
    plan = plan_of(*(f"backend-{n}" for n in range(8)), blocks=2)
    rng = random.Random(seed)
    history = {(content_hash(job.cell), content_hash(job.arm)): rng.uniform(1, 20) for job in plan.jobs()}
    parts = [shard(plan, index + 1, count, history) for index in range(count)]
    assert sorted(content_hash(c.cell) for part, _ in parts for c in part.cells) == sorted(
        content_hash(c.cell) for c in plan.cells
    )
    assert len({name.partition(" of ")[2] for _, name in parts}) == 1
    loads = [sum(block.estimate_s for block in schedule(part, 0, history)) for part, _ in parts]
    longest = max(sum(b.estimate_s for b in schedule(replace(plan, cells=(c,)), 0, history)) for c in plan.cells)
    assert max(loads) - min(loads) <= longest + 1e-6


def test_shards_that_saw_other_histories_have_other_names():
    plan = plan_of("a", "b", "c")
    slow = {(content_hash(plan.cells[2].cell), content_hash(STATIC)): 20.0}
    assert shard(plan, 1, 2)[1] != shard(plan, 1, 2, slow)[1]
    for bad in ((0, 2), (3, 2), (4, 4)):
        with pytest.raises(InputError, match="shard"):
            shard(plan, *bad)


def test_a_budget_keeps_the_first_blocks():
    blocks = schedule(plan_of("fa3", "triton", blocks=2), 1)  # 24 s each
    assert [within_budget(blocks, s) for s in (0, 23, 24, 71.9, 72, 1000)] == [0, 0, 1, 2, 3, 4]
    assert within_budget(blocks, 48, slots=2) == 4


# -- placement -----------------------------------------------------------------------------------


def test_padding_is_drawn_bounded_and_partly_given_back():
    drawn = [draw_padding("cuda", seed) for seed in range(200)]
    assert drawn == [draw_padding("cuda", seed) for seed in range(200)]
    sizes = [size for padding in drawn for size, _ in padding]
    assert min(sizes) >= 2**21
    assert max(sizes) <= 2**28 + 2**21
    assert {kept for padding in drawn for _, kept in padding} == {True, False}
    assert len({tuple(padding) for padding in drawn}) > 180  # few draws are of one small block


def test_padding_moves_what_comes_after_it():
    import torch

    def address(seed):
        with placement("cpu", seed) as padding:
            held = torch.empty(2**16, dtype=torch.uint8).data_ptr()
        return padding, held

    assert address(None)[0] == ()
    assert len({address(seed)[1] for seed in range(12)}) > 1


# -- guards --------------------------------------------------------------------------------------


def answered(tokens=8.0, requests=2, **guards):
    metrics = {**make_outcome().metrics, "generated_tokens": Metric(value=tokens, unit="tokens", n=requests)}
    return make_outcome(metrics=metrics, guards=Guards(**guards))


SOUND = {"gpu_uuid": "GPU-1", "sm_mhz": (1980.0, 1980.0), "throttle": 0x4, "compiles": 0, "kernels": ("attend",)}
VOID = {
    "tokens": (answered(tokens=9.0, **SOUND), "tokens_differ"),
    "requests": (answered(requests=3, **SOUND), "requests_differ"),
    "prompts": (replace(answered(**SOUND), prompt_hash="others"), "prompts_differ"),
    "launchers": (replace(answered(**SOUND), launcher="native"), "launchers_differ"),
    "GPU": (answered(**SOUND | {"gpu_uuid": "GPU-2"}), "gpus_differ"),
    "kernels": (answered(**SOUND | {"kernels": ("other",)}), "kernels_differ"),
    "compiled": (answered(**SOUND | {"compiles": 2}), "compiled"),
    "thermal": (answered(**SOUND | {"throttle": 0x20}), "throttled"),
    "clock in the window": (answered(**SOUND | {"sm_mhz": (1980.0, 1700.0)}), "clocks_changed"),
    "clock between arms": (answered(**SOUND | {"sm_mhz": (1700.0, 1700.0)}), "clocks_differ"),
}


@pytest.mark.parametrize(("other", "code"), VOID.values(), ids=VOID)
def test_arms_that_ran_differently_void_their_block(other, code):
    sound = answered(**SOUND)
    for pair in ([(STATIC, sound), (UNIFIED, other)], [(STATIC, other), (UNIFIED, sound)]):
        assert void_reason(pair).partition(":")[0] == code
    assert void_reason([(STATIC, sound), (UNIFIED, sound)]) is None
    assert void_reason([(STATIC, sound), (PLANTED, other)]) is None


def test_what_nobody_can_tell_and_who_did_not_answer_void_nothing():
    crashed = Outcome(status="crashed", reason="SIGSEGV")
    assert void_reason([(STATIC, make_outcome()), (UNIFIED, answered(**SOUND))]) is None
    assert void_reason([(STATIC, answered(**SOUND)), (UNIFIED, crashed)]) is None


def test_only_what_may_pass_next_time_is_worth_another_attempt():
    assert transient("throttled: static ran under")
    assert not transient("tokens_differ: 8 in static, 9 in unified")
    assert not transient(None)


def results(**outcomes):
    from db.keys import utc_now

    arms = {"static": STATIC, "unified": UNIFIED, "replicate": REPLICATE}
    return [
        (CellJob(cell=make_cell(), arm=arms[name], block=0, timeout_s=1), Concluded(started_at=utc_now(), outcome=o))
        for name, o in outcomes.items()
    ]


def test_a_void_block_is_void_in_every_row_and_a_wrong_arm_stays_wrong():
    entries = rule_block(results(unified=make_outcome(seed=1, prompt_hash="others"), static=make_outcome()), 1)
    assert [entry.job.arm for entry in entries] == [STATIC, UNIFIED]  # however they ran
    assert [entry.outcome.status for entry in entries] == ["passed", "wrong"]
    assert {entry.void_reason.partition(":")[0] for entry in entries} == {"prompts_differ"}


def test_the_second_static_arm_is_held_to_the_first_and_needs_no_moved_pages():
    metrics = {"accuracy": Metric(value=1.0, unit="share", n=3)}
    entries = rule_block(results(static=make_outcome(metrics=metrics), replicate=make_outcome(metrics=metrics)), 1)
    assert [entry.outcome.status for entry in entries] == ["passed", "passed"]
    assert entries[1].outcome.metrics["max_logit_diff"].value == 0.0
    assert entries[1].comparisons[0].static_id == entries[0].id
    other = rule_block(
        results(static=make_outcome(metrics=metrics), replicate=make_outcome(seed=1, metrics=metrics)), 1
    )
    assert other[1].outcome.status == "wrong"


# -- digests -------------------------------------------------------------------------------------


def digested(logits):
    outcome = bounded(make_outcome(samples=(Samples.pack("logits", logits),)))
    return {sample.metric: sample.unpack() for sample in outcome.samples}


@given(rows=st.integers(1, 40), at=st.integers(0, 39), seed=st.integers(0, 99))
def test_a_digest_says_where_two_rows_part(rows, at, seed):
    logits = np.random.default_rng(seed).normal(size=(rows, 32)).astype(np.float32)
    other = logits.copy()
    other[at % rows, seed % 32] = np.nextafter(other[at % rows, seed % 32], np.float32(9))
    a, b = digested(logits), digested(other)
    assert set(a) == {"logit_digest", "logit_gap"}
    assert np.flatnonzero(a["logit_digest"] != b["logit_digest"]).tolist() == [at % rows]
    top = np.sort(logits, axis=1)
    assert np.array_equal(a["logit_gap"], top[:, -1] - top[:, -2])


def test_digests_are_bounded_however_long_the_answers_are():
    logits = np.random.default_rng(1).normal(size=(5000, 64)).astype(np.float32)
    outcome = bounded(make_outcome(samples=(Samples.pack("logits", logits), Samples.pack("output", logits.ravel()))))
    assert all(len(sample.unpack()) <= MAX_DIGESTS for sample in outcome.samples)
    assert sum(len(sample.data) for sample in outcome.samples) < 14_000


# -- plans ---------------------------------------------------------------------------------------


def parsed(**changes):
    from suite.e2e.matrix.plan import parse_plan

    return parse_plan(matrix(**changes))


def points(plan):
    return [(c.cell.backend, c.cell.page_size, *(arm.pool for arm in c.arms)) for c in plan.cells]


def test_blocks_priorities_and_the_replicate_are_planned():
    plan = parsed(defaults__blocks=4, defaults__priority=2, cells__0__replicate=True, defaults__memory_gib=1.5)
    assert {(c.blocks, c.priority, c.memory_gib) for c in plan.cells} == {(4, 2, 1.5)}
    assert all(c.arms == (STATIC, REPLICATE, UNIFIED) for c in plan.cells)
    assert len(plan.jobs()) == 2 * 3 * 4
    assert {job.memory_gib for job in plan.jobs()} == {1.5}


def test_an_exclusion_takes_cells_or_arms_out():
    table = matrix(cells__0__page_size=[1, 16])
    from suite.e2e.matrix.plan import parse_plan

    table["exclude"] = [{"backend": "fa3", "page_size": 1}, {"backend": "reference", "pool": "unified"}]
    assert points(parse_plan(table)) == [
        ("reference", 1, "static"),
        ("reference", 16, "static"),
        ("fa3", 16, "static", "unified"),
    ]


def test_a_constraint_keeps_what_meets_it():
    table = matrix(cells__0__page_size=[1, 16, 64])
    from suite.e2e.matrix.plan import parse_plan

    table["constraints"] = [{"when": {"backend": "fa3"}, "require": {"page_size": [16, 64]}}]
    assert [p[:2] for p in points(parse_plan(table))] == [
        *(("reference", size) for size in (1, 16, 64)),
        *(("fa3", size) for size in (16, 64)),
    ]


BAD_RULES = {
    "no table": ({"exclude": {"backend": "fa3"}}, "exclude"),
    "nothing named": ({"exclude": [{}]}, "exclude[0]"),
    "unknown field": ({"exclude": [{"backends": "fa3"}]}, "exclude[0].backends"),
    "unknown value": ({"exclude": [{"backend": "fa33"}]}, "exclude[0].backend"),
    "matches nothing": ({"exclude": [{"backend": "triton"}]}, "exclude[0]"),
    "drops everything": ({"exclude": [{"device": "cpu"}]}, "cells"),
    "no requirement": ({"constraints": [{"when": {"backend": "fa3"}}]}, "constraints[0].require"),
    "unknown side": ({"constraints": [{"if": {"backend": "fa3"}}]}, "constraints[0].if"),
}


@pytest.mark.parametrize(("rules", "field"), BAD_RULES.values(), ids=BAD_RULES)
def test_a_bad_rule_is_one_error_naming_its_field(rules, field):
    from suite.e2e.matrix.plan import parse_plan

    with pytest.raises(InputError) as caught:
        parse_plan({**matrix(), **rules})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"defaults__blocks": 0}, "defaults.blocks"),
        ({"defaults__priority": -1}, "defaults.priority"),
        ({"defaults__replicate": "yes"}, "defaults.replicate"),
        ({"defaults__memory_gib": 0}, "defaults.memory_gib"),
        ({"defaults__replicate": True, "cells__0__pool": "unified"}, "cells[0].replicate"),
    ],
)
def test_bad_fields_of_a_block_are_named(change, field):
    with pytest.raises(InputError) as caught:
        parsed(**change)
    assert caught.value.field == field


def test_the_reference_launcher_makes_a_plan_small_and_its_twins_one(tmp_path):
    plan = parsed(cells__0__launcher="native", defaults__device="cuda", defaults__dtype=["bfloat16", "float32"])
    small, name = planning.cut(plan, str(tmp_path / "no.db"), "reference")
    assert name is None
    assert len(plan.cells) == 4
    assert [(c.cell.backend, c.cell.device, c.cell.launcher) for c in small.cells] == [
        ("reference", "cpu", "reference"),
        ("fa3", "cpu", "reference"),
    ]
    assert all(c.cell.workload.prompt_tokens <= 96 for c in small.cells)
    with pytest.raises(InputError, match="launcher: got 'interpreter'"):
        planning.cut(plan, "x.db", "interpreter")
    with pytest.raises(InputError, match="shard: got '2', expected I/N"):
        planning.cut(plan, "x.db", None, "2")


def test_gpus_are_shared_by_nobody(monkeypatch):
    cuda = Plan(name="p", cells=(replace(plan_of("fa3").cells[0], cell=make_cell(device="cuda")),))
    monkeypatch.setattr(planning, "gpus", lambda: ["GPU-1", "GPU-2"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert planning.slots(cuda, 1) == [None]
    assert planning.slots(cuda, 2) == ["GPU-1", "GPU-2"]
    assert planning.slots(plan_of("fa3"), 3) == [None] * 3
    with pytest.raises(InputError, match="jobs: got 3, expected at most 2"):
        planning.slots(cuda, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(InputError, match="at most 1"):
        planning.slots(cuda, 2)


def test_a_dry_run_lists_every_cell_with_its_hash_and_time(tmp_path):
    plan = plan_of("fa3", "triton", blocks=2)
    rows = planning.dry_run_rows(plan, str(tmp_path / "no.db"), 72.0, 1)
    assert [row["hash"] for row in rows] == [content_hash(c.cell) for c in plan.cells]
    assert [(row["estimate_s"], row["blocks"], row["dropped_blocks"]) for row in rows] == [(48.0, 2, 0), (48.0, 2, 1)]
    assert not (tmp_path / "no.db").exists()


def test_history_replaces_the_guess(tmp_path):
    from db.keys import utc_now
    from db.session import open_db
    from db.store import Store

    engine = open_db(tmp_path / "results.db")
    plan, store = plan_of("fa3"), Store(engine)
    jobs = plan.jobs()
    run_id = store.begin_run("tiny", {}, jobs, REVISION)
    for job in jobs:
        store.ingest(run_id, job, make_outcome(duration_s=3.0), started_at=utc_now())
    engine.dispose()
    (row,) = planning.dry_run_rows(plan, str(tmp_path / "results.db"), None, 1)
    assert row["estimate_s"] == 6.0


@pytest.mark.parametrize("name", ["merge", "nightly"])
def test_the_shipped_matrices_plan_and_shrink_to_a_cpu(name, tmp_path):
    from suite.e2e.matrix.plan import load_plan

    plan = load_plan(f"{ROOT}/matrices/{name}.toml")
    assert {c.blocks for c in plan.cells} == {4}
    assert any(REPLICATE in c.arms for c in plan.cells)
    assert {c.cell.family for c in plan.cells} == {"engine", "kernel"}
    small, _ = planning.cut(plan, str(tmp_path / "no.db"), "reference")
    assert {c.cell.device for c in small.cells} == {"cpu"}
    assert {c.cell.backend for c in small.cells} == {c.cell.backend for c in plan.cells}
