"""From TOML to cells: the product of the axes, and one error naming the field for everything that is wrong."""

import copy
from pathlib import Path

import pytest

from suite.e2e.matrix import plan as planning
from suite.e2e.matrix.plan import load_plan, parse_plan, with_plant
from suite.errors import InputError, UnknownNameError
from suite.records import Arm

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """The names of this test's world, whatever ships."""
    monkeypatch.setattr(planning, "shipped_models", lambda: ("gpt-oss-mini",))


def matrix(**changes):
    """A sound matrix; `changes` are dotted fields with `__` for dots, None deletes one."""
    table = {
        "name": "test",
        "defaults": {
            **{"family": "engine", "device": "cpu", "dtype": "float32", "page_size": 16},
            **{"graph": True, "seed": 1, "timeout_s": 120},
        },
        "workloads": {
            "laptop": {
                **{"requests": 8, "prompt_tokens": 256, "new_tokens": 24, "batch": 4, "chunk_tokens": 128},
                **{"tasks": {"recall": 64}, "min_accuracy": 0.97},
            }
        },
        "cells": [
            {
                **{"model": ["gpt-oss-mini"], "backend": ["reference", "fa3"], "launcher": "reference"},
                **{"pool": ["static", "unified"], "workload": "laptop"},
            }
        ],
    }
    for field, value in changes.items():
        *path, last = field.split("__")
        at = table
        for key in path:
            at = at[int(key)] if key.isdigit() else at[key]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return table


def test_the_product_of_the_axes_is_planned_static_first():
    plan = parse_plan(matrix(cells__0__pool=["unified", "static"], cells__0__page_size=[1, 16]))
    cells = [(p.cell.backend, p.cell.page_size) for p in plan.cells]
    assert cells == [("reference", 1), ("reference", 16), ("fa3", 1), ("fa3", 16)]
    assert all(p.arms == (Arm(pool="static"), Arm(pool="unified")) for p in plan.cells)
    assert [job.arm.pool for job in plan.jobs()] == ["static", "unified"] * 4
    workload = plan.cells[0].cell.workload
    assert (workload.name, workload.tasks, workload.min_accuracy) == ("laptop", {"recall": 64}, 0.97)
    assert plan.jobs()[0].timeout_s == 120


def test_a_cell_overrides_the_defaults():
    plan = parse_plan(
        matrix(cells__0__page_size=4, cells__0__timeout_s=1.5, defaults__model="gpt-oss-mini", cells__0__model=None)
    )
    assert plan.cells[0].cell.page_size == 4
    assert plan.cells[0].timeout_s == 1.5


def test_a_task_may_name_its_length():
    plan = parse_plan(matrix(workloads__laptop__tasks={"recall@128": 4}))
    assert plan.cells[0].cell.workload.tasks == {"recall@128": 4}


def test_a_folder_is_a_model(tmp_path):
    assert parse_plan(matrix(cells__0__model=str(tmp_path))).cells[0].cell.model == str(tmp_path)


BAD = {
    "unknown key": ({"nmae": "x"}, "nmae"),
    "unknown default": ({"defaults__page_sizes": 16}, "defaults.page_sizes"),
    "unknown cell key": ({"cells__0__backends": "fa3"}, "cells[0].backends"),
    "unknown workload key": ({"workloads__laptop__request": 8}, "workloads.laptop.request"),
    "unknown backend": ({"cells__0__backend": ["reference", "fa33"]}, "cells[0].backend"),
    "unknown model": ({"cells__0__model": "gpt-oss-mimi"}, "cells[0].model"),
    "unknown folder": ({"cells__0__model": "/no/such/folder"}, "cells[0].model"),
    "unknown pool": ({"cells__0__pool": ["static", "unifed"]}, "cells[0].pool"),
    "unknown launcher": ({"cells__0__launcher": "auto"}, "cells[0].launcher"),
    "unknown workload": ({"cells__0__workload": "desktop"}, "cells[0].workload"),
    "unknown task": ({"workloads__laptop__tasks": {"recal": 3}}, "workloads.laptop.tasks.recal"),
    "impossible task": ({"workloads__laptop__tasks": {"recall@x": 3}}, "workloads.laptop.tasks.recall@x"),
    "unknown dtype": ({"defaults__dtype": "float16"}, "defaults.dtype"),
    "unknown device": ({"defaults__device": "tpu"}, "defaults.device"),
    "unknown family": ({"defaults__family": "kernell"}, "defaults.family"),
    "page size 0": ({"defaults__page_size": 0}, "defaults.page_size"),
    "page size of a cell": ({"cells__0__page_size": [16, -1]}, "cells[0].page_size"),
    "page size as text": ({"defaults__page_size": "16"}, "defaults.page_size"),
    "page size as truth": ({"defaults__page_size": True}, "defaults.page_size"),
    "graph as number": ({"defaults__graph": 1}, "defaults.graph"),
    "negative seed": ({"defaults__seed": -1}, "defaults.seed"),
    "no time": ({"defaults__timeout_s": 0}, "defaults.timeout_s"),
    "infinite time": ({"defaults__timeout_s": float("inf")}, "defaults.timeout_s"),
    "time that is no number": ({"defaults__timeout_s": float("nan")}, "defaults.timeout_s"),
    "negative prompt": ({"workloads__laptop__prompt_tokens": -1}, "workloads.laptop.prompt_tokens"),
    "no new tokens": ({"workloads__laptop__new_tokens": 0}, "workloads.laptop.new_tokens"),
    "no items": ({"workloads__laptop__tasks": {"recall": 0}}, "workloads.laptop.tasks.recall"),
    "tasks as list": ({"workloads__laptop__tasks": ["recall"]}, "workloads.laptop.tasks"),
    "accuracy above one": ({"workloads__laptop__min_accuracy": 97}, "workloads.laptop.min_accuracy"),
    "floor without tasks": ({"workloads__laptop__tasks": None}, "workloads.laptop.min_accuracy"),
    "missing workload field": ({"workloads__laptop__batch": None}, "workloads.laptop.batch"),
    "missing cell field": ({"cells__0__launcher": None}, "cells[0].launcher"),
    "missing default": ({"defaults__seed": None}, "cells[0].seed"),
    "missing name": ({"name": None}, "name"),
    "no cells": ({"cells": []}, "cells"),
    "cells as table": ({"cells": {"backend": "fa3"}}, "cells"),
    "cell that is no table": ({"cells": ["fa3"]}, "cells[0]"),
    "defaults that are no table": ({"defaults": 3}, "defaults"),
    "workloads that are no tables": ({"workloads": 3}, "workloads"),
    "workload that is no table": ({"workloads__laptop": 3}, "workloads.laptop"),
    "empty axis": ({"cells__0__backend": []}, "cells[0].backend"),
    "value twice": ({"cells__0__backend": ["fa3", "fa3"]}, "cells[0].backend"),
    "pool twice": ({"cells__0__pool": ["static", "static"]}, "cells[0].pool"),
    "list where there is no axis": ({"cells__0__launcher": ["reference"]}, "cells[0].launcher"),
}


@pytest.mark.parametrize(("change", "field"), BAD.values(), ids=BAD)
def test_everything_wrong_is_one_error_naming_its_field(change, field):
    with pytest.raises(InputError) as caught:
        parse_plan(matrix(**change))
    assert caught.value.field == field
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


def test_the_second_cells_field_is_named_and_the_nearest_name_suggested():
    table = matrix()
    table["cells"].append(copy.deepcopy(table["cells"][0]) | {"backend": "trito"})
    with pytest.raises(UnknownNameError, match=r"cells\[1\]\.backend: got 'trito'.*did you mean 'triton'"):
        parse_plan(table)


def test_a_cell_planned_twice_is_an_error_naming_both_places():
    table = matrix()
    table["cells"].append(copy.deepcopy(table["cells"][0]) | {"backend": "fa3", "pool": "unified"})
    with pytest.raises(InputError, match=r"cells\[1\]: got 'gpt-oss-mini/fa3/.*cells\[0\]"):
        parse_plan(table)


def test_a_plant_is_one_more_arm_of_the_first_cell_with_both_pools():
    table = matrix()
    alone = copy.deepcopy(table["cells"][0]) | {"pool": "unified", "backend": "triton", "launcher": "interpreter"}
    table["cells"].insert(0, alone)
    plain = parse_plan(table)
    plan = with_plant(plain, "read_skips_translation")
    assert [len(p.arms) for p in plan.cells] == [1, 3, 2]
    assert plan.cells[1].arms[2] == Arm(pool="unified", plants=("read_skips_translation",))
    assert plan.cells[2] == plain.cells[2]


def test_a_plant_needs_a_known_fault_and_a_pair():
    with pytest.raises(UnknownNameError, match="plant"):
        with_plant(parse_plan(matrix()), "read_skips_translations")
    with pytest.raises(InputError, match="both pools"):
        with_plant(parse_plan(matrix(cells__0__pool="unified")), "read_skips_translation")


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "readable TOML"), (b"name = ", "valid TOML"), (b"name = '\xff'", "valid TOML")]
)
def test_a_file_that_is_no_matrix(tmp_path, content, expected):
    path = tmp_path / "matrix.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=expected) as caught:
        load_plan(path)
    assert caught.value.field == "matrix"
    with pytest.raises(InputError, match="readable TOML"):
        load_plan(tmp_path)


def test_the_demos_matrix_is_sound():
    plan = load_plan(ROOT / "matrices" / "demo.toml")
    backends = [(p.cell.backend, p.cell.launcher, tuple(arm.pool for arm in p.arms)) for p in plan.cells]
    both = ("static", "unified")
    assert sorted(backends) == [
        ("fa3", "reference", both),
        ("reference", "reference", both),
        ("triton", "interpreter", both),
    ]
    assert len(with_plant(plan, "read_skips_translation").jobs()) == 7
