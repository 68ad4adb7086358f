"""Rules are read strictly: every mistake in a TOML file is one error that names its dotted key."""

import copy
import tomllib

import pytest

from suite.errors import InputError, UnknownNameError
from suite.scan.rules import KINDS, PRESETS, load_rules, parse_rules, path_regex, presets

USE = {"id": "a", "kind": "use", "names": ["f"], "owners": ["own.py"], "message": "not here"}
GOOD = {
    "exclude": ["gen/**"],
    "rules": [
        USE,
        {"id": "b", "kind": "call", "names": ["F"], "receivers": ["m"], "message": "no"},
        {"id": "c", "kind": "probe", "probes": ["hasattr"], "classes": ["A*"], "message": "no"},
        {"id": "d", "kind": "import", "modules": ["torch"], "message": "no"},
    ],
}


def change(path: str, value: object) -> dict:
    """GOOD with one value changed; ... removes it."""
    table = copy.deepcopy(GOOD)
    *way, key = [int(part) if part.isdigit() else part for part in path.split(".")]
    at = table
    for part in way:
        at = at[part]
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return table


def test_a_good_file_is_read():
    rules = parse_rules("mine", GOOD)
    assert [rule.id for rule in rules.rules] == ["a", "b", "c", "d"]
    assert {rule.kind for rule in rules.rules} == set(KINDS)
    assert rules.excludes("gen/deep/x.py")
    assert not rules.excludes("x.py")
    assert rules.rules[0].owned_by("own.py")
    assert not rules.rules[1].owned_by("own.py")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("rules", ..., "rules"),
        ("rules", [], "rules"),
        ("rules", {"id": "a"}, "rules"),
        ("rules.1", "text", "rules[1]"),
        ("ruls", [], "ruls"),
        ("exclude", "gen", "exclude"),
        ("exclude", [1], "exclude[0]"),
        ("rules.0.kind", ..., "rules[0].kind"),
        ("rules.0.kind", "uses", "rules[0].kind"),
        ("rules.0.kind", ["use"], "rules[0].kind"),
        ("rules.0.nmaes", ["f"], "rules[0].nmaes"),
        ("rules.0.modules", ["m"], "rules[0].modules"),
        ("rules.3.receivers", ["m"], "rules[3].receivers"),
        ("rules.0.id", ..., "rules[0].id"),
        ("rules.0.id", "", "rules[0].id"),
        ("rules.0.id", "two words", "rules[0].id"),
        ("rules.1.id", "a", "rules[1].id"),
        ("rules.0.message", ..., "rules[0].message"),
        ("rules.0.message", "two\nlines", "rules[0].message"),
        ("rules.0.message", 3, "rules[0].message"),
        ("rules.0.owners", "own.py", "rules[0].owners"),
        ("rules.0.owners", ["own.py", ""], "rules[0].owners[1]"),
        ("rules.0.names", ..., "rules[0].names"),
        ("rules.0.names", [], "rules[0].names"),
        ("rules.0.names", ["f", 1], "rules[0].names[1]"),
        ("rules.3.modules", ..., "rules[3].modules"),
        ("rules.2.probes", ..., "rules[2].probes"),
        ("rules.2.classes", ..., "rules[2].receivers"),
    ],
)
def test_a_mistake_is_named_by_its_dotted_key(path, value, field):
    with pytest.raises(InputError) as error:
        parse_rules("mine", change(path, value))
    assert error.value.field == field


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match=r"rules\[0\].nmaes: .*did you mean 'names'"):
        parse_rules("mine", change("rules.0.nmaes", ["f"]))
    with pytest.raises(UnknownNameError, match="did you mean 'import'"):
        parse_rules("mine", change("rules.0.kind", "imprt"))
    with pytest.raises(UnknownNameError, match=r"rules: got 'sglnag'.*a TOML file.*did you mean 'sglang'"):
        load_rules("sglnag")


def test_presets_are_files_that_read(tmp_path):
    assert presets() == ("kvproof", "sglang")
    for name in presets():
        rules = load_rules(name)
        assert rules.name == name
        assert all(rule.owners for rule in rules.rules)
        assert tomllib.loads((PRESETS / f"{name}.toml").read_text())["rules"]
    copied = tmp_path / "mine.toml"
    copied.write_bytes((PRESETS / "kvproof.toml").read_bytes())
    assert [rule.id for rule in load_rules(str(copied)).rules] == [rule.id for rule in load_rules("kvproof").rules]


@pytest.mark.parametrize(("text", "said"), [("x = [", "valid TOML"), ("\xff", "valid TOML"), (None, "readable TOML")])
def test_a_file_that_is_no_toml(tmp_path, text, said):
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=f"rules: got .*mine.toml.*{said}"):
        load_rules(str(file))


@pytest.mark.parametrize(
    ("glob", "inside", "outside"),
    [
        ("a/*.py", ["a/x.py"], ["a/b/x.py", "x.py", "b/a/x.py"]),
        ("a/**", ["a/x.py", "a/b/x.py"], ["a.py", "ab/x.py"]),
        ("**/a/*.py", ["a/x.py", "b/c/a/x.py"], ["ba/x.py"]),
        ("a/**/x.py", ["a/x.py", "a/b/c/x.py"], ["a/bx.py"]),
        ("a?.py", ["ab.py"], ["a.py", "a/.py"]),
        ("a+(b).py", ["a+(b).py"], ["aab.py"]),
    ],
)
def test_globs_over_paths(glob, inside, outside):
    assert all(path_regex(glob).fullmatch(path) for path in inside)
    assert not any(path_regex(glob).fullmatch(path) for path in outside)
