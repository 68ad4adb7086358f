"""One rule of each kind, and what a snippet does against them."""

import ast

from suite.scan.checks import check_file
from suite.scan.rules import parse_rules

RULES = parse_rules(
    "test",
    {
        "rules": [
            {
                "id": "use",
                "kind": "use",
                "names": ["fill_read_table", "write_*"],
                "message": "no",
                "owners": ["own/**"],
            },
            {"id": "call", "kind": "call", "names": ["KernelIds"], "message": "no"},
            {"id": "state", "kind": "use", "names": ["map"], "receivers": ["span", "Span"], "message": "no"},
            {
                "id": "probe",
                "kind": "probe",
                "probes": ["getattr", "hasattr", "isinstance", "type"],
                "receivers": ["allocator", "*Allocator"],
                "classes": ["*Allocator"],
                "message": "no",
            },
            {"id": "import", "kind": "import", "modules": ["torch", "pkg.ops.read_table"], "message": "no"},
        ]
    },
)


def hits(source: str, path: str = "pkg/room/x.py") -> list[tuple[int, str, str]]:
    return [(hit.line, hit.rule, hit.what) for hit in check_file(ast.parse(source), path, RULES)]


def rules_hit(source: str) -> set[str]:
    return {rule for _, rule, _ in hits(source)}
