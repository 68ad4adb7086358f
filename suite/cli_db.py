"""The commands that take up a run again and that look after the database itself."""

from pathlib import Path
from typing import Annotated

import typer

from suite.cli_options import DEFAULT_DB, Budget, Db, Jobs, Json, Retries, Run, finish, print_json_line, print_json_rows

db_app = typer.Typer(
    name="db",
    help="Upgrade, merge, export, count and check results databases.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
BROKEN_EXIT_CODE = 1


def register(app: typer.Typer) -> None:
    app.command(short_help="Continue the unfinished cells of a run.")(resume)
    app.add_typer(db_app)


def resume(
    run: Run = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
    budget: Budget = None,
    jobs: Jobs = 1,
    retries: Retries = 0,
) -> None:
    """Continue exactly the unfinished cells of a run that was killed or interrupted, as `run` would have.

    Plan, code revision and machine must be those of the run, and no living process may be executing it. What was
    interrupted, or ended by infrastructure, is attempted again; finished blocks are left alone. --json and exit codes
    are those of `run`.
    """
    from db.queries import find_run
    from db.runs import run_record
    from db.session import open_db
    from suite.e2e.matrix.execution import Options
    from suite.e2e.matrix.planning import slots
    from suite.e2e.matrix.run import resumable, resume_run
    from suite.e2e.report.progress import ConsoleProgress

    engine = open_db(db, create=False)
    record = run_record(engine, find_run(engine, run))
    plan = resumable(record)
    progress = ConsoleProgress(record.planned)
    options = Options(progress=progress, gpus=slots(plan, jobs), retries=retries, budget_s=budget)
    finish(resume_run(engine, record.id, options), db, json)


@db_app.command(short_help="Bring a database to the newest schema.")
def upgrade(db: Db = DEFAULT_DB) -> None:
    """Bring a database to the newest schema, or make an empty one."""
    from db.session import newest_revision, open_db

    open_db(db).dispose()
    typer.echo(f"{db}: schema revision {newest_revision()}")


@db_app.command(short_help="Merge the databases of other machines into --db.")
def merge(
    sources: Annotated[list[str], typer.Argument(help="Databases to merge from.", metavar="SOURCE...")],
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Merge the databases of other machines into --db. Merging again changes nothing.

    Each source is merged whole or not at all: a row that contradicts one that is there is named, with exit code 4.
    --json rows: {"source", "rows"}, the new rows of each table.
    """
    from db.merge import merge as merge_into
    from db.session import open_db

    opened = [(source, open_db(source, create=False)) for source in sources]
    target = open_db(db)
    rows = []
    for source, engine in opened:
        added = merge_into(engine, target)
        rows.append({"source": source, "rows": {name: n for name, n in added.items() if n}})
        if not json:
            typer.echo(f"{source}: {added['run']} runs and {added['cell_run']} rows are new")
    if json:
        print_json_rows(rows)


@db_app.command(short_help="Export results as SQLite or Parquet.")
def export(
    out: Annotated[Path, typer.Argument(help="FILE.db for SQLite without raw samples, else a folder for Parquet.")],
    run: Annotated[str | None, typer.Option(help="Only this run, by its id or its beginning.", metavar="RUN")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> None:
    """Export results, whole or of one run, to a path where nothing is yet. --json: {"out", "rows"}."""
    from db.export import export_parquet, export_sqlite
    from db.queries import find_run
    from db.session import open_db

    engine = open_db(db, create=False)
    run_id = None if run is None else find_run(engine, run)
    rows = (export_sqlite if out.suffix in (".db", ".sqlite") else export_parquet)(engine, out, run_id)
    if json:
        print_json_line({"out": str(out), "rows": rows})
    else:
        typer.echo(f"{out}: {sum(rows.values())} rows")


@db_app.command()
def stats(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Count the rows and bytes of every table. --json rows: {"table", "rows", "bytes"}."""
    from db.session import open_db
    from db.stats import table_stats
    from suite.e2e.report.tables import print_table

    rows = table_stats(open_db(db, create=False))
    if json:
        print_json_rows(rows)
    else:
        lines = [[row["table"], str(row["rows"]), "-" if row["bytes"] is None else str(row["bytes"])] for row in rows]
        print_table(db, ["table", "rows", "bytes"], lines)


@db_app.command()
def check(db: Db = DEFAULT_DB, json: Json = False) -> None:
    """Check every invariant of the schema, raw samples included. Exit code 1 with the broken rows.

    --json rows: {"invariant", "row", "found"}.
    """
    from db.invariants import broken_rows
    from db.session import open_db

    broken = broken_rows(open_db(db, create=False))
    if json:
        print_json_rows(broken)
    else:
        for row in broken:
            typer.echo(f"{row['row']}: {row['found']}, breaks: {row['invariant']}")
    typer.echo(f"{len(broken)} broken", err=True)
    raise typer.Exit(BROKEN_EXIT_CODE if broken else 0)
