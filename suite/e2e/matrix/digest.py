"""What the database keeps of an arm's logits: enough to compare it exactly with any later row, in a few kB.

The arms of a block are held against each other on the whole logits, which stay in the spool. Kept are,
of every run of consecutive positions, the CRC-32 of its bytes and the smallest distance between the two
largest values: equal digests are equal logits, the first unequal one is where two rows part, and the gap
there says whether a rounding could have turned the choice.
"""

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from suite.records import Outcome, Samples

MAX_DIGESTS = 1024
WHOLE = {"logits": "logit", "output": "output"}  # samples that the arms are compared by, and what their digests name


def bounded(outcome: Outcome) -> Outcome:
    """`outcome` with the digests of its logits or outputs in their place."""
    samples: list[Samples] = []
    for sample in outcome.samples:
        samples += digests(sample) if sample.metric in WHOLE else [sample]
    return replace(outcome, samples=tuple(samples))


def digests(sample: Samples) -> list[Samples]:
    """`NAME_digest` [parts] uint32, and for logits `NAME_gap` [parts], of the rows of `sample`."""
    name, values = WHOLE[sample.metric], sample.unpack()
    rows = values.reshape(len(values), -1) if values.ndim > 1 else values.reshape(-1, 1)
    parts = split(rows)
    crcs = [zlib.crc32(np.ascontiguousarray(part).tobytes()) for part in parts]
    kept = [Samples.pack(f"{name}_digest", np.array(crcs, dtype=np.uint32), "zlib+u4le")]
    if sample.metric == "logits" and rows.shape[1] > 1:
        kept.append(Samples.pack(f"{name}_gap", [smallest_gap(part) for part in parts]))
    return kept


def split(rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """At most MAX_DIGESTS parts of consecutive rows, all but the last of one length."""
    each = -(-len(rows) // MAX_DIGESTS) or 1
    return [rows[start : start + each] for start in range(0, len(rows), each)]


def smallest_gap(rows: npt.NDArray[Any]) -> float:
    """Smallest distance between a row's two largest values; NaN when one has none."""
    top = np.partition(rows, -2, axis=1)[:, -2:]
    with np.errstate(invalid="ignore"):
        return float((top[:, 1] - top[:, 0]).min())
