"""One forward pass over a batch of requests: what runs, where it reads, where it writes.

The scheduler speaks virtual ids. `ForwardBatch.create` is the one place where the write loc is
translated, once; everything after it holds kernel ids.
"""

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from suite.errors import InputError
from suite.kernels.ids import KernelIds, VirtualIds, require_virtual
from suite.kernels.upload import upload

if TYPE_CHECKING:
    from suite.kernels.translator import KVIndexTranslator


class ForwardMode(enum.StrEnum):
    """EXTEND writes and attends any number of new tokens per request, DECODE exactly one, VERIFY as many for each.

    A verify's new tokens are drafts: causal among themselves, which of them stay is decided after the forward.
    """

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """One forward. `tokens` counts new tokens over all requests, requests in order, `batch` the requests.

    input_ids, positions: [tokens] int64. req_rows: [batch] int64 rows of `req_to_token`; row 0 is the
    padding request, all sink. seq_lens: [batch] int32, new tokens included. cu_query_lens: [batch + 1]
    int32. The host copies spare every reader a device synchronisation.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_rows: torch.Tensor
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    seq_lens_host: tuple[int, ...]
    query_lens_host: tuple[int, ...]
    virtual_write_ids: VirtualIds
    write_ids: KernelIds
    window_write_ids: KernelIds | None

    @property
    def size(self) -> int:
        return len(self.seq_lens_host)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens_host)

    def as_lanes(self) -> "ForwardBatch":
        """The same reads and writes with one query per request: lane t is new token t of its own request.

        For kernels that attend one query per table row: lane t sees the positions up to its own. A decode batch.
        """
        tokens = self.input_ids.numel()
        request = torch.repeat_interleave(
            self.cu_query_lens.diff(), output_size=tokens
        )  # told the size, it does not wait
        pairs = zip(self.seq_lens_host, self.query_lens_host, strict=True)
        return replace(
            self,
            mode=ForwardMode.DECODE,
            req_rows=self.req_rows[request],
            seq_lens=(self.positions + 1).to(torch.int32),
            cu_query_lens=torch.arange(tokens + 1, dtype=torch.int32, device=self.positions.device),
            seq_lens_host=tuple(seq_len - query_len + 1 + i for seq_len, query_len in pairs for i in range(query_len)),
            query_lens_host=(1,) * tokens,
        )

    @classmethod
    def create(
        cls,
        *,
        mode: ForwardMode,
        input_ids: list[int],
        req_rows: list[int],
        seq_lens: list[int],
        query_lens: list[int],
        virtual_write_ids: VirtualIds,
        translator: "KVIndexTranslator",
    ) -> "ForwardBatch":
        """Build the batch and translate its write loc. Lengths in tokens; seq_lens include the query.

        Raises InputError for lengths that do not describe one forward, TypeError for ids that are not virtual.
        """
        _check_lengths(mode, len(input_ids), req_rows, seq_lens, query_lens)
        written = require_virtual(virtual_write_ids, "ForwardBatch.create(virtual_write_ids)")
        if written.shape != (len(input_ids),):
            raise InputError("virtual_write_ids", tuple(written.shape), f"({len(input_ids)},), one per new token")
        positions = [s - q + i for s, q in zip(seq_lens, query_lens, strict=True) for i in range(q)]
        offsets = [0]
        for length in query_lens:
            offsets.append(offsets[-1] + length)
        # one pinned upload for every integer of the batch
        n, b = len(input_ids), len(seq_lens)
        packed = upload([*input_ids, *positions, *req_rows, *seq_lens, *offsets], written.device)
        ids, pos, rows, lens, cu = packed.split([n, n, b, b, b + 1])
        return cls(
            mode=mode,
            input_ids=ids,
            positions=pos,
            req_rows=rows,
            seq_lens=lens.to(torch.int32),
            cu_query_lens=cu.to(torch.int32),
            seq_lens_host=tuple(seq_lens),
            query_lens_host=tuple(query_lens),
            virtual_write_ids=virtual_write_ids,
            write_ids=translator.write_loc(virtual_write_ids),
            window_write_ids=translator.sliding_window_write_loc_for(virtual_write_ids),
        )


def _check_lengths(
    mode: ForwardMode, tokens: int, req_rows: list[int], seq_lens: list[int], query_lens: list[int]
) -> None:
    if not seq_lens or not len(seq_lens) == len(query_lens) == len(req_rows):
        raise InputError(
            "batch", (len(req_rows), len(seq_lens), len(query_lens)), "as many rows as lengths, at least one"
        )
    for seq_len, query_len in zip(seq_lens, query_lens, strict=True):
        if not 1 <= query_len <= seq_len:
            raise InputError("query_lens", query_len, f"1 to {seq_len}, the tokens of its request")
    if sum(query_lens) != tokens:
        raise InputError("query_lens", sum(query_lens), f"a sum of {tokens}, the new tokens")
    if mode is ForwardMode.DECODE and set(query_lens) != {1}:
        raise InputError("query_lens", max(query_lens), "1 for every request of a decode batch")
    if mode is ForwardMode.VERIFY and len(set(query_lens)) != 1:
        raise InputError("query_lens", tuple(query_lens), "as many for every request of a verify batch")
