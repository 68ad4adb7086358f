"""CSR metadata of a batch, eager or captured, for the backends that read row streams.

The host knows every length, so all integers of a batch travel in one pinned upload. A captured batch
keeps them, its row streams and its write ids in buffers that are refilled in place: a graph replays
their addresses, so they are allocated once and never rebound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from suite.errors import InputError
from suite.kernels.attention.base import CsrMetadata, CsrStream
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.ids import KernelIds, KVKind
from suite.kernels.translator import KVIndexTranslator
from suite.kernels.upload import upload


def window_start(seq_len: int, query_len: int, window: int) -> int:
    """The first position that any of a request's `query_len` newest tokens can see through `window`."""
    return max(0, seq_len - query_len - window + 1)


def plan_csr(batch: ForwardBatch, translator: KVIndexTranslator) -> CsrMetadata:
    """Metadata of one eager forward, in fresh tensors."""
    host = _host_integers(batch, translator)
    device = translator.req_to_token.device
    return _metadata(
        batch,
        translator,
        integers=upload(host, device, torch.int32),
        indices={
            kind: torch.empty(_total(batch, translator, kind), dtype=torch.int32, device=device)
            for kind in _kinds(translator)
        },
        write_ids={kind: _written(batch, kind) for kind in _kinds(translator)},
        max_seq_len=batch.max_seq_len,
    )


class CsrCapture:
    """The stable buffers of captured decodes, and verifies of `draft_tokens` new tokens per request; zero-filled.

    Both modes, and all sizes up to `max_batch` requests, share them: a replay refills what its own graph reads.
    """

    def __init__(self, translator: KVIndexTranslator, max_batch: int, draft_tokens: int = 1) -> None:
        self.limits = CaptureLimits(max_batch=max_batch, draft_tokens=draft_tokens)
        self.translator = translator
        self.context = translator.req_to_token.shape[1]
        device = translator.req_to_token.device
        window = translator.pool.geometry.window
        seen = 0 if window is None or window.window is None else window.window + draft_tokens - 1
        longest = {KVKind.FULL: self.context, KVKind.WINDOW: min(self.context, seen)}
        self.integers = torch.zeros(6 * max_batch + 3, dtype=torch.int32, device=device)
        self.indices = {
            kind: torch.zeros(max_batch * longest[kind], dtype=torch.int32, device=device)
            for kind in _kinds(translator)
        }
        self.write_ids = {
            kind: torch.zeros(max_batch * draft_tokens, dtype=torch.int64, device=device) for kind in _kinds(translator)
        }

    def refill(self, batch: ForwardBatch) -> CsrMetadata:
        """Metadata of `batch` in the stable buffers; the same addresses for every batch of its size and mode."""
        self.limits.require(batch)
        host = _host_integers(batch, self.translator)
        integers = self.integers[: len(host)]
        integers.copy_(upload(host, integers.device, torch.int32))
        return _metadata(
            batch,
            self.translator,
            integers=integers,
            indices=self.indices,
            write_ids={kind: refill_write_ids(self.write_ids[kind], batch, kind) for kind in self.write_ids},
            max_seq_len=self.context,
        )


@dataclass(frozen=True, kw_only=True)
class CaptureLimits:
    """What stable buffers hold: requests, and new tokens of each where a batch verifies. InputError for none."""

    max_batch: int
    draft_tokens: int

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise InputError("max_batch", self.max_batch, "a positive number of requests")
        if self.draft_tokens < 1:
            raise InputError("draft_tokens", self.draft_tokens, "a positive number of new tokens per request")

    def require(self, batch: ForwardBatch) -> None:
        """InputError unless `batch` is a decode or verify batch that fits."""
        if batch.mode is ForwardMode.EXTEND:
            raise InputError("batch.mode", str(batch.mode), "decode or verify, the captured modes")
        if batch.size > self.max_batch:
            raise InputError("batch.size", batch.size, f"at most {self.max_batch}, what was captured")
        if batch.mode is ForwardMode.VERIFY and batch.query_lens_host[0] != self.draft_tokens:
            raise InputError("query_lens", batch.query_lens_host[0], f"{self.draft_tokens}, the captured draft tokens")


def refill_write_ids(stable: torch.Tensor, batch: ForwardBatch, kind: KVKind) -> torch.Tensor:
    """Copy the batch's write ids of `kind` into the head of `stable`; the tail becomes the sink."""
    written = _written(batch, kind)
    stable[written.numel() :].zero_()  # a larger batch's ids would still be live slots
    return stable[: written.numel()].copy_(written)


def host_indptr(batch: ForwardBatch, translator: KVIndexTranslator, kind: KVKind) -> list[int]:
    """[batch + 1] offsets of the requests' streams of sub-pool `kind`, without asking the device."""
    starts = _starts(batch, translator, kind)
    return list(accumulate((s - start for s, start in zip(batch.seq_lens_host, starts, strict=True)), initial=0))


# -- inside ----------------------------------------------------------------------------------------


def _kinds(translator: KVIndexTranslator) -> Iterator[KVKind]:
    return (pool.kind for pool in translator.pool.geometry.pools)


def _written(batch: ForwardBatch, kind: KVKind) -> torch.Tensor:
    ids = batch.write_ids if kind is KVKind.FULL else batch.window_write_ids
    if ids is None:
        raise TypeError("this batch has no window write ids, but its runner has a window pool")
    return ids.tensor


def _starts(batch: ForwardBatch, translator: KVIndexTranslator, kind: KVKind) -> list[int]:
    if kind is KVKind.FULL:
        return [0] * batch.size
    window = translator.pool.geometry.of(kind).window or 0
    return [window_start(s, q, window) for s, q in zip(batch.seq_lens_host, batch.query_lens_host, strict=True)]


def _total(batch: ForwardBatch, translator: KVIndexTranslator, kind: KVKind) -> int:
    return sum(batch.seq_lens_host) - sum(_starts(batch, translator, kind))


def _host_integers(batch: ForwardBatch, translator: KVIndexTranslator) -> list[int]:
    """[batch] seq_lens, [batch + 1] cu_query_lens, then per sub-pool [batch] starts and [batch + 1] indptr."""
    host = [*batch.seq_lens_host, *accumulate(batch.query_lens_host, initial=0)]
    for kind in _kinds(translator):
        host += [*_starts(batch, translator, kind), *host_indptr(batch, translator, kind)]
    return host


def _metadata(
    batch: ForwardBatch,
    translator: KVIndexTranslator,
    *,
    integers: torch.Tensor,
    indices: dict[KVKind, torch.Tensor],
    write_ids: dict[KVKind, torch.Tensor],
    max_seq_len: int,
) -> CsrMetadata:
    """Slice the uploaded integers and fill every sub-pool's stream."""
    sizes = [batch.size, batch.size + 1]
    seq_lens, cu_query_lens, *per_kind = integers.split(sizes * (1 + len(indices)))
    streams: dict[KVKind, CsrStream] = {}
    for at, kind in enumerate(indices):
        starts, indptr = per_kind[2 * at : 2 * at + 2]
        translator.fill_read_stream(batch, kind, starts, indptr, indices[kind])
        streams[kind] = CsrStream(indptr=indptr, indices=indices[kind], starts=starts)
    window_ids = write_ids.get(KVKind.WINDOW)
    return CsrMetadata(
        mode=batch.mode,
        seq_lens=seq_lens,
        cu_query_lens=cu_query_lens,
        max_query_len=max(batch.query_lens_host),
        max_seq_len=max_seq_len,
        write_ids=KernelIds(write_ids[KVKind.FULL], KVKind.FULL),
        window_write_ids=None if window_ids is None else KernelIds(window_ids, KVKind.WINDOW),
        full=streams[KVKind.FULL],
        window=streams.get(KVKind.WINDOW),
    )
