"""The contract of the attention backends: five verbs, in this order, in every file.

`refusal` before anything is allocated, `plan` for an eager forward, `capture` and `replay` for a
captured one, `forward` to write the new K/V and attend. There is no fallback and no automatic
choice: what cannot serve says why, with need and got.

Metadata carries its index layout (a page table or a CSR stream), complete: with it and the pool
alone, `reference.py` can execute any backend's forward.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch

from suite.errors import RefusedError
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.ids import KernelIds, KVKind
from suite.kernels.pools import KVPool
from suite.kernels.translator import KVIndexTranslator
from suite.records import Launcher, PoolMode


@dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """What every layout has. seq_lens, cu_query_lens: int32 [batch], [batch + 1]; seq_lens include the query."""

    mode: ForwardMode
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    write_ids: KernelIds
    window_write_ids: KernelIds | None

    def write_ids_of(self, kind: KVKind) -> KernelIds:
        ids = self.write_ids if kind is KVKind.FULL else self.window_write_ids
        if ids is None:
            raise TypeError("this batch has no window write ids: its runner has no window pool")
        return ids


@dataclass(frozen=True, kw_only=True, eq=False)
class PageTableMetadata(Metadata):
    """Layout *page table*: entry [request, c] is the page of positions c * page_size on.

    int32 [batch, columns], pages counted in blocks of `page_size` rows. What lies past a request's last
    page may be stale and must not be read. The window table has the same columns; pages that left the
    window are the sink.
    """

    page_size: int
    page_table: torch.Tensor
    window_page_table: torch.Tensor | None

    def table_of(self, kind: KVKind) -> torch.Tensor:
        table = self.page_table if kind is KVKind.FULL else self.window_page_table
        if table is None:
            raise TypeError("this batch has no window page table: its runner has no window pool")
        return table


@dataclass(frozen=True, kw_only=True, eq=False)
class CsrStream:
    """Layout *CSR*: `indices[indptr[r] + i]` is the row of position `starts[r] + i` of request r. All int32."""

    indptr: torch.Tensor
    indices: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CsrMetadata(Metadata):
    """Layout CSR for both sub-pools. The window stream starts where the first query's window does."""

    full: CsrStream
    window: CsrStream | None


class AttentionBackend(abc.ABC):
    """One attention backend on one runner. Subclasses implement the five verbs and `launchers`."""

    name: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        """What could execute this backend on `device` ("cpu" or "cuda"): launcher -> None, or why not here."""

    @classmethod
    @abc.abstractmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        """Why this backend cannot serve, with need and got; None when it can. Called before anything is allocated."""

    def __init__(self, *, pool: KVPool, translator: KVIndexTranslator, launcher: Launcher, sinks: bool) -> None:
        if reason := self.refusal(pool.geometry, pool.mode, pool.device.type, launcher, sinks):
            raise RefusedError(reason)
        self.pool, self.translator, self.launcher = pool, translator, launcher

    @classmethod
    def launcher_refusal(cls, device: str, launcher: Launcher) -> str | None:
        """Why `launcher` cannot execute this backend on `device`; None when it can."""
        known = cls.launchers(device)
        if launcher not in known:
            return f"{cls.name}: needs launcher {' or '.join(known)}, got {launcher}"
        return known[launcher]

    @abc.abstractmethod
    def plan(self, batch: ForwardBatch) -> Metadata:
        """Metadata of one eager forward."""

    @abc.abstractmethod
    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        """Allocate the stable buffers of captured decode batches of up to `max_batch` requests, zero-filled.

        They serve captured verifies of `draft_tokens` new tokens per request as well.
        """

    @abc.abstractmethod
    def replay(self, batch: ForwardBatch) -> Metadata:
        """Refill the stable buffers for a (padded) decode or verify batch, outside the graph; never rebinds one.

        The returned metadata has the same addresses for every batch of the same size and mode. A padding request
        is as long as its new tokens, all sink.
        """

    @abc.abstractmethod
    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        """Write k, v [tokens, kv_heads, head_dim] and attend q [tokens, q_heads, head_dim].

        v is None for latent layers, whose rows k hold both. Returns [tokens, q_heads, out_dim] in q's dtype.
        """
