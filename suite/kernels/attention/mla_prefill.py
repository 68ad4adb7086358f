"""Expanded MLA prefill: new tokens among themselves, then prefix chunks, merged by their log-sum-exp.

The up-projection turns latent rows into ordinary keys and values of every head; it belongs to the model
and comes in as `expand`. A long prefix would not fit when expanded at once, so it is read in chunks of a
token budget. Their kernel ids are translated where the chunks are made, once per batch, and kept for all
layers; the read door takes them as they are. The sum equals absorbed attention up to rounding.
"""

import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from suite.errors import InputError, RefusedError
from suite.kernels.batch import ForwardBatch
from suite.kernels.ids import KernelIds, KVKind, require_kernel
from suite.kernels.pools import KVPool
from suite.kernels.translator import KVIndexTranslator
from suite.kernels.upload import upload
from suite.records import Launcher

# latent rows [tokens, latent + rope] -> keys [tokens, heads, qk_dim], values [tokens, heads, v_dim]
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Attended = tuple[torch.Tensor, torch.Tensor]  # values [tokens, heads, v_dim] fp32, log-sum-exp [tokens, heads] fp32


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixChunk:
    """Some prefix tokens of every request, requests in order: their rows, and how many each has.

    cu_lens: [batch + 1] int32. A request whose prefix ended in an earlier chunk has none.
    """

    ids: KernelIds
    cu_lens: torch.Tensor
    lens_host: tuple[int, ...]


def read_latent(pool: KVPool, layer: int, ids: KernelIds) -> torch.Tensor:
    """The read door: latent rows [tokens, width] of `layer` at kernel ids, passed through untranslated.

    TypeError for ids of another space.
    """
    rows = require_kernel(ids, pool.geometry.kind_of(layer), f"read of layer {layer}")
    return pool.latent_view(layer).index_select(0, rows)


class MlaPrefill:
    """Expanded attention of one runner. `chunk_tokens`: prefix tokens over all requests that may be expanded at once.

    Launchers: `reference` in fp32 anywhere, `native` by FA3 on sm_90. RefusedError where that cannot run.
    """

    def __init__(self, *, pool: KVPool, translator: KVIndexTranslator, launcher: Launcher, chunk_tokens: int) -> None:
        if chunk_tokens < 1:
            raise InputError("chunk_tokens", chunk_tokens, "a positive number of tokens")
        if reason := launcher_refusal(launcher, pool.device.type):
            raise RefusedError(reason)
        self.pool, self.translator, self.chunk_tokens = pool, translator, chunk_tokens
        self._attend = attend_fa3 if launcher == "native" else attend_reference
        self._memo: tuple[weakref.ref[ForwardBatch], int, tuple[PrefixChunk, ...]] | None = None

    def chunks(self, batch: ForwardBatch) -> tuple[PrefixChunk, ...]:
        """The batch's prefix chunks, made and translated once; a page that moved since makes new ones."""
        mutations = self.translator.allocator.mutations
        if self._memo is not None and self._memo[0]() is batch and self._memo[1] == mutations:
            return self._memo[2]
        prefix = [s - q for s, q in zip(batch.seq_lens_host, batch.query_lens_host, strict=True)]
        page, share = self.translator.page_size, max(1, self.chunk_tokens // batch.size)
        step = max(share // page * page, min(share, page))  # whole pages, when the budget has any
        made = tuple(self._chunk(batch, prefix, first, step) for first in range(0, max(prefix), step))
        self._memo = weakref.ref(batch), mutations, made
        return made

    def forward(
        self,
        layer: int,
        batch: ForwardBatch,
        q: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        expand: Expand,
    ) -> torch.Tensor:
        """Write the new latent rows [tokens, width] and attend q [tokens, heads, qk_dim] over prefix and new tokens.

        Causal among the new tokens. Returns [tokens, heads, v_dim] in q's dtype.
        """
        self.pool.write(layer, batch.write_ids, rows[:, None], None)
        offsets = batch.cu_query_lens, max(batch.query_lens_host)
        merged = self._attend(q, *expand(rows), *offsets, *offsets, scale, True)
        for chunk in self.chunks(batch):
            keys, values = expand(read_latent(self.pool, layer, chunk.ids))
            part = self._attend(q, keys, values, *offsets, chunk.cu_lens, max(chunk.lens_host), scale, False)
            merged = merge(merged, part)
        return merged[0].to(q.dtype)

    def _chunk(self, batch: ForwardBatch, prefix: list[int], first: int, step: int) -> PrefixChunk:
        """Positions first to first + step - 1 of every prefix, as far as it reaches."""
        lens = tuple(min(max(length - first, 0), step) for length in prefix)
        indptr = list(accumulate(lens, initial=0))
        device = self.pool.device
        packed = upload([first] * batch.size + indptr, device, torch.int32)
        starts, cu_lens = packed.split([batch.size, batch.size + 1])
        ids = torch.empty(indptr[-1], dtype=torch.int64, device=device)
        self.translator.fill_read_stream(batch, KVKind.FULL, starts, cu_lens, ids)
        return PrefixChunk(ids=KernelIds(ids, KVKind.FULL), cu_lens=cu_lens, lens_host=lens)


def merge(one: Attended, other: Attended) -> Attended:
    """Attention over two disjoint sets of keys -> over both. A set without keys has log-sum-exp -inf."""
    lse = torch.logaddexp(one[1], other[1])
    # a query that saw no key at all has no weights: exp(-inf - -inf) is NaN
    weights = [torch.where(part[1] == -torch.inf, 0, (part[1] - lse).exp()).unsqueeze(-1) for part in (one, other)]
    return one[0] * weights[0] + other[0] * weights[1], lse


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_query_lens: torch.Tensor,
    max_query_len: int,
    cu_key_lens: torch.Tensor,
    max_key_len: int,
    scale: float,
    causal: bool,
) -> Attended:
    """fp32, request after request: q [tokens, heads, qk_dim] over k [keys, heads, qk_dim], v [keys, heads, v_dim].

    Causal queries are the newest of their request's keys.
    """
    out = torch.zeros(*q.shape[:2], v.shape[2], device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    queries, keys = cu_query_lens.tolist(), cu_key_lens.tolist()
    for request in range(len(queries) - 1):
        mine, seen = (slice(*bounds[request : request + 2]) for bounds in (queries, keys))
        if seen.start == seen.stop:
            continue
        scores = torch.einsum("qhd,khd->qhk", q[mine].float(), k[seen].float()) * scale
        if causal:
            count, total = scores.shape[0], scores.shape[2]
            position = torch.arange(total - count, total, device=q.device)[:, None, None]
            scores = scores.masked_fill(torch.arange(total, device=q.device) > position, -torch.inf)
        lse[mine] = scores.logsumexp(-1)
        out[mine] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v[seen].float())
    return out, lse


def attend_fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_query_lens: torch.Tensor,
    max_query_len: int,
    cu_key_lens: torch.Tensor,
    max_key_len: int,
    scale: float,
    causal: bool,
) -> Attended:
    """The same by FA3's ragged kernel, whose log-sum-exp is [heads, tokens]."""
    from sgl_kernel.flash_attn import flash_attn_varlen_func  # a GPU library, loaded by whoever launches it

    out, lse, *_ = flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_query_lens,
        cu_seqlens_k=cu_key_lens,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_key_len,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
    )
    lse = lse.transpose(0, 1)
    # without a key the kernel's log-sum-exp is infinite, of either sign
    empty = (cu_key_lens.diff() == 0).repeat_interleave(cu_query_lens.diff(), output_size=q.shape[0])[:, None]
    return out.float().masked_fill(empty[:, None], 0.0), lse.float().masked_fill(empty, -torch.inf)


def launcher_refusal(launcher: Launcher, device: str) -> str | None:
    """Why `launcher` cannot execute expanded prefill on `device`, with need and got; None when it can."""
    if launcher == "reference":
        return None
    if launcher != "native":
        return f"mla_prefill: needs launcher native or reference, got {launcher}"
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    if capability != (9, 0):
        got = device if capability is None else f"sm_{capability[0]}{capability[1]}"
        return f"mla_prefill: needs sm_90, got {got}"
    if importlib.util.find_spec("sgl_kernel") is None:
        return "mla_prefill: needs the package sglang-kernel, got none installed"
    return None
