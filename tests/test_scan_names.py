"""What the scan sees through: aliases, names built from constants, and what it leaves alone."""

import pytest

from tests.scan_support import hits, rules_hit

USES = {
    "attribute": "t.fill_read_table(b)",
    "attribute that is not called": "f = t.fill_read_table",
    "of anything": "make().translator[0].fill_read_table",
    "glob": "t.write_anything(b)",
    "replaced": "t.fill_read_table = other",
    "deleted": "del t.fill_read_table",
    "imported": "from m import fill_read_table",
    "imported under another name": "from m import fill_read_table as g",
    "module under another name": "import m as n\nn.fill_read_table(x)",
    "getattr": "getattr(t, 'fill_read_table')(b)",
    "setattr": "setattr(t, 'fill_read_table', f)",
    "patched": "monkeypatch.setattr(t, 'fill_read_table', f)",
    "added strings": "getattr(x, 'fill_' + 'read_table')",
    "nested sums": "getattr(x, 'fi' + ('ll_' + 'read') + '_table')",
    "adjacent strings": "getattr(x, 'fill_' 'read_table')",
    "f-string of constants": "getattr(x, f'fill_{\"read\"}_table')",
    "f-string of a name": "KIND = 'read'\ngetattr(x, f'fill_{KIND}_table')",
    "percent": "getattr(x, 'fill_%s_table' % 'read')",
    "percent with a tuple": "getattr(x, '%s_%s_table' % ('fill', 'read'))",
    "format": "getattr(x, 'fill_{}_table'.format('read'))",
    "format by name": "getattr(x, 'fill_{kind}_table'.format(kind='read'))",
    "join": "getattr(x, '_'.join(['fill', 'read', 'table']))",
    "replace and case": "getattr(x, 'FILL_WRITE_TABLE'.lower().replace('write', 'read'))",
    "slice": "getattr(x, 'elbat_daer_llif'[::-1])",
    "str()": "getattr(x, str('fill_read_table'))",
    "either": "getattr(x, 'fill_read_table' if fast else 'other')",
    "default": "getattr(x, name or 'fill_read_table')",
    "module constant": "NAME = 'fill_read_table'\ndef f(x):\n    return getattr(x, NAME)",
    "constant defined below": "def f(x):\n    return getattr(x, NAME)\nNAME = 'fill_read_table'",
    "grown constant": "name = 'fill_'\nname += 'read_'\nname += 'table'\ngetattr(x, name)",
    "constant of a class": "class A:\n    N = 'fill_read_table'\n    def f(self, x):\n        getattr(x, self.N)",
    "constant of another class": "class A:\n    N = 'fill_read_table'\ngetattr(x, A.N)",
    "constant of self": "class A:\n    def __init__(self):\n        self.n = 'fill_read_table'\n"
    "    def f(self, x):\n        getattr(x, self.n)",
    "default of a parameter": "def f(x, name='fill_read_table'):\n    getattr(x, name)",
    "loop": "for name in ('a', 'fill_read_table'):\n    getattr(x, name)",
    "loop over a constant": "NAMES = ['a', 'fill_read_table']\nfor name in NAMES:\n    getattr(x, name)",
    "comprehension": "[getattr(x, n) for n in {'fill_read_table', 'b'}]",
    "table of names": "NAMES = {'read': 'fill_read_table'}\ngetattr(x, NAMES['read'])",
    "unpacked": "a, b = 'fill_', 'read_table'\ngetattr(x, a + b)",
    "walrus": "getattr(x, name := 'fill_read_table')",
    "global": "def f():\n    global N\n    N = 'fill_read_table'\ndef g(x):\n    getattr(x, N)",
    "nonlocal": "def f(x):\n    n = 'a'\n    def g():\n        nonlocal n\n        n = 'fill_read_table'\n"
    "    getattr(x, n)",
    "getattr under another name": "look = getattr\nlook(x, 'fill_read_table')",
    "getattr of builtins": "import builtins as b\nb.getattr(x, 'fill_read_table')",
    "getattr in part": "from functools import partial\nlook = partial(getattr, x)\nlook('fill_read_table')",
    "attrgetter": "from operator import attrgetter as ag\nag('translator.fill_read_table')(x)",
    "methodcaller": "import operator\noperator.methodcaller('fill_read_table', b)(t)",
    "__getattribute__": "x.__getattribute__('fill_read_table')",
    "object.__getattribute__": "object.__getattribute__(x, 'fill_read_table')",
    "__dict__": "X.__dict__['fill_read_table'](x)",
    "__dict__.get": "X.__dict__.get('fill_read_table')",
    "vars": "vars(X)['fill_read_table']",
    "getattr_static": "import inspect\ninspect.getattr_static(x, 'fill_read_table')",
    "module imported by name": "import importlib\nimportlib.import_module('m').fill_read_table(x)",
    "pattern": "match x:\n    case X(fill_read_table=f):\n        pass",
    "star import": "from m import *\nfill_read_table(x)",
    "in an f-string": "f'{t.fill_read_table}'",
    "in a lambda": "f = lambda t: t.fill_read_table(1)",
    "in a default": "def f(a=t.fill_read_table):\n    pass",
    "in a decorator": "@t.fill_read_table\ndef f():\n    pass",
    "in a class body": "class A:\n    f = t.fill_read_table",
    "in except": "try:\n    pass\nexcept E as e:\n    e.fill_read_table()",
    "in async": "async def f():\n    async with t.fill_read_table() as x:\n        await x",
}


@pytest.mark.parametrize("source", USES.values(), ids=USES)
def test_a_use_is_seen(source):
    assert rules_hit(source) == {"use"}


CLEAN = {
    "comment": "# t.fill_read_table(b)",
    "string": "'t.fill_read_table(b)'",
    "docstring": 'def f():\n    """Calls getattr(t, \'fill_read_table\')."""',
    "name of its own": "fill_read_table = 1\nprint(fill_read_table)",
    "function of its own": "def fill_read_table():\n    pass\nfill_read_table()",
    "method of its own": "class A:\n    def fill_read_table(self):\n        pass",
    "parameter": "def f(fill_read_table):\n    return fill_read_table()",
    "keyword": "f(fill_read_table=1)",
    "key": "table = {'fill_read_table': 1}\ntable['fill_read_table']",
    "longer name": "t.prefill_read_table()",
    "printed": "print('fill_' + 'read_table')",
    "value that is set": "setattr(x, 'a', 'fill_read_table')",
    "shadowed constant": "N = 'fill_read_table'\ndef f(x, N):\n    return getattr(x, N)",
    "class constant outside its class": "class A:\n    N = 'fill_read_table'\n"
    "    def f(self, x):\n        getattr(x, N)",
    "unknown part": "getattr(x, 'fill_' + kind)",
    "percent that does not fit": "getattr(x, 'fill_read_table%d' % 'a')",
    "format that does not fit": "getattr(x, '{1}'.format('fill_read_table'))",
    "dict of an object's own": "x.get('fill_read_table')",
}


@pytest.mark.parametrize("source", CLEAN.values(), ids=CLEAN)
def test_what_is_no_use_is_left_alone(source):
    assert hits(source) == []


CALLS = {
    "call": "KernelIds(x)",
    "call of a module's": "import ids\nids.KernelIds(x)",
    "call under another name": "from ids import KernelIds as K\nK(x)",
    "call of an assigned alias": "from ids import KernelIds\nmake = KernelIds\nmake(x)",
    "call of an attribute alias": "import ids\nclass A:\n    def __init__(self):\n        self.k = ids.KernelIds\n"
    "    def f(self):\n        self.k(1)",
    "built": "getattr(ids, 'Kernel' + 'Ids')(x)",
    "partial": "from functools import partial\nfrom ids import KernelIds\npartial(KernelIds, x)(k)",
    "either": "from ids import KernelIds\n(KernelIds if a else b)(x)",
}


@pytest.mark.parametrize("source", CALLS.values(), ids=CALLS)
def test_a_call_is_seen(source):
    if source == CALLS["call"]:
        source = "from ids import KernelIds\n" + source
    assert rules_hit(source) == {"call"}


def test_call_rules_allow_the_name_itself():
    assert hits("import ids\nx: ids.KernelIds = 1\nisinstance(x, ids.KernelIds)") == []
    assert (
        hits("from ids import KernelIds\ndef f(x: KernelIds) -> KernelIds:\n    return isinstance(x, KernelIds)") == []
    )


def test_receivers_limit_a_use():
    assert hits("span.map.host") == [(1, "state", "map")]
    assert hits("def f(s: Span):\n    return s.map") == [(2, "state", "map")]
    assert hits("for span in spans:\n    getattr(span, 'map')") == [(2, "state", "map")]
    assert hits("map(f, x)\npool.map(f)\nframe.map") == []


def test_hits_have_line_and_name_once_a_line_and_owners_have_none():
    source = "\n\nx = t.fill_read_table + t.fill_read_table\ny = t.write_a or t.write_b\n"
    assert hits(source) == [
        *((3, "use", "fill_read_table"), (4, "use", "write_a"), (4, "use", "write_b")),
    ]
    assert hits("t.fill_read_table\nKernelIds = 1", "own/deep/x.py") == []


def test_deep_and_cyclic_sources_end():
    chain = "x = " + "f(" * 80 + "t.fill_read_table" + ")" * 80
    assert rules_hit(chain) == {"use"}
    assert rules_hit("x = " + " + ".join(["'a'"] * 800)) == set()
    assert rules_hit("getattr(x, " + " + ".join(f"'{c}'" for c in "fill_read_table") + ")") == {"use"}
    cycle = "a = b\nb = a\nc = c + 'x'\ngetattr(a, c)\n" + "s = s + 'y'\n" * 200 + "getattr(s, s)\nhasattr(a, 'x')"
    assert hits(cycle) == []
    names = "n0 = 'fill_read_table'\n" + "".join(f"n{i + 1} = n{i}\n" for i in range(200))
    assert rules_hit(f"{names}getattr(x, n60)") == {"use"}
    assert rules_hit(f"{names}getattr(x, n200)") <= {"use"}
    many = "".join(f"n{i} = 'a' if x else 'b'\n" for i in range(30))
    assert hits(many + "getattr(x, " + " + ".join(f"n{i}" for i in range(30)) + ")") == []
