"""What the commands share: their options, and how they print rows and end runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from suite.e2e.matrix.run import RunSummary

Db = Annotated[str, typer.Option(help="Results database: a SQLite file, or an SQLAlchemy URL.", metavar="URL")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[
    str | None,
    typer.Argument(help="A run's id or its unique beginning; the latest run when left out.", metavar="RUN"),
]
MetricName = Annotated[str | None, typer.Option("--metric", help="Only this metric.", metavar="NAME")]
Plant = Annotated[
    str | None,
    typer.Option(help="Also run the unified arm of the first engine cell with this fault planted.", metavar="FAULT"),
]
Jobs = Annotated[int, typer.Option(min=1, help="Blocks at once; on GPUs each has one of its own.", metavar="N")]
Retries = Annotated[
    int, typer.Option(min=0, help="More attempts at a block that infrastructure or a throttled GPU ended.", metavar="N")
]
Budget = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds; the least valuable blocks beyond become skipped rows.", metavar="SECONDS"),
]
DEFAULT_DB = "kvproof.db"


def show_run(run: str | None, db: str, json: bool = False, metric: str | None = None) -> None:
    """Print the rows of a run, the latest when none is named."""
    from db.queries import find_run, show_rows
    from db.session import open_db
    from suite.e2e.report.tables import print_show

    engine = open_db(db, create=False)
    run_id = find_run(engine, run)
    rows = show_rows(engine, run_id, metric)
    if json:
        print_json_rows(rows)
    else:
        print_show(run_id, rows)


def finish(summary: "RunSummary", db: str, json: bool) -> None:
    """Print what a run came to, and exit with its code."""
    from suite.records import STATUSES

    if json:
        print_json_line({"run": summary.run, "planned": summary.planned, **{s: summary.statuses[s] for s in STATUSES}})
    else:
        show_run(summary.run, db)
    raise typer.Exit(summary.exit_code)


def print_json_line(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())


def print_json_rows(rows: Sequence[object]) -> None:
    """One JSON array, one row a line."""
    import msgspec

    lines = ",\n".join(msgspec.json.encode(row).decode() for row in rows)
    typer.echo(f"[\n{lines}\n]" if rows else "[]")
