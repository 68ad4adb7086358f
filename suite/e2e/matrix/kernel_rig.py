"""What a kernel cell runs on: a filled pool whose pages a ballast has moved apart, and one planned batch.

Keys, values and queries depend on seed, layer and request alone, so both arms hold the same numbers
wherever their pages lie.
"""

import random

import torch

from suite.e2e.engine.pools import build_allocator
from suite.e2e.matrix.device import DTYPES
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry, pages_for
from suite.kernels.ids import VirtualIds
from suite.kernels.shapes import attention_layers
from suite.kernels.translator import KVIndexTranslator
from suite.records import Cell, KernelWorkload, PoolMode

FORWARD_MODES = {"decode": ForwardMode.DECODE, "verify": ForwardMode.VERIFY}
BALLAST_SHARE = 0.75  # of the requests' pages; as many of those move when it is given back


class KernelRig:
    """A filled pool and a batch of `workload`, for every layer of the cell's shape."""

    def __init__(self, cell: Cell, workload: KernelWorkload, pool_mode: PoolMode) -> None:
        self.workload, self.device, self.dtype = workload, torch.device(cell.device), DTYPES[cell.dtype]
        self.layers = attention_layers(cell.model, cell.device)
        geometry = RunnerGeometry.from_layers(self.layers, self.dtype, cell.page_size)
        each = pages_for(workload.tokens, cell.page_size)
        ballast = max(4, int(workload.batch * each * BALLAST_SHARE))
        self.allocator = build_allocator(
            geometry, pool_mode, workload.batch * each + ballast, workload.tokens, self.device
        )
        self.pages = self._scatter(each, ballast, cell.seed)
        table = self._req_to_token(cell.page_size, each)
        self.translator = KVIndexTranslator(pool=self.allocator.pool, allocator=self.allocator, req_to_token=table)
        self.seed = cell.seed
        self._fill(table)
        self.batch = self._batch(table)

    @property
    def kinds(self) -> list[AttentionLayer]:
        """One layer of each kind."""
        return list({layer.kind: layer for layer in self.layers}.values())

    def moved_share(self) -> tuple[float, int]:
        """Share of the requests' pages that the packing has moved, and of how many."""
        moved = [span.relocated[request].mean() for span in self.allocator.spans for request in self.pages]
        return (float(sum(moved) / len(moved)), len(moved) * len(self.pages[0])) if moved else (0.0, 0)

    def rows(self, layer: AttentionLayer, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, kv_heads, dim] of one request."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + layer.index * 10_007 + request)
        shape = (self.workload.tokens, layer.kv_heads, layer.head_dim)
        k = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        if layer.is_latent:
            return k, k[..., : layer.out_dim]
        return k, torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def queries(self, layer: AttentionLayer) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 999_983 + layer.index)
        shape = (self.workload.batch * self.workload.query_tokens, layer.q_heads, layer.head_dim)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def newest(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows that the forward itself writes: each request's newest."""
        pairs = [self.rows(layer, request) for request in range(self.workload.batch)]
        k, v = (
            torch.cat([side[-self.workload.query_tokens :] for side in sides]) for sides in zip(*pairs, strict=True)
        )
        return k, None if layer.is_latent else v

    def _scatter(self, each: int, ballast: int, seed: int) -> list[list[int]]:
        """Pages of every request, allocated between ballast that is given back and packed over."""
        spare = self.allocator.alloc(ballast)
        pages = [self.allocator.alloc(each) for _ in range(self.workload.batch)]
        random.Random(seed).shuffle(spare)
        self.allocator.free(spare)
        self.allocator.compact(urgent=True)  # all of it: a lazy pass stops at its limit
        for request in pages:
            random.Random(seed + request[0]).shuffle(request)
        return pages

    def _req_to_token(self, page_size: int, each: int) -> torch.Tensor:
        pages = torch.tensor([[0] * each, *self.pages], device=self.device)
        return (pages[:, :, None] * page_size + torch.arange(page_size, device=self.device)).flatten(1).int()

    def _fill(self, table: torch.Tensor) -> None:
        pool = self.allocator.pool
        for request in range(self.workload.batch):
            ids = VirtualIds(table[request + 1, : self.workload.tokens].long())
            full, window = self.translator.write_loc(ids), self.translator.sliding_window_write_loc_for(ids)
            for layer in self.layers:
                k, v = self.rows(layer, request)
                pool.write(layer.index, full if layer.window is None else window, k, None if layer.is_latent else v)

    def _batch(self, table: torch.Tensor) -> ForwardBatch:
        batch, tokens, queries = self.workload.batch, self.workload.tokens, self.workload.query_tokens
        return ForwardBatch.create(
            mode=FORWARD_MODES.get(self.workload.op, ForwardMode.EXTEND),
            input_ids=[0] * (batch * queries),
            req_rows=list(range(1, batch + 1)),
            seq_lens=[tokens] * batch,
            query_lens=[queries] * batch,
            virtual_write_ids=VirtualIds(table[1:, tokens - queries : tokens].flatten().long()),
            translator=self.translator,
        )
