"""Rows as tables on stdout, as wide as they need to be when nobody's terminal cuts them."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from db.compare import CompareRow
from db.queries import Ended, ShowRow

PIPE_WIDTH = 400  # columns, when stdout is no terminal: whole lines for grep
STATUS_STYLE = {"passed": "green", "wrong": "bold red", "refused": "yellow", "crashed": "bold red", "timed_out": "red"}
DEMO_METRICS = {
    "accuracy": "accuracy",
    "max_logit_diff": "largest logit diff",
    "itl_ms": "median ITL ms",
    "moved_share": "pages moved",
}


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """One table on stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(title, markup=False)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_show(run_id: str, rows: list[ShowRow]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    header = ["cell", "pool", "block", "launcher", "status", *names, "reason"]
    lines = (
        [
            *(escape(row["cell"]), row["label"] or row["pool"], str(row["block"]), row["launcher"], status(row)),
            *(value(row, name) for name in names),
            escape("; ".join(filter(None, (row["reason"], row["void_reason"] and f"void: {row['void_reason']}")))),
        ]
        for row in rows
    )
    print_table(f"run {run_id}", header, lines)


def print_compare(run_id: str, rows: list[CompareRow]) -> None:
    header = ["cell", "metric", "static", "unified", "delta", "ratio", "blocks", "verdict"]
    lines = (
        [
            escape(row["cell"]),
            row["metric"],
            number(row["static"]),
            number(row["unified"]),
            *(number(row["delta"]), number(row["ratio"]), str(row["blocks"])),
            row["verdict"],
        ]
        for row in rows
    )
    print_table(f"run {run_id}: static against unified", header, lines)


def print_dry_run(name: str, rows: list[dict[str, Any]]) -> None:
    header = ["cell", "hash", "arms", "blocks", "priority", "estimate s", "dropped"]
    keys = ("blocks", "priority", "estimate_s", "dropped_blocks")
    lines = [
        [escape(row["cell"]), row["hash"], ", ".join(row["arms"]), *(str(row[key]) for key in keys)] for row in rows
    ]
    seconds = sum(row["estimate_s"] for row in rows)
    print_table(f"{name}: {len(rows)} cells, about {seconds:.0f} s one after another", header, lines)


def print_doctor(rows: list[dict[str, Any]]) -> None:
    header = ["backend", "family", "usable", "launchers", "refusal"]
    lines = (
        [
            *(row["backend"], row["family"], "yes" if row["usable"] else "no"),
            *(", ".join(row["launchers"]), escape(row["refusal"] or "")),
        ]
        for row in rows
    )
    print_table("attention backends on this machine", header, lines)


def print_demo(run_id: str, rows: list[Ended]) -> None:
    header = ["model", "backend", "pool", "planted fault", "launcher", "status", *DEMO_METRICS.values()]
    lines = (
        [
            *(escape(row.show["model"]), row.show["backend"], row.show["pool"], ", ".join(row.plants) or "-"),
            *(row.show["launcher"], status(row.show)),
            *(value(row.show, name, digits=4) for name in DEMO_METRICS),
        ]
        for row in rows
    )
    print_table(f"run {run_id}", header, lines)


def status(row: ShowRow) -> str:
    style = STATUS_STYLE.get(row["status"])
    return f"[{style}]{row['status']}[/]" if style else row["status"]


def value(row: ShowRow, metric: str, digits: int = 6) -> str:
    found = row["metrics"].get(metric)
    return number(found["value"] if found else None, digits)


def number(value: float | None, digits: int = 6) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def escape(text: str) -> str:
    """`text` with its square brackets kept from rich."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)
