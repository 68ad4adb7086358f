"""Probes of an object and imports of a module, by whatever name, and what is neither."""

import pytest

from tests.scan_support import hits, rules_hit

PROBES = {
    "getattr": "getattr(self.allocator, 'x', None)",
    "hasattr": "hasattr(allocator, 'x')",
    "isinstance": "isinstance(allocator, A)",
    "by class alone": "isinstance(x, UnifiedAllocator)",
    "one class of several": "isinstance(x, (A, m.UnifiedAllocator))",
    "one class of a union": "isinstance(x, A | UnifiedAllocator)",
    "classes in a constant": "KINDS = (A, UnifiedAllocator)\nisinstance(x, KINDS)",
    "imported under another name": "from m import UnifiedAllocator as U\nisinstance(x, U)",
    "alias": "a = self.allocator\nisinstance(a, A)",
    "alias of an alias": "a = self.allocator\nb = a\nhasattr(b, 'x')",
    "alias in self": "class C:\n    def __init__(self, allocator):\n        self.a = allocator\n"
    "    def f(self):\n        return hasattr(self.a, 'x')",
    "annotated parameter": "def f(a: m.PageAllocator):\n    return hasattr(a, 'x')",
    "quoted annotation": "def f(a: 'PageAllocator | None'):\n    return hasattr(a, 'x')",
    "optional annotation": "def f(a: Optional[PageAllocator]):\n    return hasattr(a, 'x')",
    "annotated field": "class C:\n    a: PageAllocator\n    def f(self):\n        return hasattr(self.a, 'x')",
    "built by class": "hasattr(UnifiedAllocator(p), 'x')",
    "cast": "hasattr(cast('PageAllocator', x), 'x')",
    "either": "a = self.allocator if b else None\nhasattr(a, 'x')",
    "context": "with self.allocator as a:\n    hasattr(a, 'x')",
    "probe under another name": "has = hasattr\nhas(allocator, 'x')",
    "type": "type(self.allocator) is A",
    "type against a class": "type(x) is UnifiedAllocator",
    "__class__": "allocator.__class__.__name__",
    "__class__ against a class": "x.__class__ == UnifiedAllocator",
    "pattern": "match x:\n    case UnifiedAllocator():\n        pass",
    "looked up": "hasattr(getattr(self, 'allo' + 'cator'), 'x')",
}


@pytest.mark.parametrize("source", PROBES.values(), ids=PROBES)
def test_a_probe_is_seen(source):
    assert rules_hit(source) == {"probe"}


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(x, A)",
        "hasattr(x, 'allocator')",
        "allocator.has(x)",
        "getattr(self, name)",
        "def f(a: dict[str, PageAllocator]):\n    hasattr(a, 'x')",
        "type(x) is A",
        "def isinstance_(a): pass\nisinstance_(allocator)",
        "def hasattr(a, b): pass\nhasattr(allocator, 'x')",
    ],
)
def test_what_is_no_probe_is_left_alone(source):
    assert hits(source) == []


IMPORTS = {
    "import": "import torch",
    "submodule": "import torch.nn.functional as F",
    "from": "from torch import nn",
    "from a submodule": "from torch.nn import functional",
    "in a function": "def f():\n    import torch",
    "for types only": "if TYPE_CHECKING:\n    import torch",
    "by name": "import importlib\nimportlib.import_module('torch')",
    "by a built name": "from importlib import import_module as load\nload('tor' + 'ch.nn')",
    "__import__": "__import__('torch')",
    "in tests": "torch = pytest.importorskip('torch')",
    "of a package": "from pkg.ops import read_table",
    "through a package": "from pkg import ops\nops.read_table.launch()",
    "relative": "from ..ops.read_table import launch",
    "relative package": "from ..ops import read_table",
    "relative by name": "import importlib\nimportlib.import_module('..ops.read_table', 'pkg')",
    "resolved": "import pkgutil\npkgutil.resolve_name('torch:nn')",
}


@pytest.mark.parametrize("source", IMPORTS.values(), ids=IMPORTS)
def test_an_import_is_seen(source):
    assert rules_hit(source) == {"import"}


@pytest.mark.parametrize(
    "source",
    [
        "import torchvision",
        "from .torch import x",
        "from pkg.ops import write",
        "torch = 1\ntorch.nn",
        "'import torch'",
    ],
)
def test_what_is_no_import_is_left_alone(source):
    assert hits(source) == []


def test_relative_imports_are_resolved_from_the_package():
    assert rules_hit("from ..ops import read_table") == {"import"}
    assert hits("from ..ops import read_table", "python/pkg/room/x.py") == [(1, "import", "pkg.ops.read_table")]
    assert hits("from ..ops import read_table", "pkg/room/deeper/x.py") == []
    assert hits("from .ops import read_table", "pkg/__init__.py") == [(1, "import", "pkg.ops.read_table")]
    load = "from importlib import import_module\nimport_module({!r}, package={!r})"
    assert hits(load.format(".ops.read_table", "pkg"), "scripts/x.py") == [(2, "import", "pkg.ops.read_table")]
    assert hits(load.format("..ops.read_table", "pkg.room"), "scripts/x.py") == [(2, "import", "pkg.ops.read_table")]
    assert hits(load.format("..ops.read_table", "other.room"), "scripts/x.py") == []
