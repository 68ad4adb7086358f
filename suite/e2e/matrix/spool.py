"""The files of a run in progress: what children were asked, what they answered, and how they ended.

An outcome counts once the parent that saw its child end has noted it here (`concluded.json`); whatever
else lies about is of a child whose end nobody saw, and is run again. A resumed run therefore takes up
the very outcomes that the killed one had, and loses or doubles none.
"""

import contextlib
import datetime
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from suite.errors import KvproofError
from suite.records import CellJob, Outcome, Record, content_hash

SPOOL = "kvproof-spool"
CONCLUDED, CHILD = "concluded.json", "child"


class SpoolError(KvproofError):
    """The spool cannot be written: no space, no right. The run stays resumable."""


class Concluded(Record):
    """How one child ended, as its parent saw it."""

    started_at: datetime.datetime
    outcome: Outcome


class Spool:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, run_id: str, beside: Path | None) -> "Spool":
        """In the folder `beside`, the results file's, or among the system's temporary files."""
        return cls((beside or Path(tempfile.gettempdir())) / f"{SPOOL}-{run_id}")

    @classmethod
    def again(cls, folder: str | None, run_id: str, beside: Path | None) -> "Spool":
        """The spool that a run left at `folder`; an empty one where that is gone."""
        return cls(Path(folder)) if folder and Path(folder).is_dir() else cls.of(run_id, beside)

    def create(self) -> None:
        with spool_errors():
            self.folder.mkdir(exist_ok=True)

    def block_folder(self, job: CellJob, attempt: int) -> Path:
        return self.folder / f"{content_hash(job.cell)}-{job.block}-{attempt}"

    def job_folder(self, job: CellJob, attempt: int) -> Path:
        return self.block_folder(job, attempt) / content_hash(job.arm)

    def fresh(self, job: CellJob, attempt: int) -> Path:
        """An empty folder for one child, of a name that no other had: a child nobody waits for may still write."""
        folder = self.job_folder(job, attempt)
        with spool_errors():
            folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(dir=folder))

    def conclude(self, job: CellJob, attempt: int, concluded: Concluded) -> None:
        path = self.job_folder(job, attempt) / CONCLUDED
        partial = path.with_suffix(".partial")
        with spool_errors():
            partial.write_bytes(msgspec.json.encode(concluded))
            partial.replace(path)

    def concluded(self, job: CellJob, attempt: int) -> Concluded | None:
        """How the child of `job` ended; None when nobody saw it end, or a power cut left half of the note."""
        try:
            return msgspec.json.decode((self.job_folder(job, attempt) / CONCLUDED).read_bytes(), type=Concluded)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def drop(self, job: CellJob, attempt: int) -> None:
        """Forget the block of `job`, whose rows are in."""
        shutil.rmtree(self.block_folder(job, attempt), ignore_errors=True)

    def end_orphans(self) -> None:
        """End every child of a parent that is gone."""
        for note in self.folder.glob(f"*/*/*/{CHILD}"):
            end_orphan(note.parent)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def spool_errors() -> Iterator[None]:
    """What the disk refuses, as one error."""
    try:
        yield
    except OSError as error:
        raise SpoolError(f"spool: got {error}, expected a folder that can be written") from error


def note_child(folder: Path, pid: int) -> None:
    """Remember the child at work in `folder`, with when it began: process ids come again."""
    (folder / CHILD).write_text(f"{pid} {began(pid)}")


def end_orphan(folder: Path) -> None:
    """SIGKILL to the group of the child noted in `folder`, when it is still that child."""
    try:
        pid, when = (folder / CHILD).read_text().split()
    except (FileNotFoundError, ValueError):  # it never started, or its note was never finished
        return
    if began(int(pid)) == when:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), signal.SIGKILL)


def began(pid: int) -> str:
    """When process `pid` began, in clock ticks since boot; "gone" when there is none that runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return "gone" if fields[0] in "ZX" else fields[19]
