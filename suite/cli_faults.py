"""The command that plants faults and shows which signals see them. The detection runs in a child, which loads torch."""

import sys
from typing import Annotated, Any

import typer

from suite.cli_options import Json, print_json_rows
from suite.e2e.faults.child import MISSED_EXIT_CODE, detection_rows
from suite.e2e.faults.fault import KINDS
from suite.errors import InputError, UnknownNameError

FaultDb = Annotated[
    str | None, typer.Option(help="Also store the rows there: a SQLite file, or an SQLAlchemy URL.", metavar="URL")
]


def register(app: typer.Typer) -> None:
    app.command(short_help="Plant known faults, and show that each is seen.")(faults)


def faults(
    kind: Annotated[str | None, typer.Option(help="Only faults of this kind.", metavar="KIND")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only the smoke set: some of every kind.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="On a fresh pool without churn, as a naive suite would: what it misses.")
    ] = False,
    db: FaultDb = None,
    stored: Annotated[bool, typer.Option("--stored", help="Plant nothing: list the detection runs of --db.")] = False,
    json: Json = False,
) -> None:
    """Plant known faults one by one, and show that each is seen and that its clean twin is not.

    --json rows: {"fault", "kind", "caught", "by", "first_signal", "gpu_seconds", "clean_twin_passed", "seconds",
    "seam", "text", "expected", "severity"}. Exit code 0 when all are caught and every twin is clean, 1 when one is
    missed or a twin fails.
    """
    if stored:
        print_stored(db, json)
        return
    if kind is not None and kind not in KINDS:
        raise UnknownNameError("kind", kind, KINDS)
    rows = detect(kind, smoke, fresh) if db is None else detect_and_store(kind, smoke, fresh, db)
    if json:
        print_json_rows(rows)
    else:
        print_faults(rows)
    if not all(row["caught"] and row["clean_twin_passed"] for row in rows):
        raise typer.Exit(MISSED_EXIT_CODE)


def detect(kind: str | None, smoke: bool, fresh: bool) -> list[dict[str, Any]]:
    """The rows of a detection run in a child; progress goes to stderr as it comes."""
    arguments = ["--kind", kind] if kind is not None else []
    arguments += [flag for flag, asked in (("--smoke", smoke), ("--fresh", fresh)) if asked]
    return detection_rows(*arguments)


def detect_and_store(kind: str | None, smoke: bool, fresh: bool, db: str) -> list[dict[str, Any]]:
    """The same, its rows kept in `db`, which is opened before anything is planted."""
    from db.fault_trials import store_trials
    from db.keys import utc_now
    from db.session import open_db
    from suite.provenance import code_revision

    engine, started_at = open_db(db), utc_now()
    rows = detect(kind, smoke, fresh)
    key = store_trials(engine, rows, code_revision(), started_at, fresh=fresh)
    typer.echo(f"stored as detection run {key}", err=True)
    return rows


def print_stored(db: str | None, json: bool) -> None:
    """The stored detection runs, oldest first."""
    from rich.console import Console
    from rich.table import Table

    from db.fault_trials import detections
    from db.session import open_db

    if db is None:
        raise InputError("db", None, "the results database that --stored reads")
    rows = detections(open_db(db, create=False))
    if json:
        print_json_rows(rows)
        return
    table = Table("detection", "started", "revision", "setting", "caught", "clean twins failed", "missed")
    for row in rows:
        revision = row["sha"][:12] + (" (changed)" if row["dirty"] else "")
        setting = f"{row['device']}, seed {row['seed']}" + (", fresh pool" if row["fresh"] else "")
        caught, failed = f"{row['caught']} of {row['planted']}", str(row["clean_twins_failed"])
        shown = (row["detection"], row["started_at"], revision, setting, caught, failed, ", ".join(row["missed"]))
        table.add_row(*shown)
    Console(width=None if sys.stdout.isatty() else 240).print(table)


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
