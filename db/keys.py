"""Keys and times of the facts.

Dimensions (cell, arm, environment, ...) are keyed by the hash of their content, so that the same
thing has the same key on every machine. Facts (runs, rows, comparisons) are keyed by UUIDv7: unique
everywhere, and sorted by the time they were made.
"""

import datetime
import os
import time
import uuid


def uuid7() -> str:
    """A UUID of version 7 (RFC 9562): 48 bits of Unix milliseconds, 12 bits of their fraction, 62 random bits."""
    ms, rest_ns = divmod(time.time_ns(), 1_000_000)
    fraction = (rest_ns << 12) // 1_000_000
    random = int.from_bytes(os.urandom(8), "big") >> 2
    return str(uuid.UUID(int=(ms << 80) | (0x7 << 76) | (fraction << 64) | (0b10 << 62) | random))


def utc_now() -> datetime.datetime:
    """The time now, aware, in UTC."""
    return datetime.datetime.now(datetime.UTC)
