"""The command that plants faults and shows which signals see them. The detection runs in a child, which loads torch."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from suite.cli_options import Json, print_json_rows
from suite.e2e.faults.fault import KINDS
from suite.errors import KvproofError, UnknownNameError

ROOT = Path(__file__).resolve().parents[1]
MISSED_EXIT_CODE = 1


def register(app: typer.Typer) -> None:
    app.command()(faults)


def faults(
    kind: Annotated[str | None, typer.Option(help="Only faults of this kind.", metavar="KIND")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only the smoke set: some of every kind.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="On a fresh pool without churn, as a naive suite would: what it misses.")
    ] = False,
    json: Json = False,
) -> None:
    """Plant known faults one by one, and show that each is seen and that its clean twin is not.

    --json rows: {"fault", "kind", "caught", "by", "first_signal", "gpu_seconds", "clean_twin_passed", "seconds",
    "seam", "text"}. Exit code 0 when all are caught and every twin is clean, 1 when one is missed or a twin fails.
    """
    if kind is not None and kind not in KINDS:
        raise UnknownNameError("kind", kind, KINDS)
    rows = detect(kind, smoke, fresh)
    if json:
        print_json_rows(rows)
    else:
        print_faults(rows)
    if not all(row["caught"] and row["clean_twin_passed"] for row in rows):
        raise typer.Exit(MISSED_EXIT_CODE)


def detect(kind: str | None, smoke: bool, fresh: bool) -> list[dict[str, Any]]:
    """The rows of a detection run in a child; progress goes to stderr as it comes."""
    command = [sys.executable, "-m", "suite.e2e.faults", "--json"]
    command += ["--kind", kind] if kind is not None else []
    command += [flag for flag, asked in (("--smoke", smoke), ("--fresh", fresh)) if asked]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=False)
    if done.returncode not in (0, MISSED_EXIT_CODE):
        raise KvproofError(f"the detection run ended with exit code {done.returncode} before its last row")
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


def print_faults(rows: list[dict[str, Any]]) -> None:
    """A line per fault, with the findings of every room that saw it."""
    from rich.console import Console
    from rich.table import Table

    rooms = sorted({name.partition(".")[0] for row in rows for name in row["by"]})
    table = Table(
        title=f"{sum(row['caught'] for row in rows)} of {len(rows)} planted faults caught", title_justify="left"
    )
    for column in ("kind", "fault", "caught", "clean twin", *rooms):
        table.add_column(column, overflow="fold")
    for row in rows:
        seen: dict[str, list[str]] = {room: [] for room in rooms}
        for name in row["by"]:
            room, _, finding = name.partition(".")
            seen[room].append(finding)
        verdict = "yes" if row["caught"] else "MISSED"
        twin = "passed" if row["clean_twin_passed"] else "FAILED"
        table.add_row(row["kind"], row["fault"], verdict, twin, *(", ".join(seen[room]) for room in rooms))
    Console(width=None if sys.stdout.isatty() else 240).print(table)
