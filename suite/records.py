"""Every value that is hashed, stored or crosses a process.

A *cell* is one point of the matrix; an *arm* is the pool mode compared inside
it; a *block* is one fresh paired run of the arms. The parent writes one
`CellJob` as JSON, the child answers with one `Outcome`; both refuse unknown
fields, so a typo is an error and never a default.
"""

import hashlib
import zlib
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Status = Literal["passed", "wrong", "refused", "crashed", "timed_out", "skipped"]
STATUSES: tuple[Status, ...] = ("passed", "wrong", "refused", "crashed", "timed_out", "skipped")
Launcher = Literal["native", "interpreter", "reference"]
LAUNCHERS: tuple[Launcher, ...] = ("native", "interpreter", "reference")
PoolMode = Literal["static", "unified", "unified_token_major"]
POOL_MODES: tuple[PoolMode, ...] = ("static", "unified", "unified_token_major")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frozen value that refuses fields it does not know."""


class MetricKind(Record, frozen=True):
    """What a metric is: its unit, which direction is better, and whether it is a time."""

    unit: str
    better: Literal["higher", "lower", "zero", "neither"]
    timing: bool = False  # dropped from every row that is not `passed`: a wrong result has no latency


METRICS: dict[str, MetricKind] = {
    "accuracy": MetricKind(unit="share", better="higher"),
    "mean_loglikelihood": MetricKind(unit="nat", better="higher"),
    "max_logit_diff": MetricKind(unit="logit", better="zero"),
    "token_mismatches": MetricKind(unit="tokens", better="zero"),
    "itl_ms": MetricKind(unit="ms", better="lower", timing=True),
    "ttft_ms": MetricKind(unit="ms", better="lower", timing=True),
    "tok_per_s": MetricKind(unit="tok/s", better="higher", timing=True),
    "moved_share": MetricKind(unit="share", better="neither"),
    "pages_moved": MetricKind(unit="pages", better="neither"),
    "generated_tokens": MetricKind(unit="tokens", better="neither"),
    "error_ratio": MetricKind(unit="ratio", better="lower"),  # error against fp32 over the earned tolerance
    "max_output_diff": MetricKind(unit="output", better="zero"),
    "kv_bytes": MetricKind(unit="B", better="neither"),
    "layer_us": MetricKind(unit="us", better="lower", timing=True),  # write the new rows and attend, one layer
    "write_us": MetricKind(unit="us", better="lower", timing=True),
    "metadata_us": MetricKind(unit="us", better="lower", timing=True),
    "tb_per_s": MetricKind(unit="TB/s", better="higher", timing=True),
    "copy_share": MetricKind(unit="share", better="higher", timing=True),
}


def metric_kind(name: str) -> MetricKind:
    """The kind of metric `name`; `accuracy.recall` is a kind of `accuracy`. KeyError when unknown."""
    return METRICS[name.partition(".")[0]]


class Workload(Record, frozen=True, tag="engine", tag_field="kind"):
    """What the engine serves in one cell. Lengths are tokens.

    `tasks` maps the name of an accuracy task to its number of items. `requests` prompts of
    `prompt_tokens` are decoded for `new_tokens`, at most `batch` at once, prefilled in chunks of at
    most `chunk_tokens`. `min_accuracy` is the floor under which the row is `wrong`.
    """

    name: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    batch: int
    chunk_tokens: int
    tasks: dict[str, int] = {}
    min_accuracy: float | None = None
    timing_repeats: int = 3


class KernelWorkload(Record, frozen=True, tag="kernel", tag_field="kind"):
    """What one attention layer is asked in a kernel cell: `batch` requests of `tokens` tokens, the newest
    `query_tokens` of each being the queries (1 is a decode). `samples` timings are taken, with the L2 flushed.
    """

    name: str
    batch: int
    tokens: int
    query_tokens: int = 1
    samples: int = 50


class Cell(Record, frozen=True):
    """One point of the matrix, without the arm. Its hash is its identity across runs and machines.

    `model` is a checkpoint in the engine family, a named shape of `suite.kernels.shapes` in the kernel family.
    """

    family: Literal["engine", "kernel"]
    model: str
    backend: str
    launcher: Launcher
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    page_size: int
    graph: bool
    seed: int
    workload: Workload | KernelWorkload


class Arm(Record, frozen=True):
    """The pool mode compared inside a cell, and the faults planted into it (none in a real run)."""

    pool: PoolMode
    plants: tuple[str, ...] = ()


class CellJob(Record, frozen=True):
    """What the parent hands to one child process."""

    cell: Cell
    arm: Arm
    block: int
    timeout_s: float


class Metric(Record, frozen=True):
    """One measured value with its unit and the number of observations behind it."""

    value: float
    unit: str
    n: int

    @classmethod
    def of(cls, name: str, value: float, n: int) -> "Metric":
        """`value` in the unit of metric `name`. KeyError when that is unknown."""
        return cls(value=float(value), unit=metric_kind(name).unit, n=n)


class Samples(Record, frozen=True):
    """Raw observations of one metric, float32 little-endian, zlib-compressed, row-major in `shape`."""

    metric: str
    shape: tuple[int, ...]
    data: bytes
    sha256: str

    @classmethod
    def pack(cls, metric: str, values: npt.ArrayLike) -> "Samples":
        array = np.ascontiguousarray(values, dtype="<f4")
        raw = array.tobytes()
        return cls(metric=metric, shape=array.shape, data=zlib.compress(raw, 1), sha256=hashlib.sha256(raw).hexdigest())

    def unpack(self) -> npt.NDArray[np.float32]:
        """The observations; ValueError when the bytes are not those that were packed."""
        raw = zlib.decompress(self.data)
        if hashlib.sha256(raw).hexdigest() != self.sha256:
            raise ValueError(f"samples of {self.metric}: the stored bytes do not match their sha256")
        return np.frombuffer(raw, dtype="<f4").reshape(self.shape)


class ItemOutcome(Record, frozen=True):
    """One question's outcome. The hashes are of the texts, so an item keeps its name across runs."""

    task: str
    doc_hash: str
    prompt_hash: str
    target_hash: str
    correct: bool
    answer: str


class Provenance(Record, frozen=True):
    """What ran: everything that two rows must share to be compared."""

    python: str
    torch: str
    triton: str
    platform: str
    device_name: str
    driver: str | None
    cuda: str | None
    kernel_library: str | None
    kernel_version: str | None
    commit: str | None
    dirty: bool | None


class Outcome(Record, frozen=True):
    """What one child measured. `status` decides which fields may exist: only `passed` keeps timings."""

    status: Status
    reason_code: str | None = None
    reason: str | None = None
    launcher: Launcher | None = None  # what did execute the attention; requested one stands in the cell
    provenance: Provenance | None = None
    effective: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}
    samples: tuple[Samples, ...] = ()
    items: tuple[ItemOutcome, ...] = ()
    prompt_hash: str | None = None
    duration_s: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    stderr_tail: str | None = None


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes on every machine."""
    return msgspec.json.encode(value, order="sorted")


def content_hash(value: object) -> str:
    """The first 32 hex digits of the sha256 of `canonical_json(value)`: the key of a dimension row."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]
