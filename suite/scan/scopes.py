"""The scopes of one source file and what each name in them is bound to, in any order."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["value", "each", "grown", "import", "class", "other"]
Node = tuple[ast.AST, "Scope"]


@dataclass(eq=False, slots=True)
class Binding:
    """One way in which a name comes to be.

    "value": it is `expr`; "each": an element of `expr`; "grown": what `earlier` made it, plus `expr`; "import": the
    dotted name `value`; "class": the class whose scope is `inside`; "other": a parameter, a function, whatever
    cannot be followed.
    """

    kind: Kind
    scope: "Scope"
    expr: ast.expr | None = None
    value: str = ""
    annotation: ast.expr | None = None
    inside: "Scope | None" = None
    earlier: "tuple[Binding, ...]" = ()


@dataclass(eq=False, slots=True)
class Scope:
    """A module, class or function. `attributes`: what a class's methods bind as `self.NAME`."""

    parent: "Scope | None" = None
    is_class: bool = False
    has_star_import: bool = False
    bound: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, "Scope"] = field(default_factory=dict)  # `global` and `nonlocal` names

    def child(self, *, is_class: bool = False) -> "Scope":
        return Scope(self, is_class)

    def bind(self, name: str, binding: Binding) -> None:
        self.elsewhere.get(name, self).bound.setdefault(name, []).append(binding)

    def find(self, name: str) -> list[Binding]:
        """What `name` may be here: the bindings of the innermost scope that binds it, a class's only from inside it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bound and (scope is self or not scope.is_class):
                return scope.bound[name]
            scope = scope.parent
        return []

    @property
    def class_around(self) -> "Scope | None":
        scope: Scope | None = self
        while scope is not None and not scope.is_class:
            scope = scope.parent
        return scope

    @property
    def module(self) -> "Scope":
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


INTERESTING = frozenset(
    {ast.Attribute, ast.Call, ast.Compare, ast.Subscript, ast.Import, ast.ImportFrom, ast.MatchClass}
)


# what holds no expression that a rule may look at; skipped for speed
LEAVES = frozenset(
    [type(None), str, int, bool, ast.Name, ast.Constant, ast.alias, ast.Pass, ast.Break, ast.Continue]
    + [
        kind
        for base in (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)
        for kind in base.__subclasses__()
    ]
)


def read_scopes(tree: ast.Module) -> list[Node]:
    """Every node that a rule may look at, with the scope it stands in. Bindings are complete when this returns."""
    found: list[Node] = []
    stack: list[Node] = [(tree, Scope())]
    while stack:  # no recursion: sources may nest deeper than Python's stack
        node, scope = stack.pop()
        kind = type(node)
        if kind in LEAVES:
            continue
        if kind in INTERESTING:
            found.append((node, scope))
        handler = HANDLERS.get(kind)
        inside = handler(node, scope) if handler else children(node, scope)  # type: ignore[operator]
        inside.reverse()
        stack.extend(inside)
    return found


def children(node: ast.AST, scope: Scope) -> list[Node]:
    """The children of `node` in the order of the source, all in its scope."""
    found: list[Node] = []
    for name in node._fields:
        value = getattr(node, name)
        if type(value) is list:
            found += [(each, scope) for each in value if type(each) not in LEAVES]
        elif type(value) not in LEAVES:
            found.append((value, scope))
    return found


# -- what binds ------------------------------------------------------------------------------------


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope) -> list[Node]:
    inner = scope.child()
    if not isinstance(node, ast.Lambda):
        scope.bind(node.name, Binding("other", scope))
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults: dict[str, ast.expr | None] = dict(
        zip((one.arg for one in plain[len(plain) - len(given.defaults) :]), given.defaults, strict=True)
    )
    defaults |= {one.arg: value for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
    for one in [*plain, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]:
        default = defaults.get(one.arg)
        inner.bind(one.arg, Binding("value" if default else "other", scope, default, annotation=one.annotation))
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return [*((child, scope) for child in decorators), (given, scope), *((child, inner) for child in body)]


def _class(node: ast.ClassDef, scope: Scope) -> list[Node]:
    inner = scope.child(is_class=True)
    scope.bind(node.name, Binding("class", scope, inside=inner))
    outside = [*node.decorator_list, *node.bases, *node.keywords]
    return [*((child, scope) for child in outside), *((child, inner) for child in node.body)]


def _import(node: ast.Import, scope: Scope) -> list[Node]:
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        scope.bind(alias.asname or name, Binding("import", scope, value=name))
    return []


def _import_from(node: ast.ImportFrom, scope: Scope) -> list[Node]:
    base = "." * node.level + (node.module or "")
    for alias in node.names:
        if alias.name == "*":
            scope.module.has_star_import = True
        scope.bind(alias.asname or alias.name, Binding("import", scope, value=f"{base}.{alias.name}"))
    return []


def _assign(node: ast.Assign | ast.AnnAssign | ast.NamedExpr, scope: Scope) -> list[Node]:
    annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        _bind_target(target, node.value, scope, annotation)
    return children(node, scope)


def _aug_assign(node: ast.AugAssign, scope: Scope) -> list[Node]:
    if isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add):
        earlier = tuple(scope.find(node.target.id))
        scope.bind(node.target.id, Binding("grown", scope, node.value, earlier=earlier))
    return [(node.target, scope), (node.value, scope)]


def _loop(node: ast.For | ast.AsyncFor | ast.comprehension, scope: Scope) -> list[Node]:
    if isinstance(node.target, ast.Name):
        scope.bind(node.target.id, Binding("each", scope, node.iter))
    else:
        _bind_target(node.target, None, scope)
    return children(node, scope)


def _with(node: ast.withitem, scope: Scope) -> list[Node]:
    if node.optional_vars is not None:
        _bind_target(node.optional_vars, node.context_expr, scope)
    return children(node, scope)


def _elsewhere(node: ast.Global | ast.Nonlocal, scope: Scope) -> list[Node]:
    for name in node.names:
        outer = scope.module
        if isinstance(node, ast.Nonlocal):
            outer = next((each for each in _around(scope) if name in each.bound), scope)
        scope.elsewhere[name] = outer
    return []


def _capture(node: ast.MatchAs | ast.MatchStar | ast.ExceptHandler, scope: Scope) -> list[Node]:
    if node.name is not None:
        scope.bind(node.name, Binding("other", scope))
    return children(node, scope)


def _around(scope: Scope) -> Iterator[Scope]:
    outer = scope.parent
    while outer is not None:
        yield outer
        outer = outer.parent


def _bind_target(target: ast.expr, value: ast.expr | None, scope: Scope, annotation: ast.expr | None = None) -> None:
    """Bind every name in `target`; a tuple that is unpacked from a tuple of its length, element by element."""
    match target:
        case ast.Name(id=name):
            scope.bind(name, Binding("value" if value else "other", scope, value, annotation=annotation))
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=attr) if inside := scope.class_around:
            binding = Binding("value" if value else "other", scope, value, annotation=annotation)
            inside.attributes.setdefault(attr, []).append(binding)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            sources: list[ast.expr | None] = [None] * len(parts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
                sources = list(value.elts)
            for part, source in zip(parts, sources, strict=True):
                _bind_target(part, source, scope)
        case ast.Starred(value=inner):
            _bind_target(inner, None, scope)


HANDLERS = {
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.Lambda: _function,
    ast.ClassDef: _class,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Assign: _assign,
    ast.AnnAssign: _assign,
    ast.NamedExpr: _assign,
    ast.AugAssign: _aug_assign,
    ast.For: _loop,
    ast.AsyncFor: _loop,
    ast.comprehension: _loop,
    ast.withitem: _with,
    ast.Global: _elsewhere,
    ast.Nonlocal: _elsewhere,
    ast.MatchAs: _capture,
    ast.MatchStar: _capture,
    ast.ExceptHandler: _capture,
}
