"""Writes docs/cli.md, the help of every command: `python -m suite.cli_docs`. A test holds the page to the code."""

from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from suite.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
WIDTH = 100
HEAD = """# Commands

What `kvproof COMMAND --help` prints. Written by `python -m suite.cli_docs`; change the commands, not this page.

Data goes to stdout, progress to stderr. Every command ends with one of these, and its help says what is special to it:

| exit code | it means |
| --- | --- |
| 0 | good |
| 1 | a row is wrong, a regression, a finding, a fault that was missed, a broken invariant |
| 2 | `gate` only: inconclusive |
| 3 | something crashed, timed out or could not be decided for want of data |
| 4 | bad input: one line names the field, the value and what was expected |
| 130 | interrupted; `kvproof resume` goes on |
| 141 | nobody reads stdout any more |
"""


def commands() -> dict[tuple[str, ...], Any]:
    """Every command by its words, groups of commands included, in the order of the help."""

    def below(words: tuple[str, ...], command: Any) -> dict[tuple[str, ...], Any]:
        found = {words: command}
        for name, inner in getattr(command, "commands", {}).items():
            found |= below((*words, name), inner)
        return found

    return below((), get_command(app))


def help_text(words: tuple[str, ...]) -> str:
    """What `kvproof WORDS --help` prints on a terminal of `WIDTH` columns."""
    shown = CliRunner().invoke(
        app, [*words, "--help"], prog_name="kvproof", env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH)}
    )
    return shown.output.strip()


def page() -> str:
    """The whole page."""
    sections = [f"## {' '.join(('kvproof', *words))}\n\n```\n{help_text(words)}\n```\n" for words in commands()]
    return "\n".join((HEAD, *sections))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
