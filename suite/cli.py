"""The command `kvproof`. Data on stdout, progress on stderr; each command imports late what it needs.

Exit codes: 0 good, 1 a wrong row or a finding, 3 a crash or a failure of the machinery, 4 bad input, 130 interrupted,
141 nobody reads stdout any more.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from suite import cli_db, cli_faults, cli_gate
from suite.cli_options import (
    DEFAULT_DB,
    Budget,
    Db,
    Jobs,
    Json,
    MetricName,
    Plant,
    Retries,
    Run,
    finish,
    print_json_rows,
    show_run,
)
from suite.errors import InputError, KvproofError

if TYPE_CHECKING:
    from suite.e2e.matrix.plan import Plan
    from suite.e2e.matrix.run import RunSummary

DEMO_MATRIX = Path(__file__).resolve().parents[1] / "matrices" / "demo.toml"
DEMO_FAULT = "read_skips_translation"
INFRASTRUCTURE_EXIT_CODE = 3
INTERRUPTED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141

app = typer.Typer(
    name="kvproof",
    help="Proof that a unified KV pool answers, drafts and runs like the static one.",
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command(short_help="Run every cell of a matrix and keep every row.")
def run(
    matrix: Annotated[Path, typer.Argument(help="The matrix to run.", metavar="MATRIX.toml")],
    db: Db = DEFAULT_DB,
    json: Json = False,
    plant: Plant = None,
    launcher: Annotated[
        str | None, typer.Option(help="Only `reference`: the matrix scaled down to a CPU, by the fp32 oracle.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List every planned cell, and run nothing.")] = False,
    shard: Annotated[str | None, typer.Option(help="Only part I of N, split by time.", metavar="I/N")] = None,
    budget: Budget = None,
    jobs: Jobs = 1,
    retries: Retries = 0,
    seed: Annotated[int | None, typer.Option(help="Orders arms and places buffers; drawn when left out.")] = None,
) -> None:
    """Run every cell of a matrix, each arm in a process of its own, and keep every row.

    The last line of --json is {"run", "planned", "passed", "wrong", "refused", "crashed", "timed_out", "skipped"}.
    Exit code 0 when all rows passed, were refused or dropped for the budget, 1 when one is wrong, 3 when one crashed or
    timed out. --dry-run rows: {"cell", "hash", "arms", "blocks", "priority", "estimate_s", "dropped_blocks"}.
    """
    from suite.e2e.matrix.planning import cut, dry_run_rows

    plan, name = cut(load(matrix, plant), db, launcher, shard)
    if dry_run:
        rows = dry_run_rows(plan, db, budget, jobs)
        if json:
            print_json_rows(rows)
        else:
            from suite.e2e.report.tables import print_dry_run

            print_dry_run(plan.name, rows)
        return
    finish(execute(plan, db, shard=name, seed=seed, jobs=jobs, retries=retries, budget=budget), db, json)


@app.command(short_help="Show every row of a run: how it ended, and why.")
def show(run: Run = None, db: Db = DEFAULT_DB, json: Json = False, metric: MetricName = None) -> None:
    """Show every row of a run: how it ended, why, and what it measured.

    --json rows: {"cell", "family", "model", "backend", "pool", "label", "launcher", "block", "attempt", "status",
    "reason", "void_reason", "metrics"}; a planted fault is appended to the name of its cell. Only the latest attempt at
    a block is shown.
    """
    show_run(run, db, json, metric)


@app.command(short_help="Compare the unified rows of a run with the static ones.")
def compare(run: Run = None, db: Db = DEFAULT_DB, json: Json = False, metric: MetricName = None) -> None:
    """Compare the unified rows of a run with their cells' static rows, metric by metric.

    --json rows: {"cell", "metric", "static", "unified", "delta", "ratio", "blocks", "verdict"}: medians over the
    blocks, void ones left out. Verdicts: equal, differs, missing, "void: ...", or "not judged: ..." for times, which
    only the gate judges.
    """
    from db.compare import compare_rows
    from db.queries import find_run
    from db.session import open_db
    from suite.e2e.report.tables import print_compare

    engine = open_db(db, create=False)
    run_id = find_run(engine, run)
    rows = compare_rows(engine, run_id, metric)
    if json:
        print_json_rows(rows)
    else:
        print_compare(run_id, rows)


@app.command(short_help="List the backends, and what can execute them here.")
def doctor(json: Json = False) -> None:
    """List the attention backends, and what can execute each of them on this machine.

    --json rows: {"backend", "family", "usable", "launchers", "refusal"}; usable means a native or interpreter launcher.
    """
    from suite.e2e.report.doctor import doctor_rows
    from suite.e2e.report.tables import print_doctor

    rows = doctor_rows()
    if json:
        print_json_rows(rows)
    else:
        print_doctor(rows)


@app.command(short_help="Find who translates ids outside of the owners.")
def scan(
    path: Annotated[Path, typer.Argument(help="A Python file or a folder; the current one when left out.")] = Path("."),
    rules: Annotated[
        str, typer.Option(help="A rule set: kvproof, sglang, or a TOML file of your own.", metavar="NAME|FILE.toml")
    ] = "kvproof",
    json: Json = False,
) -> None:
    """Find who translates ids, probes allocators or imports what only others may, by the syntax tree.

    One line `file:line rule message` per finding; --json rows: {"file", "line", "rule", "message"}. Exit code 0 when
    there is none, 1 when there is one, 4 when a path, a source or a rule cannot be read.
    """
    from suite.scan.rules import load_rules
    from suite.scan.sources import scan as scan_sources

    result = scan_sources(path, load_rules(rules))
    findings = result["findings"]
    if json:
        print_json_rows(findings)
    else:
        for found in findings:
            typer.echo(f"{found['file']}:{found['line']} {found['rule']} {found['message']}")
    typer.echo(f"{len(findings)} finding{'' if len(findings) == 1 else 's'} in {result['files']} files", err=True)
    raise typer.Exit(1 if findings else 0)


@app.command(short_help="Prove the unified pool on this machine.")
def demo(db: Db = DEFAULT_DB) -> None:
    """Prove the unified pool on this machine, and that a planted fault would be caught.

    Exit code 0 exactly when every row passed, except that the planted one is wrong; else 1.
    """
    from db.queries import ended_rows
    from db.session import open_db
    from suite.e2e.report.demo import demo_verdict
    from suite.e2e.report.tables import print_demo

    summary = execute(load(DEMO_MATRIX, DEMO_FAULT), db)
    rows = ended_rows(open_db(db, create=False), summary.run)
    print_demo(summary.run, rows)
    verdict = demo_verdict(rows)
    typer.echo(verdict.text)
    if summary.interrupted:
        raise typer.Exit(summary.exit_code)
    raise typer.Exit(0 if verdict.proved else 1)


def load(matrix: Path, plant: str | None) -> "Plan":
    from suite.e2e.matrix.plan import load_plan, with_plant

    plan = load_plan(matrix)
    return plan if plant is None else with_plant(plan, plant)


def execute(
    plan: "Plan",
    db: str,
    *,
    shard: str | None = None,
    seed: int | None = None,
    jobs: int = 1,
    retries: int = 0,
    budget: float | None = None,
) -> "RunSummary":
    """Run `plan`, telling its progress. Checkpoints and database are checked before any row is planned."""
    from db.session import open_db
    from suite.e2e.matrix.execution import Options
    from suite.e2e.matrix.planning import slots
    from suite.e2e.matrix.preflight import check_models
    from suite.e2e.matrix.run import run_plan
    from suite.e2e.report.progress import ConsoleProgress

    check_models(plan)
    progress = ConsoleProgress(len(plan.jobs()))
    options = Options(progress=progress, gpus=slots(plan, jobs), retries=retries, budget_s=budget)
    return run_plan(plan, open_db(db), options, seed=seed, shard=shard)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs one command and exits with its code."""
    sys.exit(invoke(list(sys.argv[1:] if arguments is None else arguments)))


def invoke(arguments: list[str]) -> int:
    """One command's exit code. An error of the user is one line on stderr; one of ours keeps its traceback."""
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer's own copy of click has no public name for it
    try:
        result = app(arguments or ["--help"], prog_name="kvproof", standalone_mode=False)
    except usage_error as error:
        typer.echo(f"error: {error.format_message()}", err=True)  # type: ignore[attr-defined]
        return InputError.exit_code
    except KvproofError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED_EXIT_CODE
    except SystemExit:  # typer's and rich's way out when the reader of stdout has gone; theirs would be exit code 1
        return BROKEN_PIPE_EXIT_CODE
    except Exception as error:
        from db.session import trouble

        if cause := trouble(error):
            typer.echo(f"error: db: got {cause!r}, expected a database that can be read and written", err=True)
        else:
            traceback.print_exc()  # and not exit code 1, which says that a row is wrong
        return INFRASTRUCTURE_EXIT_CODE
    return result if isinstance(result, int) else 0


cli_db.register(app)
cli_faults.register(app)
cli_gate.register(app)

if __name__ == "__main__":
    main()
