"""What an expression may stand for, from one file's source alone.

Three questions, each answered with a set, since a name may be bound more than once and the order of
assignments is not followed: `dotted` (which import or attribute is this an alias of), `terms` (which
identifiers and annotated types name this object) and `constants` (which strings can this be).
"""

import ast
import builtins
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from suite.scan.scopes import Binding, Scope

MAX_DEPTH = 150  # of nested expressions that are followed
MAX_CONTAINERS = 3  # names of names of containers that are followed
MAX_STRINGS = 64  # values of one expression that are followed
UNKNOWN = "?"  # the object whose attribute it is; it came from somewhere else
FOLDED_METHODS = ("format", "join", "replace", "lower", "upper", "strip", "removeprefix", "removesuffix")
BUILTINS = frozenset(dir(builtins))
Question = Callable[[ast.expr, Scope, int], set[str]]


class Names:
    """Answers for the expressions of one file. What a binding means is worked out once and kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], set[str]] = {}

    def dotted(self, node: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
        """`m.f` for an imported or built-in name under whatever alias, `?.f` for the attribute f of some object."""
        if depth > MAX_DEPTH:
            return set()
        deeper = depth + 1
        match node:
            case ast.Name(id=name):
                bindings = scope.find(name)
                if not bindings:
                    module = "builtins" if name in BUILTINS else "*" if scope.module.has_star_import else ""
                    return {f"{module}.{name}"} if module else set()
                imported = {binding.value for binding in bindings if binding.kind == "import"}
                return imported | self._through(self.dotted, bindings, deeper)
            case ast.Attribute(value=value, attr=attr):
                owners = self.dotted(value, scope, deeper) or {UNKNOWN}
                aliases = self._through(self.dotted, own_attribute(node, scope), deeper)
                return {f"{owner}.{attr}" for owner in owners} | aliases
            case ast.Call(func=func, args=args):
                called = {last(name) for name in self.dotted(func, scope, deeper)}
                if "partial" in called and args:
                    return self.dotted(args[0], scope, deeper)
                if "getattr" in called and len(args) > 1:
                    return {f"{UNKNOWN}.{name}" for name in self.constants(args[1], scope, deeper)}
                if called & {"import_module", "__import__"} and args:
                    return self.constants(args[0], scope, deeper)
        return {name for part in _parts(node) for name in self.dotted(part, scope, deeper)}

    def terms(self, node: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
        """The identifiers that an object goes by: its name, those it was assigned from, its annotated types.

        For a class expression, such as the second argument of `isinstance`: the names of the classes.
        """
        if depth > MAX_DEPTH:
            return set()
        deeper = depth + 1
        match node:
            case ast.Name(id=name):
                bindings = scope.find(name)
                imported = {last(binding.value) for binding in bindings if binding.kind == "import"}
                return {name} | imported | _annotated(bindings) | self._through(self.terms, bindings, deeper)
            case ast.Attribute(attr=attr):
                bindings = own_attribute(node, scope)
                return {attr} | _annotated(bindings) | self._through(self.terms, bindings, deeper)
            case ast.Call(func=func, args=args):
                called = self.terms(func, scope, deeper)
                if "cast" in called and len(args) == 2:
                    return called | annotation_terms(args[0]) | self.terms(args[1], scope, deeper)
                if "getattr" in called and len(args) > 1:
                    return called | self.constants(args[1], scope, deeper)
                return called
        return {term for part in _parts(node) for term in self.terms(part, scope, deeper)}

    def constants(self, node: ast.expr, scope: Scope, depth: int = 0) -> set[str]:
        """The strings that `node` can be, as far as constants, operators and string methods build them."""
        if depth > MAX_DEPTH:
            return set()

        def of(part: ast.expr) -> set[str]:
            return self.constants(part, scope, depth + 1)

        match node:
            case ast.Constant(value=value):
                return {value} if isinstance(value, str) else set()
            case ast.Name(id=name):
                return self._through(self.constants, scope.find(name), depth + 1)
            case ast.Attribute():
                return self._through(self.constants, own_attribute(node, scope), depth + 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _build(lambda a, b: a + b, of(left), of(right))
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                values = right.elts if isinstance(right, ast.Tuple) else [right]
                return _build(lambda text, *parts: text % parts, of(left), *map(of, values))
            case ast.JoinedStr(values=values):
                return _build(lambda *parts: "".join(parts), *map(of, values))
            case ast.FormattedValue(value=value, format_spec=None):
                return of(value)
            case ast.Call(func=ast.Attribute(value=text, attr=method)) if method in FOLDED_METHODS:
                return _method(node, of(text), method, of)
            case ast.Call(func=ast.Name(id="str"), args=[value]):
                return of(value)
            case ast.Subscript(value=text, slice=ast.Slice() as bounds):
                cut = slice(*(_integer(part) for part in (bounds.lower, bounds.upper, bounds.step)))
                return {value[cut] for value in of(text)} if cut.step != 0 else set()
            case ast.Subscript(value=container):
                return {value for part in self.elements(container, scope) for value in of(part)}
        return {value for part in _parts(node) for value in of(part)}

    def elements(self, node: ast.expr, scope: Scope, depth: int = 0) -> list[ast.expr]:
        """What a loop over a literal container, or a name of one, binds; a mapping's keys and values alike."""
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return node.elts
        if isinstance(node, ast.Dict):
            return [*filter(None, node.keys), *node.values]
        if isinstance(node, ast.Name) and depth < MAX_CONTAINERS:
            named = [binding for binding in scope.find(node.id) if binding.kind == "value" and binding.expr]
            return [part for b in named if b.expr for part in self.elements(b.expr, b.scope, depth + 1)]
        return []

    def _through(self, question: Question, bindings: Iterable[Binding], depth: int) -> set[str]:
        """The answers of everything that a name was bound to. A binding that needs itself adds nothing to itself."""
        found: set[str] = set()
        for binding in bindings:
            key = (question.__name__, id(binding))
            if (known := self._known.get(key)) is None:
                known = self._known[key] = set()
                for part in self._sources(binding):
                    known |= question(part, binding.scope, depth)
                if binding.kind == "grown":
                    before = self._through(question, binding.earlier, depth)
                    known |= _build(lambda a, b: a + b, before, set(known)) | before
            found |= known
        return found

    def _sources(self, binding: Binding) -> list[ast.expr]:
        if binding.expr is None:
            return []
        return self.elements(binding.expr, binding.scope) if binding.kind == "each" else [binding.expr]


def last(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]


def annotation_terms(node: ast.expr | None) -> set[str]:
    """The class names of an annotation: of `A`, `m.A`, `A | None`, `Optional[A]`, `type[A]`, quoted or not."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
        case ast.Constant(value=str(text)):
            return set(re.findall(r"\w+", text)) if "[" not in text else set(re.findall(r"(\w+)\]", text))
        case ast.BinOp(left=left, right=right):
            return annotation_terms(left) | annotation_terms(right)
        case ast.Subscript(value=ast.Name(id=outer) | ast.Attribute(attr=outer), slice=inner):
            if outer in ("Optional", "Union", "Annotated", "Final", "ClassVar", "type", "Type"):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return {name for part in parts for name in annotation_terms(part)}
    return set()


def own_attribute(node: ast.Attribute, scope: Scope) -> list[Binding]:
    """What `self.x`, `cls.x` or `Class.x` was bound to in this file's class."""
    if not isinstance(node.value, ast.Name):
        return []
    owner = node.value.id
    classes = [b.inside for b in scope.find(owner) if b.kind == "class"]
    if owner in ("self", "cls"):
        classes = [scope.class_around]
    found = [inside for inside in classes if inside is not None]
    return [b for inside in found for b in (*inside.attributes.get(node.attr, ()), *inside.bound.get(node.attr, ()))]


# -- inside ----------------------------------------------------------------------------------------


def _annotated(bindings: list[Binding]) -> set[str]:
    return {name for binding in bindings for name in annotation_terms(binding.annotation)}


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions that `node` may evaluate to one of, or holds."""
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.BoolOp(values=values):
            yield from values
        case (
            ast.NamedExpr(value=value) | ast.Subscript(value=value) | ast.Starred(value=value) | ast.Await(value=value)
        ):
            yield value
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            yield from parts
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from (left, right)


def _build(combine: Callable[..., str], *choices: set[str]) -> set[str]:
    """`combine` of every combination of the choices; nothing where one is unknown or the strings do not fit."""
    built: set[str] = set()
    for parts in itertools.islice(itertools.product(*choices), MAX_STRINGS):
        try:
            built.add(combine(*parts))
        except (TypeError, ValueError, IndexError, KeyError):
            continue  # `"%d" % "a"` is the scanned program's own error, and no name
    return built


def _method(call: ast.Call, texts: set[str], method: str, of: Callable[[ast.expr], set[str]]) -> set[str]:
    """The strings that one of `FOLDED_METHODS` makes of `texts`."""
    args = call.args
    if method == "join" and args and isinstance(args[0], ast.Tuple | ast.List):
        return _build(lambda glue, *parts: glue.join(parts), texts, *map(of, args[0].elts))
    words = [word.arg for word in call.keywords if word.arg]

    def apply(text: str, *given: str) -> str:
        made: str = getattr(text, method)(*given[: len(args)], **dict(zip(words, given[len(args) :], strict=True)))
        return made

    return _build(apply, texts, *map(of, args), *(of(word.value) for word in call.keywords if word.arg))


def _integer(node: ast.expr | None) -> int | None:
    try:
        value = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return value if isinstance(value, int) else None
