"""The command `kvproof scan`: our own tree is clean, findings and errors have their words and exit codes."""

import json
import time
import tomllib
from pathlib import Path

import pytest

from suite import cli
from suite.errors import InputError
from suite.scan.rules import PRESETS, load_rules, parse_rules, presets
from suite.scan.sources import root_of, scan, sources

ROOT = Path(__file__).parents[1]
KVPROOF = load_rules("kvproof")
MINE = """
exclude = ["generated/**"]
[[rules]]
id = "no-read"
kind = "use"
names = ["fill_read_table"]
owners = ["owner.py"]
message = "reads belong to owner.py"
"""
BAD_LINE = "t.fill_read_table(batch)\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder with rules, an owner, a stranger, and files that are never read."""
    files = {
        "pyproject.toml": "",
        "mine.toml": MINE,
        "owner.py": BAD_LINE,
        "pkg/stranger.py": "import os\n\n" + BAD_LINE,
        "pkg/clean.py": "# t.fill_read_table(batch)\n",
        "generated/x.py": BAD_LINE,
        ".hidden/x.py": BAD_LINE,
        "pkg/__pycache__/x.py": BAD_LINE,
        "env/pyvenv.cfg": "",
        "env/lib/x.py": BAD_LINE,
        "notes.txt": BAD_LINE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def kvproof(capsys):
    """Runs a command; gives exit code, stdout and stderr."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main(list(arguments))
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run


def test_our_own_tree_is_clean(kvproof):
    code, out, err = kvproof("scan", str(ROOT), "--rules", "kvproof")
    assert out == ""
    assert code == 0
    assert err.startswith("0 findings in ")
    assert int(err.split()[3]) > 100


def test_a_violation_in_our_own_tree_would_be_seen():
    """The clean result is no empty one: with the owners taken away, the same tree breaks every rule that has any."""
    seen = {finding["rule"] for finding in scan(ROOT, _without_owners())["findings"]}
    assert seen | {"capability-probe"} == {rule.id for rule in KVPROOF.rules}


def _without_owners():
    tables = []
    for rule in KVPROOF.rules:
        lists = {key: list(getattr(rule, key).globs) for key in ("names", "receivers", "probes", "classes", "modules")}
        lists = {key: globs for key, globs in lists.items() if globs}
        tables.append({"id": rule.id, "kind": rule.kind, "message": rule.message, **lists})
    return parse_rules("strict", {"rules": tables})


def test_findings_are_lines_and_exit_code_1(tree, kvproof):
    code, out, err = kvproof("scan", "--rules", "mine.toml")
    assert out == "pkg/stranger.py:3 no-read fill_read_table: reads belong to owner.py\n"
    assert (code, err) == (1, "1 finding in 3 files\n")


def test_findings_in_json(tree, kvproof):
    code, out, err = kvproof("scan", ".", "--rules", "mine.toml", "--json")
    message = "fill_read_table: reads belong to owner.py"
    assert json.loads(out) == [{"file": "pkg/stranger.py", "line": 3, "rule": "no-read", "message": message}]
    assert code == 1
    (tree / "pkg" / "stranger.py").unlink()
    code, out, err = kvproof("scan", "--rules", "mine.toml", "--json")
    assert (code, json.loads(out), err) == (0, [], "0 findings in 2 files\n")


def test_globs_are_relative_to_the_checkout_whatever_part_is_scanned(tree, kvproof, monkeypatch):
    assert kvproof("scan", "owner.py", "--rules", "mine.toml")[0] == 0
    assert kvproof("scan", "pkg", "--rules", "mine.toml")[1].startswith("pkg/stranger.py:3 ")
    assert kvproof("scan", str(tree / "pkg"), "--rules", "mine.toml")[1].startswith(f"{tree}/pkg/stranger.py:3 ")
    monkeypatch.chdir(tree / "pkg")
    assert kvproof("scan", "--rules", "../mine.toml")[1].startswith("stranger.py:3 ")
    assert kvproof("scan", "../owner.py", "--rules", "../mine.toml")[0] == 0
    assert root_of(tree / "pkg" / "clean.py") == tree


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "path: got 'absent'"),
        ([".", "--rules", "kvprof"], "did you mean 'kvproof'"),
        ([".", "--rules", "absent.toml"], "rules: got 'absent.toml'"),
        ([".", "--rules", "bad.toml"], "rules[0].nmaes"),
        (["broken.py"], "path: got 'broken.py:2', expected source that Python 3."),
        (["empty"], "path: got 'empty', expected a Python file, or a folder with Python sources"),
        (["null.py"], "path: got 'null.py:1', expected source that Python 3."),
        (["latin.py"], "path: got 'latin.py"),
        (["deep.py"], "parses (it nests too deep)"),
        ([".", "more"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(tree, kvproof, arguments, said):
    (tree / "bad.toml").write_text(MINE.replace("names", "nmaes"))
    (tree / "broken.py").write_text("x = 1\ndef f(:\n")
    (tree / "null.py").write_bytes(b"x = 1\0")
    (tree / "latin.py").write_bytes(b"x = '\xff'\n")
    (tree / "deep.py").write_text("x = " + "-" * 100_000 + "1")
    (tree / "empty").mkdir()
    code, out, err = kvproof("scan", *arguments)
    assert (code, out) == (4, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert said in err


def test_a_broken_file_is_never_passed_over(tree):
    (tree / "pkg" / "broken.py").write_text("def f(:\n")
    with pytest.raises(InputError, match=r"pkg/broken.py:1"):
        scan(tree, KVPROOF)


def test_what_the_scanned_sources_warn_of_is_theirs(tree):
    (tree / "pkg" / "old.py").write_text("x = '\\d'\nx is 'a'\n")
    assert scan(tree / "pkg", KVPROOF)["files"] == 3


def test_links_to_folders_are_not_followed_and_odd_names_are_read(tree):
    (tree / "pkg" / "loop").symlink_to(tree / "pkg")
    (tree / "pkg" / "with space.py").write_text(BAD_LINE)
    assert sorted(file.name for file in sources(tree / "pkg")) == ["clean.py", "stranger.py", "with space.py"]


def test_help_is_the_documentation(kvproof):
    code, out, _ = kvproof("scan", "--help")
    assert code == 0
    text = " ".join(out.split())
    for word in ("kvproof, sglang, or a TOML file", '"file", "line", "rule", "message"', "Exit code 0", "--json"):
        assert word in text
    guide = (ROOT / "docs" / "scan.md").read_text()
    for rule in KVPROOF.rules:
        assert f"`{rule.id}`" in guide


def test_a_thousand_files_take_less_than_ten_seconds(tmp_path):
    real = [file.read_bytes() for file in sorted((ROOT / "suite").rglob("*.py"))]
    for number in range(1000):
        (tmp_path / f"m{number}.py").write_bytes(real[number % len(real)])
    start = time.process_time()
    assert scan(tmp_path, KVPROOF)["files"] == 1000
    assert time.process_time() - start < 10  # of CPU, beside other work


def test_the_presets_travel_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "scan/presets/*.toml" in project["tool"]["setuptools"]["package-data"]["suite"]
    assert {f"{name}.toml" for name in presets()} == {file.name for file in PRESETS.iterdir()}
