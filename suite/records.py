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
Speculation = Literal["none", "scripted", "simulated", "ngram", "model", "dspark", "dflash"]
SPECULATIONS: tuple[Speculation, ...] = ("none", "scripted", "simulated", "ngram", "model", "dspark", "dflash")
BLOCK_DRAFTS: tuple[Speculation, ...] = ("dspark", "dflash")  # a block in one pass, fed with the target's features
POOL_MODES: tuple[PoolMode, ...] = ("static", "unified", "unified_token_major")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A frozen value that refuses fields it does not know.

    A field at its default is not written, so a field added with one leaves the hashes of older values as they were.
    Therefore a default never changes.
    """


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
    "accept_length": MetricKind(unit="tokens", better="higher"),  # committed per verify, the bonus token included
    "accept_rate": MetricKind(unit="share", better="higher"),  # accepted of proposed drafts
    "cached_tokens": MetricKind(unit="tokens", better="neither"),
    "retractions": MetricKind(unit="requests", better="lower"),
    "largest_batch": MetricKind(unit="requests", better="higher"),
    "steps": MetricKind(unit="steps", better="lower"),
    "live_bytes": MetricKind(unit="B", better="neither"),
    "fragmented_bytes": MetricKind(unit="B", better="neither"),
    "free_pages": MetricKind(unit="pages", better="neither"),
    "compact_ms": MetricKind(unit="ms", better="lower", timing=True),
    "error_ratio": MetricKind(unit="ratio", better="lower"),  # error against fp32 over the earned tolerance
    "max_output_diff": MetricKind(unit="output", better="zero"),
    "kv_bytes": MetricKind(unit="B", better="neither"),
    "index_bytes": MetricKind(unit="B", better="neither"),  # of ids that a read table reads and writes
    "state_bytes": MetricKind(unit="B", better="neither"),  # of recurrent state that a layer reads and writes
    "layer_us": MetricKind(unit="us", better="lower", timing=True),  # write the new rows and attend, one layer
    "write_us": MetricKind(unit="us", better="lower", timing=True),
    "metadata_us": MetricKind(unit="us", better="lower", timing=True),
    "table_us": MetricKind(unit="us", better="lower", timing=True),
    "stream_us": MetricKind(unit="us", better="lower", timing=True),
    "write_loc_us": MetricKind(unit="us", better="lower", timing=True),
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

    Requests come all at once, or `arrivals_per_step` on average (Poisson). `shared_tokens` of a prompt are a tree's:
    half of them are everybody's, the rest one of `branches`. A conversation has `turns`, each `turn_tokens` behind
    the last answer. `long_requests` of `long_tokens` come between two waves of the others in a mix shift, whose
    static pool is `sized_for` one of the two mixes; the unified pool gets the same bytes.

    `pool_share` is the share of the pages of a full batch that there are: below 1 requests are retracted. `mixed`
    puts prefill chunks beside decoding requests. `speculation` verifies `draft_tokens` drafts at once: `scripted`
    ones are right as often as `script` says, `simulated` ones count as right that often whatever the target says.
    `draft` is the folder of the draft; block drafts are looked for in the target's folder where it is None.
    `language` is what prompts are texts of. Under an accept length of `min_accept_length` the row is `wrong`.
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
    arrivals_per_step: float | None = None
    shared_tokens: int = 0
    branches: int = 1
    turns: int = 1
    turn_tokens: int = 16
    long_requests: int = 0
    long_tokens: int = 0
    sized_for: Literal["short", "long"] | None = None
    pool_share: float | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    prefix_cache: bool = False
    mixed: bool = False
    speculation: Speculation = "none"
    draft_tokens: int = 0
    script: tuple[int, ...] = ()
    draft: str | None = None
    fused_draft: bool = False
    language: str = "copy"
    min_accept_length: float | None = None


KernelOp = Literal["decode", "extend", "verify", "write", "translate", "state_decode", "state_prefill", "state_verify"]
KERNEL_OPS: tuple[KernelOp, ...] = (
    "decode",
    "extend",
    "verify",
    "write",
    "translate",
    "state_decode",
    "state_prefill",
    "state_verify",
)


class KernelWorkload(Record, frozen=True, tag="kernel", tag_field="kind"):
    """What one layer is asked in a kernel cell: operation `op` on `batch` requests of `tokens` tokens, the newest
    `query_tokens` of each being the new ones (one of a decode). `samples` timings are taken, with the L2 flushed.
    """

    name: str
    batch: int
    tokens: int
    query_tokens: int = 1
    samples: int = 50
    op: KernelOp = "decode"


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
    """The pool mode compared inside a cell, and the faults planted into it (none in a real run).

    A label tells apart arms that are the same on purpose: the noise of a pair is measured on two static arms (A/A').
    """

    pool: PoolMode
    plants: tuple[str, ...] = ()
    label: Literal["replicate"] | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the other arms of the cell are held to this one."""
        return self.pool == "static" and not self.plants and self.label is None


class CellJob(Record, frozen=True):
    """What the parent hands to one child process.

    `placement_seed` draws where the buffers lie, anew for every arm of every block; None leaves it to the allocator.
    Over `memory_gib` of host memory the child is ended.
    """

    cell: Cell
    arm: Arm
    block: int
    timeout_s: float
    placement_seed: int | None = None
    memory_gib: float | None = None


class Metric(Record, frozen=True):
    """One measured value with its unit and the number of observations behind it."""

    value: float
    unit: str
    n: int

    @classmethod
    def of(cls, name: str, value: float, n: int) -> "Metric":
        """`value` in the unit of metric `name`. KeyError when that is unknown."""
        return cls(value=float(value), unit=metric_kind(name).unit, n=n)


SAMPLE_DTYPES = {"zlib+f4le": "<f4", "zlib+u4le": "<u4"}


class Samples(Record, frozen=True):
    """Raw observations of one metric, row-major in `shape`: float32 (or uint32) little-endian, zlib-compressed."""

    metric: str
    shape: tuple[int, ...]
    data: bytes
    sha256: str
    codec: Literal["zlib+f4le", "zlib+u4le"] = "zlib+f4le"

    @classmethod
    def pack(
        cls, metric: str, values: npt.ArrayLike, codec: Literal["zlib+f4le", "zlib+u4le"] = "zlib+f4le"
    ) -> "Samples":
        array = np.ascontiguousarray(values, dtype=SAMPLE_DTYPES[codec])
        raw = array.tobytes()
        digest = hashlib.sha256(raw).hexdigest()
        return cls(metric=metric, shape=array.shape, data=zlib.compress(raw, 1), sha256=digest, codec=codec)

    def unpack(self) -> npt.NDArray[Any]:
        """The observations; ValueError when the bytes are not those that were packed."""
        raw = zlib.decompress(self.data)
        if hashlib.sha256(raw).hexdigest() != self.sha256:
            raise ValueError(f"samples of {self.metric}: the stored bytes do not match their sha256")
        return np.frombuffer(raw, dtype=SAMPLE_DTYPES[self.codec]).reshape(self.shape)


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


class Guards(Record, frozen=True):
    """What must be alike in the arms of a block for their times to be compared, as the child saw it.

    `sm_mhz` are the SM clocks right before and after the timed window, `throttle` NVML's reasons in it (a bit mask),
    `compiles` the kernels compiled in it; all three None where nobody can tell. `kernels` names the attention kernels
    where known. `padding_bytes` are the allocations that put the buffers where they were.
    """

    gpu_uuid: str | None = None
    sm_mhz: tuple[float, float] | None = None
    throttle: int | None = None
    compiles: int | None = None
    kernels: tuple[str, ...] = ()
    padding_bytes: tuple[int, ...] = ()


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
    guards: Guards | None = None
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
