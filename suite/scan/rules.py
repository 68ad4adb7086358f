"""Rules of the scan, from TOML: what is looked for, and which files own it.

A rule names its owners by globs on paths relative to the root of the scanned tree; `**` crosses folders.
There is no list of files that a rule is limited to: a tree whose root was guessed wrong must give
findings, not silence.
"""

import fnmatch
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from suite.errors import InputError, UnknownNameError

PRESETS = Path(__file__).parent / "presets"

# what each kind of rule looks for: the keys it needs, and those it may have
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "use": (("names",), ("receivers",)),  # any access to an attribute or imported name
    "call": (("names",), ("receivers",)),  # only calls of it
    "probe": (("probes",), ("receivers", "classes")),  # calls of these functions on such objects
    "import": (("modules",), ()),
}
COMMON = ("id", "kind", "message", "owners")
LISTS = ("owners", "names", "receivers", "probes", "classes", "modules")


class Patterns:
    """Globs over identifiers or dotted names, case-sensitive; plain names are looked up, not matched."""

    def __init__(self, globs: Iterable[str]) -> None:
        self.globs = tuple(globs)
        self._plain = {glob for glob in self.globs if not re.search(r"[*?\[]", glob)}
        rest = [fnmatch.translate(glob) for glob in self.globs if glob not in self._plain]
        self._regex = re.compile("|".join(rest)) if rest else None
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.globs)

    def match(self, name: str) -> bool:
        if (known := self._known.get(name)) is None:
            known = name in self._plain or bool(self._regex and self._regex.match(name))
            self._known[name] = known
        return known

    def match_module(self, module: str) -> bool:
        """Whether `module` or a package around it is meant."""
        parts = module.split(".")
        return any(self.match(".".join(parts[:end])) for end in range(1, len(parts) + 1))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that only its owners may do. Which patterns are empty depends on `kind`, see `KINDS`."""

    id: str
    kind: str
    message: str
    owners: tuple[str, ...]
    names: Patterns
    receivers: Patterns
    probes: Patterns
    classes: Patterns
    modules: Patterns

    def owned_by(self, path: str) -> bool:
        """Whether the file at `path`, relative to the root with forward slashes, may do it."""
        return any(path_regex(glob).fullmatch(path) for glob in self.owners)


@dataclass(frozen=True, kw_only=True)
class RuleSet:
    """All rules of one file, and the globs of files that it leaves out."""

    name: str
    rules: tuple[Rule, ...]
    exclude: tuple[str, ...]

    def excludes(self, path: str) -> bool:
        return any(path_regex(glob).fullmatch(path) for glob in self.exclude)


@cache
def path_regex(glob: str) -> re.Pattern[str]:
    """A glob over a path: `*` and `?` stay inside a folder's name, `**` crosses folders, also none."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda m: tokens.get(m[0]) or re.escape(m[0]), glob))


def presets() -> tuple[str, ...]:
    """Names of the rule sets that come with kvproof."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load_rules(name_or_path: str) -> RuleSet:
    """A preset, or the TOML file at a path; InputError naming the dotted key of the first thing wrong in it."""
    path = PRESETS / f"{name_or_path}.toml"
    if name_or_path not in presets():
        path = Path(name_or_path)
        if path.suffix != ".toml" and not path.is_file():
            raise UnknownNameError("rules", name_or_path, [*presets(), "a TOML file"])
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InputError("rules", name_or_path, f"a readable TOML file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("rules", name_or_path, f"valid TOML ({error})") from error
    return parse_rules(path.stem, table)


def parse_rules(name: str, table: dict[str, object]) -> RuleSet:
    """The rules of a parsed TOML file."""
    for key in table:
        if key not in ("rules", "exclude"):
            raise UnknownNameError(key, key, ("rules", "exclude"))
    entries = table.get("rules")
    if not isinstance(entries, list) or not entries:
        raise InputError("rules", entries, "at least one [[rules]] table")
    rules = tuple(parse_rule(f"rules[{number}]", entry) for number, entry in enumerate(entries))
    seen: dict[str, int] = {}
    for number, rule in enumerate(rules):
        if rule.id in seen:
            raise InputError(f"rules[{number}].id", rule.id, f"an id that rules[{seen[rule.id]}] does not have")
        seen[rule.id] = number
    return RuleSet(name=name, rules=rules, exclude=strings("exclude", table.get("exclude", [])))


def parse_rule(field: str, entry: object) -> Rule:
    if not isinstance(entry, dict):
        raise InputError(field, entry, "a table")
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnknownNameError(f"{field}.kind", kind, KINDS)  # type: ignore[arg-type]
    needed, optional = KINDS[kind]
    for key in entry:
        if key not in (*COMMON, *needed, *optional):
            raise UnknownNameError(f"{field}.{key}", key, (*COMMON, *needed, *optional))
    for key in ("id", "message"):
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip() or "\n" in value:
            raise InputError(f"{field}.{key}", value, "one line of text")
    if len(entry["id"].split()) != 1:
        raise InputError(f"{field}.id", entry["id"], "a word without spaces")
    lists = {key: strings(f"{field}.{key}", entry.get(key, [])) for key in LISTS}
    for key in needed:
        if not lists[key]:
            raise InputError(f"{field}.{key}", entry.get(key), "at least one name")
    if kind == "probe" and not lists["receivers"] and not lists["classes"]:
        raise InputError(f"{field}.receivers", None, "at least one name, here or in classes")
    patterns = {key: Patterns(lists[key]) for key in LISTS if key != "owners"}
    return Rule(id=entry["id"], kind=kind, message=entry["message"], owners=lists["owners"], **patterns)


def strings(field: str, value: object) -> tuple[str, ...]:
    """`value`, when it is a list of strings, none of them empty."""
    if not isinstance(value, list):
        raise InputError(field, value, "a list of strings")
    for number, entry in enumerate(value):
        if not isinstance(entry, str) or not entry:
            raise InputError(f"{field}[{number}]", entry, "a string, not empty")
    return tuple(value)
