"""The command `gate`: decide on a run, make a decision again, override one, pin a release."""

from pathlib import Path
from typing import Annotated

import typer

from suite.cli_options import DEFAULT_DB, Db, Json, Run, print_json_line
from suite.errors import InputError, KvproofError

ReportFile = Path | None


def register(app: typer.Typer) -> None:
    app.command(short_help="Decide whether a run passes a policy.")(gate)


def gate(
    run: Run = None,
    policy: Annotated[Path | None, typer.Option(help="The policy to decide by.", metavar="POLICY.toml")] = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
    junit: Annotated[ReportFile, typer.Option(help="Write a JUnit report there.", metavar="FILE")] = None,
    markdown: Annotated[ReportFile, typer.Option(help="Write a pull request's comment there.", metavar="FILE")] = None,
    replay: Annotated[str | None, typer.Option(help="Make this stored decision again.", metavar="ID")] = None,
    override: Annotated[str | None, typer.Option(help="Let this decision pass.", metavar="ID")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Pin RUN as the release to watch for creep.")] = False,
    by: Annotated[str | None, typer.Option(help="Who overrides or pins.", metavar="NAME")] = None,
    reason: Annotated[str | None, typer.Option(help="Why.", metavar="TEXT")] = None,
) -> None:
    """Decide whether a run passes a policy: PASS, FAIL or INCONCLUSIVE, per cell and overall, and keep the decision.

    A run appends to the earlier runs of its matrix at its revision. --replay makes a decision again from its stored
    inputs and compares every bit. Exit code 0 pass, 1 regression, 2 inconclusive, 3 no data, infrastructure or a replay
    that differs, 4 bad input. --json: {"decision", "verdict", "exit_code", "reason", "cells", ...}.
    """
    given = {"policy": policy, "replay": replay, "override": override, "pin": pin or None}
    modes = [name for name, value in given.items() if value is not None]
    if len(modes) != 1:
        raise InputError("gate", modes, "exactly one of --policy, --replay, --override and --pin")
    for name, value in (("by", by), ("reason", reason)):
        if (value is None) == (modes[0] in ("override", "pin")):
            expected = "a text" if value is None else "nothing: only --override and --pin have one"
            raise InputError(name, value, expected)
    if run is not None and modes[0] in ("replay", "override"):
        raise InputError("run", run, f"no run: --{modes[0]} names a decision, which has one")
    try:
        report(modes[0], run, policy, db, json, junit, markdown, replay or override or "", by or "", reason or "")
    except KvproofError as error:
        if junit is not None:
            from suite.e2e.gate.emit import junit_refusal, write

            write(junit, "junit", junit_refusal(str(error)))
        raise


def report(
    mode: str,
    run: str | None,
    policy: Path | None,
    db: str,
    json: bool,
    junit: Path | None,
    markdown: Path | None,
    decision: str,
    by: str,
    reason: str,
) -> None:
    """Do what `mode` says, and print the decision it leads to in every form that is asked for."""
    from db.decisions import pin_release, store_override
    from db.queries import find_run
    from db.session import open_db
    from suite.e2e.gate import emit, service
    from suite.e2e.gate.policy import load_policy

    rules = load_policy(policy) if policy is not None else None
    engine = open_db(db, create=False)
    if mode == "pin":
        run_id = find_run(engine, run)
        pinned = pin_release(engine, run_id, by, reason)
        print_json_line({"run": run_id, "pinned": pinned}) if json else typer.echo(
            f"run {run_id}: {pinned} series pinned"
        )
        return
    differences: tuple[str, ...] = ()
    extra = {}
    if mode == "replay":
        again = service.replay(engine, decision)
        kept, differences = again.stored, again.differences
        extra = {
            "replay": {"agrees": not differences, "differences": differences, "engine_changed": again.engine_changed}
        }
        changed = " (by other code than then)" if again.engine_changed else ""
        typer.echo(f"replay {'differs' if differences else 'agrees, bit for bit'}{changed}", err=True)
        for difference in differences[:20]:
            typer.echo(difference, err=True)
    elif mode == "override":
        kept = service.read_decision(engine, store_override(engine, decision, by, reason))
    else:
        assert rules is not None
        kept = service.run_gate(engine, run, rules)
    if junit is not None:
        emit.write(junit, "junit", emit.junit(kept))
    if markdown is not None:
        emit.write(markdown, "markdown", emit.markdown(kept))
    print_json_line({**emit.as_json(kept), **extra}) if json else emit.print_table(kept)
    raise typer.Exit(3 if differences else kept.exit_code)
