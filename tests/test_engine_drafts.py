"""Block drafts in the engine: how far a trained one foresees its target, and that no draft changes an answer."""

import contextlib
import functools
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as replace_record

from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.e2e.engine.sampler import Sampling
from suite.e2e.faults.planting import planting
from suite.e2e.matrix.judge import judge
from suite.e2e.matrix.measure import measure
from suite.e2e.matrix.plan import load_plan, parse_plan, with_plant
from suite.errors import InputError, RefusedError, UnknownNameError
from suite.kernels.ids import KVKind
from suite.models.drafts import find_draft, load_draft
from suite.models.languages import question
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.records import CellJob

FOLDER = resolve_model("qwen-mini")
MATRICES = Path(__file__).parents[1] / "matrices"
DRAFTS = 7
NEW_TOKENS = 48


@functools.cache
def target():
    return load_model(FOLDER, dtype=torch.float32, device="cpu")


@functools.cache
def draft(algorithm: str):
    return load_draft(find_draft(FOLDER, algorithm.upper()), target(), dtype=torch.float32, device="cpu")


def engine(pool: str = "unified", speculation: str = "dspark", **changes) -> Engine:
    fields = {
        "backend": "reference",
        "launcher": "reference",
        "pool": pool,
        "page_size": 4,
        "max_batch": 4,
        "max_context": 192,
        "chunk_tokens": 96,
        "dtype": torch.float32,
        "device": "cpu",
        "graph": False,
        "seed": 3,
        "poison": True,
        "speculation": speculation,
        "draft_tokens": 0 if speculation == "none" else DRAFTS,
    }
    known = draft(speculation) if speculation != "none" else None
    return Engine(target(), EngineConfig(**(fields | changes)), draft=known)


def requests(count: int = 4) -> list[Request]:
    return [
        Request(prompt=question("template", 11, index, 40 + 9 * index)[0], max_new_tokens=NEW_TOKENS)
        for index in range(count)
    ]


@functools.cache
def plain() -> list[list[int]]:
    work = requests()
    engine("static", "none").run(work)
    return [request.output for request in work]


def accept_length(work: list[Request]) -> float:
    return sum(r.drafts.accept_tokens for r in work) / sum(r.drafts.verify_passes for r in work)


def served(pool: str = "unified", speculation: str = "dspark", **changes) -> float:
    """Accept length of the requests, whose answers must be those without drafts."""
    work, built = requests(), engine(pool, speculation, **changes)
    built.run(work)
    assert [request.output for request in work] == plain()
    assert built.allocator.live_pages(KVKind.FULL) == 0
    return accept_length(work)


@pytest.mark.parametrize("speculation", ["dspark", "dflash"])
def test_a_trained_draft_foresees_its_target_in_every_pool(speculation):
    lengths = [
        served("static", speculation),
        served("static", speculation, graph=True, fused_draft=True),
        served("unified", speculation, graph=True),
        served("unified", speculation, fused_draft=True),
        served("unified_token_major", speculation, graph=True, fused_draft=True),
    ]
    assert lengths[0] >= 5
    assert set(lengths) == {lengths[0]}


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_tokens": 7, "mixed": True, "graph": True},
        {"prefix_cache": True, "snapshot_tokens": 4, "pool_pages": 70, "graph": True},
        {"max_batch": 2, "page_size": 16, "fused_draft": True, "graph": True},
    ],
    ids=str,
)
def test_fed_rows_follow_chunks_retractions_and_shared_prefixes(changes):
    found = []
    for pool in ("static", "unified"):
        work, built = requests(), engine(pool, **changes)
        built.run(work)
        assert [request.output for request in work] == plain()
        assert [r.drafts.accepted_at for r in work] == [r.drafts.proposed_at for r in work]
        assert ("pool_pages" in changes) == (built.scheduler.retractions > 0)
        found.append(accept_length(work))
    assert found[0] == found[1]


def test_sampled_requests_say_what_they_say_without_drafts():
    work, again = ([replace(r, sampling=Sampling(temperature=0.8, seed=5)) for r in requests()] for _ in range(2))
    engine(graph=True).run(work)
    engine("static", "none").run(again)
    assert [request.output for request in work] == [request.output for request in again]
    assert all(request.drafts.verify_passes for request in work)


def permuted(built: Engine) -> None:
    """The rows of a chunk are stored in another order."""
    own = built.drafter.runner.inject
    built.drafter.runner.inject = lambda step, features: own(step, features.flip(0))


def shifted(built: Engine) -> None:
    """Every row is stored one slot late."""
    own = built.drafter.runner.inject
    built.drafter.runner.inject = lambda step, features: own(step, features.roll(1, 0))


def dropped(built: Engine) -> None:
    """Accepted tokens leave no rows: the block pass's own stay there."""
    built.drafter.settle = lambda step, stored, features: None


@pytest.mark.parametrize("fault", [permuted, shifted, dropped, lambda built: planting(["draft_reads_other_rows"])])
def test_one_layout_fault_costs_the_accept_length_and_no_answer(fault):
    work, built = requests(), engine(poison=False)
    with fault(built) or contextlib.nullcontext():
        built.run(work)
    assert [request.output for request in work] == plain()
    assert accept_length(work) < 2.5


def test_a_shared_prefix_brings_its_fed_rows():
    """The second request computes only the end of its prompt; its drafts are right as if it had computed all."""
    for pool in ("static", "unified"):
        work = [replace(requests(1)[0], arrival_step=20 * index) for index in range(2)]
        engine(pool, prefix_cache=True, snapshot_tokens=4).run(work)
        assert work[1].cached_tokens >= 36
        assert work[0].output == work[1].output
        assert work[0].drafts.accepted_at == work[1].drafts.accepted_at == work[1].drafts.proposed_at


def test_what_does_not_go_together_is_said():
    with pytest.raises(InputError, match="draft_tokens: got 5, expected 7, what the draft proposes in one block"):
        engine(draft_tokens=5)
    with pytest.raises(InputError, match="draft: got None, expected a draft model for speculation = dflash"):
        Engine(target(), replace(engine("static", "none").config, speculation="dflash", draft_tokens=DRAFTS))
    with pytest.raises(RefusedError, match="fa3: needs causal attention, got a draft's block"):
        engine(backend="fa3")
    with pytest.raises(InputError, match="max_context: got 16391, expected at most 16384"):
        engine(max_context=16384)
    with pytest.raises(InputError, match=r"expected a draft's folder, .* or a folder .*gpt-oss-mini/dflash"):
        find_draft(resolve_model("gpt-oss-mini"), "DFLASH")


def test_each_algorithm_is_found_in_the_folder_of_its_name():
    assert [find_draft(FOLDER, name).folder.name for name in ("DSPARK", "DFLASH")] == ["dspark", "dflash"]
    with pytest.raises(UnknownNameError, match="architectures: got 'Qwen3DSparkModel', expected one of DFlash"):
        find_draft(FOLDER, "DFLASH", FOLDER / "dspark")


def test_a_cell_counts_accepted_drafts_in_both_arms_and_a_draft_that_reads_other_rows_is_wrong():
    plan = with_plant(load_plan(MATRICES / "families.toml"), "draft_reads_other_rows")
    (planted,) = [cell for cell in plan.cells if any(arm.plants for arm in cell.arms)]
    workload = replace_record(planted.cell.workload, requests=3, new_tokens=24, batch=3)
    cell = replace_record(planted.cell, workload=workload)
    outcomes = [measure(CellJob(cell=cell, arm=arm, block=0, timeout_s=60)) for arm in planted.arms]
    assert [arm.pool for arm in planted.arms] == ["static", "unified", "unified"]
    rulings = [judge(cell, arm, each, outcomes[0]).outcome for arm, each in zip(planted.arms, outcomes, strict=True)]
    assert [each.status for each in rulings] == ["passed", "passed", "wrong"]
    lengths = [each.metrics["accept_length"].value for each in rulings]
    assert lengths[0] == lengths[1] >= 5
    assert lengths[2] < 2.5
    assert rulings[2].reason_code == "accept_length"
    assert rulings[2].metrics["token_mismatches"].value == 0
    assert "expected at least 5" in rulings[2].reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"language": "recall"}, "language: got 'recall', expected one of"),
        ({"speculation": "ngram", "draft": "x"}, "draft: got 'x', expected nothing for speculation ngram"),
        ({"speculation": "none", "draft_tokens": 0}, "min_accept_length: got 5.0, expected nothing without drafts"),
        ({"min_accept_length": 0}, "min_accept_length: got 0, expected a number at least 1"),
    ],
)
def test_workload_fields_of_drafts_are_checked(changes, message):
    matrix = tomllib.loads((MATRICES / "families.toml").read_text(encoding="utf-8"))
    matrix["workloads"]["dspark"] |= changes
    with pytest.raises(InputError, match=message):
        parse_plan(matrix)
