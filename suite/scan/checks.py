"""Holds one parsed file against the rules that its path does not own."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from suite.scan.names import Names, last
from suite.scan.rules import Rule, RuleSet
from suite.scan.scopes import Scope, read_scopes

# functions that reach an attribute by its name: which of their arguments are names, and which the object
ACCESSORS: dict[str, tuple[slice, int | None]] = {
    **dict.fromkeys(("getattr", "hasattr", "setattr", "delattr", "getattr_static"), (slice(1, 2), 0)),
    **dict.fromkeys(("__getattribute__", "__getattr__", "__setattr__", "__delattr__"), (slice(2), None)),
    "attrgetter": (slice(None), None),
    "methodcaller": (slice(1), None),
}
IMPORTERS = ("import_module", "__import__", "importorskip", "resolve_name")
CLASS_QUESTIONS = ("isinstance", "issubclass", "type")  # probes that name a class


@dataclass(frozen=True, order=True)
class Hit:
    """One line of one file that breaks one rule; `what` names the thing that was found there."""

    line: int
    rule: str
    what: str
    message: str


def check_file(tree: ast.Module, path: str, rules: RuleSet) -> list[Hit]:
    """Everything that `tree`, the source at `path` relative to the root, does outside the owners, once per line."""
    active = [rule for rule in rules.rules if not rule.owned_by(path)]
    if not active:
        return []
    check = _FileCheck(path, active)
    return sorted({hit for node, scope in read_scopes(tree) for hit in check.hits(node, scope)})


class _FileCheck:
    def __init__(self, path: str, active: list[Rule]) -> None:
        self.path, self.names = PurePosixPath(path), Names()
        self.uses = [rule for rule in active if rule.kind in ("use", "call")]
        self.probes = [rule for rule in active if rule.kind == "probe"]
        self.imports = [rule for rule in active if rule.kind == "import"]
        self.module_words = {last(glob) for rule in self.imports for glob in rule.modules.globs}
        self._called: set[int] = set()  # attributes and names that are called, by id: a call comes before its function

    def hits(self, node: ast.AST, scope: Scope) -> Iterator[Hit]:
        match node:
            case ast.Call():
                yield from self._call(node, scope)
            case ast.Attribute(value=value, attr=attr):
                yield from self._access(node, {attr}, value, scope, called=id(node) in self._called)
                if attr == "__class__":
                    yield from self._probe(node, {"type"}, value, None, scope)
                if attr in self.module_words:
                    yield from self._modules(node, self._imported(value, attr, scope))
            case ast.Subscript(value=value, slice=key):
                if (owner := self._namespace(value, scope)) is not None:
                    yield from self._access(node, self.names.constants(key, scope), owner, scope, called=True)
            case ast.Import(names=aliases):
                yield from self._modules(node, [{alias.name} for alias in aliases])
            case ast.ImportFrom():
                yield from self._import_from(node)
            case ast.Compare(left=left, comparators=others):
                if any(self._asks_type(side, scope) for side in (left, *others)):
                    sides = ast.Tuple([left, *others], ast.Load())
                    yield from self._probe(node, {"type"}, None, sides, scope)
            case ast.MatchClass(cls=cls, kwd_attrs=attrs):
                yield from self._access(node, set(attrs), cls, scope, called=False)
                yield from self._probe(node, {"isinstance"}, None, cls, scope)

    # -- calls -----------------------------------------------------------------------------------

    def _call(self, node: ast.Call, scope: Scope) -> Iterator[Hit]:
        self._called.add(id(node.func))
        functions = self.names.dotted(node.func, scope)
        short = {last(name) for name in functions}
        if not isinstance(node.func, ast.Attribute):
            yield from self._named_call(node, functions)
        elif short - {node.func.attr}:  # `self.f = pool.write` and then `self.f()`
            yield from self._named_call(node, {name for name in functions if last(name) != node.func.attr})
        for function in short & ACCESSORS.keys():
            which, at = ACCESSORS[function]
            given = node.args[which] or node.args  # fewer than it takes: the object is in a partial
            texts = {text for arg in given for text in self.names.constants(arg, scope)}
            parts = {part for text in texts for part in text.split(".")}
            yield from self._access(node, parts, _at(node.args, at), scope, called=True)
        if node.args:
            yield from self._probe(node, short, node.args[0], _at(node.args, 1), scope)
            if short & set(IMPORTERS):
                yield from self._modules(node, self._dynamic(node, scope))
        if (owner := self._namespace_get(node, scope)) is not None:
            yield from self._access(node, self.names.constants(node.args[0], scope), owner, scope, called=True)

    def _named_call(self, node: ast.Call, functions: set[str]) -> Iterator[Hit]:
        """A call of a bare name or of whatever else evaluates to a function."""
        for function in functions:
            owner, _, name = function.rpartition(".")
            for rule in self.uses:
                if rule.names.match(name) and (not rule.receivers or rule.receivers.match(last(owner))):
                    yield self._hit(node, rule, name)

    def _access(
        self, node: ast.AST, names: Iterable[str], owner: ast.expr | None, scope: Scope, *, called: bool
    ) -> Iterator[Hit]:
        for name in names:
            for rule in self.uses:
                if not rule.names.match(name) or (rule.kind == "call" and not called):
                    continue
                if not rule.receivers or (owner is not None and self._goes_by(rule, owner, scope)):
                    yield self._hit(node, rule, name)

    def _goes_by(self, rule: Rule, owner: ast.expr, scope: Scope) -> bool:
        return any(rule.receivers.match(term) for term in self.names.terms(owner, scope))

    # -- probes ----------------------------------------------------------------------------------

    def _probe(
        self, node: ast.AST, functions: set[str], subject: ast.expr | None, cls: ast.expr | None, scope: Scope
    ) -> Iterator[Hit]:
        for rule in self.probes:
            for function in functions:
                if not rule.probes.match(function):
                    continue
                asked = self.names.terms(subject, scope) if subject is not None else set()
                named = self.names.terms(cls, scope) if cls is not None and function in CLASS_QUESTIONS else set()
                found = {term for term in asked if rule.receivers.match(term)}
                found |= {term for term in named if rule.classes.match(term)}
                if found:
                    yield self._hit(node, rule, f"{function}({', '.join(sorted(found))})")

    def _asks_type(self, node: ast.expr, scope: Scope) -> bool:
        match node:
            case ast.Attribute(attr="__class__"):
                return True
            case ast.Call(func=func):
                return "builtins.type" in self.names.dotted(func, scope)
        return False

    # -- imports ---------------------------------------------------------------------------------

    def _import_from(self, node: ast.ImportFrom) -> Iterator[Hit]:
        for base in self._absolute("." * node.level + (node.module or "")):
            yield from self._modules(node, [{base, f"{base}.{alias.name}"} for alias in node.names])
        for alias in node.names:
            for rule in self.uses:
                meant = not rule.receivers or rule.receivers.match(last(node.module or ""))
                if rule.kind == "use" and meant and rule.names.match(alias.name):
                    yield self._hit(node, rule, alias.name)

    def _imported(self, value: ast.expr, attr: str, scope: Scope) -> list[set[str]]:
        """`ops.read_table` after `from suite.kernels import ops`: modules that an attribute of an import reaches."""
        owners = {name for name in self.names.dotted(value, scope) if name[:2] not in ("?.", "*.")}
        return [{f"{owner}.{attr}"} for dots in owners for owner in self._absolute(dots)]

    def _dynamic(self, node: ast.Call, scope: Scope) -> list[set[str]]:
        texts = self.names.constants(node.args[0], scope)
        package = {text for arg in node.args[1:] for text in self.names.constants(arg, scope)}
        package |= {text for word in node.keywords for text in self.names.constants(word.value, scope)}
        found = [module for text in texts for module in self._absolute(text.replace(":", "."))]
        for base in package:
            for text in texts:
                if level := len(text) - len(text.lstrip(".")):
                    parts = base.split(".")
                    found.append(".".join([*parts[: len(parts) - level + 1], text[level:]]))
        return [{module} for module in found]

    def _modules(self, node: ast.AST, groups: Iterable[set[str]]) -> Iterator[Hit]:
        """One hit per rule and group: a group holds the names of one import, the module's and what is taken of it."""
        for group in groups:
            for rule in self.imports:
                if found := sorted((name for name in group if rule.modules.match_module(name)), key=len):
                    yield self._hit(node, rule, found[0])

    def _absolute(self, name: str) -> list[str]:
        """An imported name without leading dots: those are resolved from every folder that a package may start in."""
        level = len(name) - len(name.lstrip("."))
        if not level:
            return [name]
        folders = self.path.parts[: len(self.path.parts) - level]
        tops = {glob.partition(".")[0] for rule in self.imports for glob in rule.modules.globs}
        start = next((number for number, folder in enumerate(folders) if folder in tops), 0)
        return [".".join([*folders[start:], *filter(None, [name[level:]])])]

    # -- inside ----------------------------------------------------------------------------------

    def _namespace(self, node: ast.expr, scope: Scope) -> ast.expr | None:
        """x in `x.__dict__` and `vars(x)`."""
        match node:
            case ast.Attribute(value=owner, attr="__dict__"):
                return owner
            case ast.Call(func=func, args=[owner]) if "builtins.vars" in self.names.dotted(func, scope):
                return owner
        return None

    def _namespace_get(self, node: ast.Call, scope: Scope) -> ast.expr | None:
        """x in `x.__dict__.get(name)` and `vars(x).get(name)`."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "__getitem__") and node.args:
            return self._namespace(node.func.value, scope)
        return None

    def _hit(self, node: ast.AST, rule: Rule, what: str) -> Hit:
        return Hit(line=node.lineno, rule=rule.id, what=what, message=f"{what}: {rule.message}")  # type: ignore[attr-defined]


def _at(args: list[ast.expr], index: int | None) -> ast.expr | None:
    return args[index] if index is not None and index < len(args) else None
