"""Tables print the names that users chose as they are, whatever they mean to the library that draws them."""

from suite.e2e.report.tables import print_compare, print_show

CELL = "mini/fa3/reference/a[/b]/[red]/1a2b3c4d5e6f"


def test_a_cell_name_is_text_and_never_markup(capsys):
    same = {"family": "engine", "model": "mini", "backend": "fa3", "launcher": "reference", "metrics": {}}
    same |= {"label": None, "block": 0, "attempt": 1, "void_reason": None}
    print_show("r", [{"cell": CELL, "pool": "static", "status": "wrong", "reason": "why [/c]", **same}])
    assert CELL in (shown := capsys.readouterr().out)
    assert "why [/c]" in shown
    row = {
        "metric": "itl_ms",
        "static": 1.0,
        "unified": None,
        "delta": None,
        "ratio": None,
        "blocks": 1,
        "verdict": "missing",
    }
    print_compare("r", [{"cell": CELL, **row}])
    assert CELL in capsys.readouterr().out
