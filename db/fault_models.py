"""The table of detection runs: what became of every planted fault, and of its clean twin."""

import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.base import Base, finite


class FaultTrial(Base):
    """One fault planted once, in the detection run `detection_id`. It was caught where an expected signal fired.

    `size` is how large the mistake is, where it has a number; `signals` all that fired, by name, `first_signal` the
    first expected one with its values; `fresh` says that the pool was fresh and nothing moved in it.
    """

    __tablename__ = "fault_trial"
    __table_args__ = (
        UniqueConstraint("detection_id", "fault"),
        Index(None, "fault", "started_at"),
        CheckConstraint("caught = (first_signal IS NOT NULL)", name="caught"),
        CheckConstraint("seconds >= 0 AND gpu_seconds >= 0", name="times"),
        *(finite(column) for column in ("size", "seconds", "gpu_seconds")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    detection_id: Mapped[str]
    code_rev_id: Mapped[str] = mapped_column(ForeignKey("code_rev.id"))
    started_at: Mapped[datetime.datetime]
    device: Mapped[str]
    seed: Mapped[int]
    fresh: Mapped[bool]
    fault: Mapped[str]
    kind: Mapped[str]
    seam: Mapped[str]
    size: Mapped[float | None]
    expected: Mapped[list[str]]
    signals: Mapped[list[str]]
    first_signal: Mapped[str | None]
    caught: Mapped[bool]
    clean_twin_passed: Mapped[bool]
    seconds: Mapped[float]
    gpu_seconds: Mapped[float]
