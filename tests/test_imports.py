"""Arrows between the rooms point one way, and what must start fast loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# what each room may import of ours, itself apart; the longest matching name is a module's room
LEAVES = {"suite.errors", "suite.records"}
KERNELS = {*LEAVES, "suite.measure"}
MODELS = {*KERNELS, "suite.kernels"}
ENGINE = {*MODELS, "suite.models"}
ACCURACY = {*ENGINE, "suite.e2e.engine"}
MATRIX = {*ACCURACY, "suite.e2e.accuracy", "suite.e2e.faults", "suite.provenance", "db"}
CLI = {"suite.cli_db", "suite.cli_faults", "suite.cli_gate", "suite.cli_options"}
CLI |= {"suite.e2e.matrix", "suite.e2e.report", "suite.e2e.gate"}
ROOMS: dict[str, set[str]] = {
    "suite.errors": set(),
    "suite.records": {"suite.errors"},
    "suite.provenance": LEAVES,
    "suite.kernels": KERNELS,
    "suite.models": MODELS,
    "suite.e2e.engine": ENGINE,
    "suite.e2e.accuracy": ACCURACY,
    "suite.e2e.faults": ACCURACY,
    "suite.e2e.faults.child": LEAVES,
    "suite.e2e.faults.detection": {*MATRIX, "suite.e2e.matrix", "suite.e2e.gate", "suite.scan", "suite.measure"},
    "suite.e2e.matrix": MATRIX,
    "suite.e2e.report": {*LEAVES, "db"},
    "suite.e2e.report.doctor": {*LEAVES, "suite.kernels"},
    "suite.cli": {*MATRIX, *CLI, "suite.e2e.report.doctor", "suite.scan"},
    "suite.cli_db": {*LEAVES, *CLI, "db"},
    "suite.cli_faults": {
        *LEAVES,
        "suite.cli_options",
        "suite.e2e.faults",
        "suite.e2e.faults.child",
        "suite.provenance",
        "db",
    },
    "suite.cli_gate": {*LEAVES, *CLI, "db"},
    "suite.cli_docs": {*LEAVES, "suite.cli"},
    "suite.e2e.gate": {*LEAVES, "db", "suite.e2e.faults.child"},
    "suite.cli_options": {*LEAVES, *CLI, "db"},
    "suite.measure": LEAVES,
    "suite.scan": LEAVES,
    "db": {*LEAVES, "suite.provenance"},
}
HEAVY = ("torch", "triton", "lm_eval", "transformers", "numba", "pandas", "ray")


def modules():
    """Every module of ours: dotted name -> file."""
    files = [*(ROOT / "suite").rglob("*.py"), *(ROOT / "db").rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def room_of(module):
    """The room a dotted name is in; None for packages that only hold rooms and for what is not ours."""
    inside = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    return max(inside, key=len, default=None)


def imports(file, package):
    """Every dotted name that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).strip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_arrows(module, file):
    room = room_of(module)
    if room is None:
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for name in imports(file, package):
        target = room_of(name)
        if target is not None and target != room and target not in ROOMS[room] and not target.startswith(room + "."):
            yield f"{module} imports {name}: {room} may not use {target}"


def test_every_module_is_in_a_room():
    outside = [m for m, file in modules().items() if room_of(m) is None and file.read_text().strip()]
    assert outside == []


def test_the_arrows_point_one_way():
    assert [arrow for module, file in modules().items() for arrow in wrong_arrows(module, file)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("suite.kernels.x", "import suite.models.loader"),
        ("suite.kernels.x", "from suite.models import loader"),
        ("suite.kernels.x", "def f():\n    from suite.e2e.engine.engine import Engine"),
        ("suite.models.x", "from suite.e2e.engine import engine"),
        ("suite.models.x", "from ..e2e.engine import engine"),
        ("suite.e2e.engine.x", "from suite.e2e.accuracy.lm import evaluate_tasks"),
        ("suite.e2e.accuracy.x", "from suite.e2e.matrix import run"),
        ("suite.e2e.matrix.x", "from suite import cli"),
        ("suite.e2e.report.x", "from suite.e2e.matrix.run import run_plan"),
        ("db.x", "from suite.e2e.matrix.plan import Plan"),
        ("db.x", "from suite.kernels import ids"),
        ("suite.records", "from suite import provenance"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path, module, line):
    file = tmp_path / "x.py"
    file.write_text(line)
    assert list(wrong_arrows(module, file))


def test_db_never_names_a_heavy_library():
    for module, file in modules().items():
        if room_of(module) == "db":
            names = {name.partition(".")[0] for name in imports(file, module)}
            assert not names & {*HEAVY, "numpy"}, module


LIGHT = [
    "import db.models, db.session, db.store, db.queries",
    "import suite.e2e.matrix.plan, suite.e2e.matrix.run, suite.e2e.matrix.executors, suite.e2e.matrix.cell",
    "import suite.e2e.report.tables, suite.e2e.report.progress, suite.e2e.report.demo",
    "import suite.e2e.gate.decide, suite.e2e.gate.service, suite.e2e.gate.emit, db.gate_reader, db.decisions",
    "import suite.kernels.attention.support, suite.models.registry, suite.e2e.faults, suite.provenance",
    "import suite.kernels.attention.support_page",
    "import suite.cli; suite.cli.invoke(['scan', 'suite/scan'])",
    "import suite.cli; suite.cli.invoke(['--help'])",
    "import suite.cli; suite.cli.invoke(['run', '--help'])",
]


@pytest.mark.parametrize("statement", LIGHT)
def test_nothing_heavy_is_loaded(statement):
    code = f"{statement}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_loads_no_database_either():
    code = "import suite.cli, sys\nsuite.cli.invoke(['--help'])\nprint([n for n in ('sqlalchemy', 'numpy')"
    code += " if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
