"""What every table is made of: the types that all databases share, constraints by name, and times that are aware."""

import datetime
from typing import Any

from sqlalchemy import JSON, CheckConstraint, Double, LargeBinary, MetaData, String
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

LARGEST_DOUBLE = "1.7976931348623157e308"


class UtcTime(TypeDecorator[datetime.datetime]):
    """An aware time, kept as fixed-width ISO text in UTC, so that text order is time order. Refuses naive times."""

    impl = String(32)
    cache_ok = True

    def process_bind_param(self, value: datetime.datetime | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time: got the naive {value.isoformat()}, expected one with its offset from UTC")
        return value.astimezone(datetime.UTC).isoformat(timespec="microseconds")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime.datetime | None:
        return None if value is None else datetime.datetime.fromisoformat(value)


class Base(DeclarativeBase):
    """Constraints are named by rule, so that migrations can drop them by name on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        str: String(),
        bytes: LargeBinary(),
        float: Double(),
        datetime.datetime: UtcTime(),
        dict[str, Any]: JSON(),
        dict[str, Any] | None: JSON(none_as_null=True),
        list[str]: JSON(),
        list[int]: JSON(),
    }


def one_of(column: str, names: tuple[str, ...], name: str) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(n) for n in names)})", name=name)


def finite(column: str) -> CheckConstraint:
    """Refuses infinities and, where the database can hold one, NaN."""
    return CheckConstraint(f"{column} BETWEEN -{LARGEST_DOUBLE} AND {LARGEST_DOUBLE}", name=f"{column}_finite")
