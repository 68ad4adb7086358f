"""Walks a tree of Python sources and holds every file against the rules."""

import ast
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from suite.errors import InputError
from suite.scan.checks import check_file
from suite.scan.rules import RuleSet

ROOT_MARKERS = (".git", "pyproject.toml")
SKIPPED_FOLDERS = ("__pycache__", "node_modules")  # and hidden ones, and virtual environments


class Finding(TypedDict):
    """One line that breaks a rule. `file` is relative to the current folder where it lies below it."""

    file: str
    line: int
    rule: str
    message: str


class ScanResult(TypedDict):
    """All findings, by file and line, and how many files were read."""

    findings: list[Finding]
    files: int


def scan(path: str | Path, rules: RuleSet) -> ScanResult:
    """Scan the file or folder at `path`.

    Raises InputError for a path that is missing or holds no Python source, and for a source that cannot be read
    or parsed: what was not looked at must not pass for clean.
    """
    start = Path(path)
    if not start.exists():
        raise InputError("path", str(path), "a Python file or a folder that exists")
    base = start.resolve()
    root = root_of(base)
    findings: list[Finding] = []
    files = 0
    with warnings.catch_warnings(), rare_collections():
        warnings.simplefilter("ignore")  # the scanned program's own, such as invalid escape sequences
        for file in sorted(sources(start)):
            relative = (base / file.relative_to(start)).relative_to(root).as_posix()
            if rules.excludes(relative):
                continue
            files += 1
            hits = check_file(parse(file), relative, rules)
            shown = file.as_posix()
            findings += [Finding(file=shown, line=hit.line, rule=hit.rule, message=hit.message) for hit in hits]
    if not files:
        raise InputError("path", str(path), "a Python file, or a folder with Python sources")
    return ScanResult(findings=findings, files=files)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Syntax trees are many objects that live for one file: looking for cycles after every few costs a fifth."""
    before = gc.get_threshold()
    gc.set_threshold(500_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def root_of(path: Path) -> Path:
    """What the globs of the rules are relative to: the checkout around `path`, or else `path`, a file's own folder."""
    folder = path if path.is_dir() else path.parent
    return next((each for each in (folder, *folder.parents) if any((each / m).exists() for m in ROOT_MARKERS)), folder)


def sources(start: Path) -> Iterator[Path]:
    """Python files at or below `start`. Links to folders are not followed."""
    if start.is_file():
        yield start
        return
    for folder, names, files in os.walk(start, onerror=_unreadable):
        names[:] = [name for name in names if not _skipped(Path(folder) / name)]
        yield from (Path(folder) / name for name in files if name.endswith(".py"))


def parse(file: Path) -> ast.Module:
    """The syntax tree of `file`; InputError with its line when this Python cannot parse it."""
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise InputError("path", str(file), f"a readable file ({error.strerror})") from error
    except SyntaxError as error:
        raise InputError("path", f"{file}:{error.lineno or 1}", f"source that {python} parses ({error.msg})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            "path", str(file), f"source that {python} parses ({str(error) or 'it nests too deep'})"
        ) from error


def _skipped(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in SKIPPED_FOLDERS
    return hidden or (folder / "pyvenv.cfg").exists()


def _unreadable(error: OSError) -> None:
    raise InputError("path", str(error.filename), f"a readable folder ({error.strerror})") from error
