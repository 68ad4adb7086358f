"""What one forward of linear attention needs to know, eager or captured.

The mode decides which fields exist: prefill has chunks and sources, verify has scratch rows.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

from suite.errors import InputError
from suite.kernels.batch import ForwardMode
from suite.kernels.ops.delta_chunk import CHUNK, ChunkPlan
from suite.kernels.pools.state import SKIP, KernelSlots, VerifyScratch, require_kernel_slots
from suite.kernels.upload import upload


class LinearMode(enum.StrEnum):
    DECODE = "decode"
    EXTEND = "extend"
    VERIFY = "verify"


class BatchShape(Protocol):
    """What a plan needs of a `ForwardBatch`."""

    mode: ForwardMode
    cu_query_lens: torch.Tensor
    seq_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tracking:
    """Snapshots that a prefill takes on its way: after `tokens[i]` new tokens of request `requests[i]`, a multiple of
    the chunk, the state goes to slot `slots[i]` as well."""

    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    slots: KernelSlots


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearMetadata:
    """slots, rows: int64 [batch]. cu_query_lens: int32 [batch + 1]. parents: int32 [batch, draft_tokens] or None.

    EXTEND: `sources` are the slots that hold a state already, -1 where the request begins; `rows` the batch
    positions, -1 for a skipped slot. VERIFY: `rows` are scratch rows.
    """

    mode: LinearMode
    cu_query_lens: torch.Tensor
    max_query_len: int
    slots: KernelSlots
    rows: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    chunks: ChunkPlan | None = None
    parents: torch.Tensor | None = None
    tracking: "TrackedRows | None" = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TrackedRows:
    """`Tracking` on the device: for each snapshot its slot, and the chunk (or, at the very end, the request) whose
    state it is, -1 for the other; window: the packed tokens of its convolution window, [snapshots, width]."""

    slots: torch.Tensor
    chunks: torch.Tensor
    requests: torch.Tensor
    window: torch.Tensor


def tracked_rows(tracking: Tracking, chunks: ChunkPlan, width: int) -> TrackedRows:
    """`tracking` on the device; `width` is the convolution window's. InputError for what no chunk ends at."""
    begins, total = [], 0
    for length in chunks.query_lens_host:
        begins.append(total)
        total += length
    at_chunk, at_request, window = [], [], []
    for request, tokens in zip(tracking.requests, tracking.tokens, strict=True):
        length = chunks.query_lens_host[request]
        if tokens % CHUNK or not 0 < tokens <= length:
            raise InputError("tracking.tokens", tokens, f"a multiple of {CHUNK} up to {length}, its new tokens")
        at_chunk.append(chunks.cu_chunks_host[request] + tokens // CHUNK if tokens < length else SKIP)
        at_request.append(request if tokens == length else SKIP)
        window.append([begins[request] + tokens - width + i for i in range(width)])
    slots = require_kernel_slots(tracking.slots, "tracking.slots")
    if slots.shape != (len(window),):
        raise InputError("tracking.slots", tuple(slots.shape), f"({len(window)},), one per snapshot")
    rows = upload([at_chunk, at_request], slots.device)
    return TrackedRows(slots=slots, chunks=rows[0], requests=rows[1], window=upload(window, slots.device))


class CapturedLinear:
    """Stable slots, rows and offsets of captured batches; refilled in place, never rebound."""

    def __init__(self, device: torch.device, max_batch: int, tokens: int) -> None:
        self.max_batch, self.tokens = max_batch, tokens
        self.slots = torch.full((max_batch,), SKIP, dtype=torch.int64, device=device)
        self.rows = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.cu_query_lens = torch.arange(0, (max_batch + 1) * tokens, tokens, dtype=torch.int32, device=device)

    def refill(
        self, mode: LinearMode, batch: BatchShape, slots: torch.Tensor, scratch: VerifyScratch | None
    ) -> LinearMetadata:
        size = len(batch.query_lens_host)
        if size > self.max_batch or set(batch.query_lens_host) != {self.tokens} or slots.shape != (size,):
            raise InputError(
                "batch",
                (size, batch.query_lens_host, tuple(slots.shape)),
                f"at most {self.max_batch} requests of {self.tokens} new tokens and a slot each, as captured",
            )
        self.slots[:size].copy_(slots)
        if scratch is not None:
            self.rows[:size].copy_(scratch.rows(slots))
        return LinearMetadata(
            mode=mode,
            cu_query_lens=self.cu_query_lens[: size + 1],
            max_query_len=self.tokens,
            slots=KernelSlots(self.slots[:size]),
            rows=self.rows[:size] if mode is LinearMode.VERIFY else None,
        )


def mode_of(batch: BatchShape, verify: bool) -> LinearMode:
    """The mode of a forward; its engine says whether it verifies drafts."""
    if verify:
        return LinearMode.VERIFY
    return LinearMode.DECODE if batch.mode is ForwardMode.DECODE else LinearMode.EXTEND
