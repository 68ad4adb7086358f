"""The pages tell the truth: commands parse, links lead somewhere, fields are those of the code, help is current."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from suite import cli_docs
from suite.e2e.gate.policy import load_policy
from suite.e2e.matrix.plan import (
    CELL_FIELDS,
    KERNEL_WORKLOAD_FIELDS,
    OPTIONAL_CELL_FIELDS,
    OPTIONAL_WORKLOAD_FIELDS,
    WORKLOAD_FIELDS,
    load_plan,
    parse_plan,
)
from suite.kernels.linear import LINEAR_BACKENDS
from suite.kernels.shapes import SHAPES, STATE_SHAPES
from suite.models.languages import LANGUAGES
from suite.models.registry import ENTRIES, shipped_models
from suite.records import KERNEL_OPS, LAUNCHERS, POOL_MODES, SPECULATIONS
from tests.db_support import postgres

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WRITTEN = [page for page in PAGES if page.name not in ("cli.md", "faults.md")]  # by people
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def name_of(page):
    return page.name


def commands_of(text):
    """Every `kvproof ...` of a page: command lines of its fenced blocks, and those between backticks."""
    found = []
    for _, block in FENCE.findall(text):
        for line in block.splitlines():
            part = re.split(r"\s{2,}(?=[^-\s])|\s+#|\s\|\||\s>>|\s&&", line.strip())[0]
            if match := re.search(r"(?:^|/|\$|\s)kvproof (.+)$", part):
                found.append(match[1])
    return found + re.findall(r"`kvproof ([^`]+)`", FENCE.sub("", text))


def known_command(words):
    """The command that `words` begin with, and the words behind it. AssertionError when there is none."""
    known, path = cli_docs.commands(), ()
    while len(words) > len(path) and (*path, words[len(path)]) in known:
        path = (*path, words[len(path)])
    assert path, f"no command {words[0]}"
    return known[path], words[len(path) :]


def check_command(line):
    """AssertionError when a command line has an unknown command or option, or an option without its value."""
    words = shlex.split(re.sub(r"\[([^\]]*)\]", r"\1", line))
    command, rest = known_command(words)
    options = {name: option for option in command.params for name in getattr(option, "opts", []) if "-" in name}
    assert not getattr(command, "commands", None) or not rest, f"{line}: no such subcommand"
    arguments = 0
    while rest:
        word, *rest = rest
        if not word.startswith("-"):
            arguments += 1
            continue
        assert word in options or word == "--help", f"{line}: {command.name} has no {word}"
        if word in options and not options[word].is_flag:
            assert rest, f"{line}: {word} lacks its value"
            assert not rest[0].startswith("-"), f"{line}: {word} lacks its value"
            rest = rest[1:]
    takes = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    many = any(parameter.nargs == -1 for parameter in takes)
    assert many or arguments <= len(takes), f"{line}: too many arguments"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_every_command_line_parses(page):
    for line in commands_of(page.read_text()):
        check_command(line)


def test_the_recipes_have_command_lines_to_check():
    for name, least in (("nightly.md", 15), ("gate.md", 9), ("database.md", 6)):
        assert len(commands_of((ROOT / "docs" / name).read_text())) >= least
    assert len(commands_of((ROOT / "README.md").read_text())) >= 10


@pytest.mark.parametrize(
    "line", ["rum matrices/demo.toml", "run M.toml --budgets 3", "run M.toml --budget", "db merges a.db", "show A B"]
)
def test_a_wrong_command_line_is_seen(line):
    with pytest.raises(AssertionError):
        check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page):
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_every_file_that_is_named_is_there(page):
    for path in re.findall(r"(?<![\w/.-])((?:matrices|gates|suite|db|docs|tests|docker)/[\w./-]*\w)", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for module in re.findall(r"python -m ((?:suite|db)[\w.]*\w)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} names {module}"


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in text] == []


def test_the_page_of_commands_is_current():
    assert cli_docs.PAGE.read_text() == cli_docs.page(), "run `python -m suite.cli_docs`"


def rows_of(page, heading):
    """First and second column of the table whose first header is `heading`."""
    lines = iter((ROOT / "docs" / page).read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            break
    next(lines)
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, second = [part.strip() for part in line.split("|")[1:3]]
        rows[first.strip("`")] = second
    return rows


@pytest.mark.parametrize(
    ("heading", "known", "optional"),
    [
        ("cell field", CELL_FIELDS, OPTIONAL_CELL_FIELDS),
        ("workload field", WORKLOAD_FIELDS, OPTIONAL_WORKLOAD_FIELDS),
        ("kernel field", KERNEL_WORKLOAD_FIELDS, OPTIONAL_WORKLOAD_FIELDS),
    ],
)
def test_the_matrix_page_has_every_field_and_no_other(heading, known, optional):
    rows = rows_of("matrix.md", heading)
    assert set(rows) == set(known)
    if heading == "cell field":
        assert {name for name, told in rows.items() if told.startswith("optional")} == set(optional)
    else:
        assert {name for name, told in rows.items() if told != "required"} == set(known) & set(optional)


def test_the_matrix_page_has_every_name_a_field_takes():
    text = (ROOT / "docs" / "matrix.md").read_text()
    for names in (SPECULATIONS, KERNEL_OPS, LAUNCHERS, POOL_MODES, LANGUAGES, SHAPES, STATE_SHAPES, LINEAR_BACKENDS):
        assert [name for name in names if f"`{name}`" not in text] == []


def test_the_models_page_has_every_architecture_and_checkpoint():
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in (*shipped_models(), *LANGUAGES) if f"`{name}`" not in text] == []
    told = [name for name in ENTRIES if not name.endswith("ForConditionalGeneration")]
    assert [name for name in told if f"`{name}`" not in text] == []


def test_the_database_page_has_every_table_and_invariant():
    from db.invariants import CHECKS
    from db.models import Base

    text = (ROOT / "docs" / "database.md").read_text()
    assert [name for name in Base.metadata.tables if f"`{name}`" not in text] == []
    assert [name for name in CHECKS if f"* {name}\n" not in text] == []


def blocks_of(page, language):
    return [block for kind, block in FENCE.findall((ROOT / "docs" / page).read_text()) if kind == language]


def test_the_matrix_pages_example_plans():
    import tomllib

    example, rules = blocks_of("matrix.md", "toml")
    plan = parse_plan(tomllib.loads(example))
    assert len(plan.cells) == 4
    with pytest.raises(Exception, match="exclude"):  # its rules are of another matrix, and read as rules
        parse_plan(tomllib.loads(example + rules))


@pytest.mark.parametrize("path", sorted((ROOT / "gates").glob("*.toml")), ids=name_of)
def test_every_shipped_policy_loads_and_is_told_of(path):
    assert load_policy(path).cells
    assert f"gates/{path.name}" in (ROOT / "docs" / "gate.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "matrices").glob("*.toml")), ids=name_of)
def test_every_shipped_matrix_loads_and_is_told_of(path):
    assert load_plan(path).cells
    assert f"matrices/{path.name}" in (ROOT / "docs" / "matrix.md").read_text()


def run_the_database_pages_queries(db):
    import sqlalchemy as sa

    from db.session import open_db

    queries = blocks_of("database.md", "sql")
    assert len(queries) == 3
    engine = open_db(db)
    with engine.connect() as connection:
        for query in queries:
            connection.execute(sa.text(query))
    engine.dispose()


def test_the_database_pages_queries_run_on_sqlite(tmp_path):
    run_the_database_pages_queries(tmp_path / "results.db")


def test_the_database_pages_queries_run_on_postgresql():
    with postgres() as url:
        run_the_database_pages_queries(url)


@pytest.mark.parametrize("page", ["gate.md", "nightly.md"])
def test_every_pipeline_is_yaml(page):
    import yaml

    for block in blocks_of(page, "yaml"):
        assert yaml.safe_load(block)


NIGHT = """#!/bin/sh
echo "$1 $2" >> calls
case $1 in
    run) exit $RUN ;;
    resume) exit $RESUME ;;
    gate) exit $GATE ;;
    db) exit $CHECK ;;
esac
"""


@pytest.mark.parametrize(
    ("left", "codes", "calls", "ends", "leaves"),
    [
        (False, {}, "run gate db", 0, False),
        (False, {"RUN": "1", "GATE": "1"}, "run gate db", 1, False),
        (False, {"GATE": "2"}, "run gate db", 2, False),
        (False, {"RUN": "130"}, "run", 130, True),
        (True, {}, "resume gate db", 0, False),
        (True, {"RESUME": "130"}, "resume", 130, True),
        (True, {"RESUME": "4"}, "resume run gate db", 0, False),
        (False, {"RUN": "4"}, "run", 4, False),
        (False, {"CHECK": "1"}, "run gate db", 3, False),
    ],
)
def test_the_nightly_script_resumes_what_was_killed(tmp_path, left, codes, calls, ends, leaves):
    script = tmp_path / "night.sh"
    script.write_text(blocks_of("nightly.md", "sh")[0])
    command = tmp_path / ".venv" / "bin" / "kvproof"
    command.parent.mkdir(parents=True)
    command.write_text(NIGHT)
    command.chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    if left:
        (out / "unfinished").touch()
    environment = {"PATH": "/usr/bin:/bin", **dict.fromkeys(("RUN", "RESUME", "GATE", "CHECK"), "0"), **codes}
    done = subprocess.run(["sh", str(script), str(out)], env=environment, check=False)
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == calls.split()
    assert (done.returncode, (out / "unfinished").exists()) == (ends, leaves)
