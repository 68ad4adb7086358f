"""From a matrix in TOML to the cells and arms that will run.

`[defaults]` gives fields to every `[[cells]]` entry, whose axes may be lists: their product is planned.
Everything is checked before anything runs; nothing unknown is tolerated, nothing is chosen silently.
"""

import itertools
import os
import tomllib
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from suite.e2e.accuracy.task import load_task
from suite.e2e.faults.names import ENGINE_FAULTS, OF_BLOCK_DRAFTS
from suite.e2e.matrix.fields import Check, Table, axis, boolean, check_keys, integer, number, one_of, text
from suite.e2e.matrix.planned import Plan, PlannedCell
from suite.e2e.matrix.rules import apply_rules, read_rules
from suite.e2e.matrix.workload_fields import ENGINE_FIELDS, check_engine_workload
from suite.errors import InputError, UnknownNameError
from suite.kernels.attention.support import BACKENDS
from suite.kernels.linear import LINEAR_BACKENDS
from suite.kernels.shapes import SHAPES, STATE_SHAPES
from suite.models.registry import shipped_models
from suite.records import (
    BLOCK_DRAFTS,
    KERNEL_OPS,
    LAUNCHERS,
    POOL_MODES,
    Arm,
    Cell,
    KernelWorkload,
    Workload,
    content_hash,
)

MAX_TIMEOUT_S = 7 * 24 * 3600.0
MAX_MEMORY_GIB = 1e6


def model(field: str, value: object) -> str:
    """A shipped checkpoint's name, or a folder that exists."""
    name = text(field, value)
    if name not in (shipped := shipped_models()) and not os.path.isdir(name):
        raise UnknownNameError(field, name, shipped, also=" or a checkpoint folder")
    return name


def tasks(field: str, value: object) -> dict[str, int]:
    """Names of accuracy tasks (`recall`, or `recall@128` for prompts of that length) and their numbers of items."""
    if not isinstance(value, dict):
        raise InputError(field, value, "a table of task names and numbers of items")
    for name in value:
        try:
            load_task(name).check_length()
        except InputError as error:
            raise InputError(f"{field}.{name}", error.value, error.expected) from error
    return {name: integer(1)(f"{field}.{name}", count) for name, count in value.items()}


def names(known: Collection[str]) -> Check:
    return one_of(lambda: known)


CELL_FIELDS: dict[str, Check] = {
    "family": names(("engine", "kernel")),
    "model": axis(text),
    "backend": axis(names({**BACKENDS, **LINEAR_BACKENDS})),
    "launcher": names(LAUNCHERS),
    "device": names(("cpu", "cuda")),
    "dtype": axis(names(("float32", "bfloat16"))),
    "page_size": axis(integer(1)),
    "graph": axis(boolean),
    "seed": integer(0),
    "pool": axis(names(POOL_MODES)),
    "workload": text,
    "timeout_s": number(0, MAX_TIMEOUT_S, above=True),
    "blocks": integer(1),
    "priority": integer(0),
    "replicate": boolean,
    "memory_gib": number(0, MAX_MEMORY_GIB, above=True),
}
OPTIONAL_CELL_FIELDS = ("blocks", "priority", "replicate", "memory_gib")
AXES = ("model", "backend", "dtype", "page_size", "graph")  # with pool, whose values are the arms
WORKLOAD_FIELDS: dict[str, Check] = {
    "requests": integer(1),
    "prompt_tokens": integer(1),
    "new_tokens": integer(1),
    "batch": integer(1),
    "chunk_tokens": integer(1),
    "tasks": tasks,
    "min_accuracy": number(0, 1),
    "timing_repeats": integer(1),
    **ENGINE_FIELDS,
}
OPTIONAL_WORKLOAD_FIELDS = {"tasks", "min_accuracy", "timing_repeats", "query_tokens", "samples", "op", *ENGINE_FIELDS}
KERNEL_WORKLOAD_FIELDS: dict[str, Check] = {
    "batch": integer(1),
    "tokens": integer(1),
    "query_tokens": integer(1),
    "samples": integer(1),
    "op": names(KERNEL_OPS),
}
MODELS: dict[str, Check] = {"engine": model, "kernel": names({**SHAPES, **STATE_SHAPES})}


def load_plan(path: str | Path) -> Plan:
    """The plan of the matrix at `path`; InputError naming the dotted field of the first thing wrong in it."""
    try:
        with open(path, "rb") as file:
            matrix = tomllib.load(file)
    except OSError as error:
        raise InputError("matrix", str(path), f"a readable TOML file ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, too many digits, too many brackets
        raise InputError("matrix", str(path), f"valid TOML ({error})") from error
    return parse_plan(matrix)


def parse_plan(matrix: Table) -> Plan:
    """The plan of a parsed matrix."""
    check_keys("", matrix, ("name", "defaults", "workloads", "cells", "exclude", "constraints"))
    name = text("name", matrix.get("name"))
    defaults = read_fields("defaults", matrix.get("defaults", {}), CELL_FIELDS)
    workloads = read_workloads(matrix.get("workloads", {}))
    entries = matrix.get("cells")
    if not isinstance(entries, list) or not entries:
        raise InputError("cells", entries, "at least one [[cells]] table")
    first: dict[str, str] = {}
    planned: list[PlannedCell] = []
    for number_, entry in enumerate(entries):
        field = f"cells[{number_}]"
        for cell in plan_entry(field, {**defaults, **read_fields(field, entry, CELL_FIELDS)}, workloads):
            if (key := content_hash(cell.cell)) in first:
                raise InputError(field, cell_text(cell.cell), f"a cell that {first[key]} does not plan already")
            first[key] = field
            planned.append(cell)
    return Plan(name=name, cells=apply_rules(planned, read_rules(matrix, CELL_FIELDS)))


def read_fields(field: str, table: object, known: dict[str, Check]) -> Table:
    """The checked values of `table`, which may have any of the fields `known`."""
    given = check_keys(field, table, known)
    return {key: known[key](f"{field}.{key}", value) for key, value in given.items()}


def read_workloads(tables: object) -> dict[str, Workload | KernelWorkload]:
    """Workloads by name; one with `tokens` is asked of a kernel, any other of the engine."""
    if not isinstance(tables, dict):
        raise InputError("workloads", tables, "tables [workloads.NAME]")
    workloads: dict[str, Workload | KernelWorkload] = {}
    for name, table in tables.items():
        field = f"workloads.{text('workloads', name)}"
        is_kernel = isinstance(table, dict) and "tokens" in table
        known = KERNEL_WORKLOAD_FIELDS if is_kernel else WORKLOAD_FIELDS
        fields = read_fields(field, table, known)
        for key in known:
            if key not in fields and key not in OPTIONAL_WORKLOAD_FIELDS:
                raise InputError(f"{field}.{key}", None, "a value")
        if not is_kernel:
            check_engine_workload(field, fields)
        if "min_accuracy" in fields and not fields.get("tasks"):
            raise InputError(f"{field}.min_accuracy", fields["min_accuracy"], "tasks to measure the accuracy with")
        if is_kernel and fields.get("op", "decode").endswith("decode") and fields.get("query_tokens", 1) != 1:
            raise InputError(f"{field}.query_tokens", fields["query_tokens"], "1 of a decode")
        if is_kernel and fields.get("query_tokens", 1) > fields["tokens"]:
            raise InputError(f"{field}.query_tokens", fields["query_tokens"], f"at most {fields['tokens']}, its tokens")
        workloads[name] = KernelWorkload(name=name, **fields) if is_kernel else Workload(name=name, **fields)
    return workloads


def plan_entry(field: str, fields: Table, workloads: dict[str, Workload | KernelWorkload]) -> list[PlannedCell]:
    """The product of one entry's axes, the last axis varying fastest."""
    for key in CELL_FIELDS:
        if key not in fields and key not in OPTIONAL_CELL_FIELDS:
            raise InputError(f"{field}.{key}", None, "a value, here or in [defaults]")
    if fields["workload"] not in workloads:
        raise UnknownNameError(f"{field}.workload", fields["workload"], workloads)
    family, workload = fields["family"], workloads[fields["workload"]]
    if (family == "kernel") != isinstance(workload, KernelWorkload):
        raise InputError(f"{field}.workload", workload.name, f"a workload of the {family} family")
    for name in fields["model"]:
        MODELS[family](f"{field}.model", name)
    same = {key: fields[key] for key in ("family", "launcher", "device", "seed")}
    arms = tuple(Arm(pool=pool) for pool in POOL_MODES if pool in fields["pool"])
    if fields.get("replicate"):
        if arms[0].pool != "static":
            raise InputError(f"{field}.replicate", True, "the pool static among the cell's, it is what is repeated")
        arms = (arms[0], Arm(pool="static", label="replicate"), *arms[1:])
    more = {key: fields[key] for key in ("blocks", "priority", "memory_gib") if key in fields}
    cells = []
    for point in itertools.product(*(fields[key] for key in AXES)):
        cell = Cell(workload=workload, **same, **dict(zip(AXES, point, strict=True)))
        cells.append(PlannedCell(cell=cell, arms=arms, timeout_s=fields["timeout_s"], **more))
    return cells


def with_plant(plan: Plan, fault: str) -> Plan:
    """`plan` with one arm more: the unified pool with `fault` in it, in the first engine cell of both pools.

    A draft's fault goes into the first of them that has such a draft.
    """
    if fault not in ENGINE_FAULTS:
        raise UnknownNameError("plant", fault, ENGINE_FAULTS)
    planned: list[PlannedCell] = list(plan.cells)
    for index, cell in enumerate(planned):
        workload = cell.cell.workload
        fits = fault not in OF_BLOCK_DRAFTS or (isinstance(workload, Workload) and workload.speculation in BLOCK_DRAFTS)
        if cell.cell.family == "engine" and fits and {arm.pool for arm in cell.arms} >= {"static", "unified"}:
            arms = (*cell.arms, Arm(pool="unified", plants=(fault,)))
            planned[index] = replace(cell, arms=arms)
            return Plan(name=plan.name, cells=tuple(planned))
    drafting = f" and speculation {' or '.join(BLOCK_DRAFTS)}" if fault in OF_BLOCK_DRAFTS else ""
    raise InputError("plant", fault, f"a matrix with an engine cell of both pools, static and unified{drafting}")


def cell_text(cell: Cell) -> str:
    """`cell` in words, for messages and progress."""
    graph = "graph" if cell.graph else "eager"
    parts = (Path(cell.model).name, cell.backend, cell.launcher, cell.device, cell.dtype)
    return "/".join((*parts, f"page{cell.page_size}", graph, cell.workload.name))
