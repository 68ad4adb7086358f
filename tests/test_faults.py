"""Planted faults: each stands at one seam and leaves nothing behind, the smoke set is seen, a missed one shows."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from suite.e2e import faults
from suite.e2e.faults.detection.registry import FAULTS
from suite.e2e.faults.detection.run import choose, detect, missed, observe
from suite.e2e.faults.detection.signals import signal_of
from suite.e2e.faults.fault import KINDS, Fault, Registry, Setting, Signal
from suite.e2e.faults.names import ENGINE_FAULTS, ENGINE_ROOMS, OF_BLOCK_DRAFTS
from suite.e2e.faults.planting import planting
from suite.e2e.faults.seams import locate, planted, unplanted
from suite.errors import InputError, InvariantError, UnknownNameError
from suite.kernels.allocators.books import FreePages

ROOT = Path(__file__).parents[1]
SEAM = "suite.kernels.allocators.books:FreePages.take"


def standing(seam):
    owner, name = locate(seam)
    return inspect.getattr_static(owner, name)


def fault(scenario, *, substitute=lambda own: own, signals=("here.seen",), seam=SEAM):
    return Fault(
        id="mine", kind="state", seam=seam, text="mine", substitute=substitute, scenario=scenario, signals=signals
    )


def takes_nothing(own):
    return lambda self, count: []


def taken(setting):
    if FreePages([1, 2]).take(1) != [1]:
        yield Signal(name="here.seen", text="nothing was taken")


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_stands_at_its_seam_and_leaves_it_as_it_was(name):
    seam = FAULTS[name].seam
    before = standing(seam)
    with planted(FAULTS[name]):
        assert standing(seam) is not before
        with unplanted():
            assert standing(seam) is before
        assert standing(seam) is not before
    assert standing(seam) is before


def test_there_are_faults_of_every_kind_and_a_matrix_run_can_plant_those_of_the_engine():
    assert len(FAULTS) >= 60
    assert {fault.kind for fault in FAULTS.values()} == set(KINDS)
    assert {fault.kind for fault in choose(smoke=True)} == set(KINDS)
    of_the_engine = {fault.id for fault in FAULTS.values() if fault.seam.startswith(ENGINE_ROOMS)}
    assert of_the_engine == ENGINE_FAULTS
    assert set(OF_BLOCK_DRAFTS) <= ENGINE_FAULTS


def test_the_smoke_set_is_caught_and_its_twins_are_clean():
    rows = faults.smoke()
    assert missed(rows) == []
    assert all(row["first_signal"].startswith(tuple(FAULTS[row["fault"]].signals)) for row in rows)


def test_a_fault_that_changes_nothing_is_missed():
    (row,) = detect([fault(taken)])
    assert (row["caught"], row["by"], row["first_signal"], row["clean_twin_passed"]) == (False, [], None, True)
    assert missed([row]) == ["mine"]


def test_a_fault_is_caught_by_the_signal_that_was_expected_and_by_no_other():
    (row,) = detect([fault(taken, substitute=takes_nothing)])
    assert (row["caught"], row["first_signal"]) == (True, "here.seen: nothing was taken")
    (row,) = detect([fault(taken, substitute=takes_nothing, signals=("elsewhere.seen",))])
    assert (row["caught"], row["by"]) == (False, ["here.seen"])


def test_a_twin_that_gives_a_signal_proves_nothing():
    def alarmed(setting):
        yield Signal(name="here.seen", text="always")

    (row,) = detect([fault(alarmed)])
    assert (row["caught"], row["clean_twin_passed"]) == (True, False)
    assert missed([row]) == ["mine"]


def test_an_error_is_a_signal_of_the_room_it_came_from_and_ends_the_scenario():
    def fails(setting):
        yield Signal(name="here.seen", text="first")
        FreePages([0]).check("window")

    assert [signal.name for signal in observe(fails, Setting())] == ["here.seen", "allocators.invariant"]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (InvariantError("free 1 != 2"), "child.invariant"),
        (InputError("page_size", 0, "more"), "child.bad_input"),
        (TypeError("needs KernelIds"), "child.type_error"),
        (IndexError("out of range"), "child.crash"),
    ],
)
def test_an_error_of_nobodys_room_is_the_childs(error, name):
    assert signal_of(error).name == name


def test_a_plant_is_lifted_when_the_scenario_fails():
    before = standing(SEAM)
    with pytest.raises(KeyError), planted(fault(taken, substitute=takes_nothing)):
        raise KeyError
    assert standing(SEAM) is before


def test_planting_by_name_holds_while_its_block_runs():
    names = ("read_skips_translation", "move_copies_nothing")
    before = [standing(FAULTS[name].seam) for name in names]
    with planting(names):
        assert all(standing(FAULTS[name].seam) is not own for name, own in zip(names, before, strict=True))
    assert [standing(FAULTS[name].seam) for name in names] == before
    with pytest.raises(UnknownNameError, match="plant: got 'writers_do_not_wait'"), planting(["writers_do_not_wait"]):
        pytest.fail("a database's fault is none of an engine's")


def test_a_seam_must_be_defined_where_it_is_named():
    with pytest.raises(InvariantError, match="is not defined there"):
        locate("suite.kernels.pools.unified:TokenMajorPool.zero_pages")
    registry = Registry()
    with pytest.raises(InvariantError, match="a text and a signal"):
        registry.plants("state", SEAM, taken, "here.seen")(takes_nothing)


def test_kinds_are_names_that_are_known():
    with pytest.raises(UnknownNameError, match="did you mean 'addressing'"):
        choose("adressing")
    assert {fault.kind for fault in choose("numeric")} == {"numeric"}


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "suite.cli", "faults", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_command_prints_rows_and_exits_0_when_all_are_caught():
    done = command("--kind", "configuration", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["fault"] for row in rows] == [fault.id for fault in choose("configuration")]
    for row in rows:
        assert {"fault", "kind", "caught", "by", "first_signal", "gpu_seconds", "clean_twin_passed"} <= row.keys()
        assert row["caught"]
        assert row["clean_twin_passed"]
        assert row["gpu_seconds"] == 0.0


def test_the_command_refuses_a_kind_that_is_not_there():
    done = command("--kind", "adressing")
    assert (done.returncode, done.stdout) == (4, "")
    assert "kind: got 'adressing'" in done.stderr
