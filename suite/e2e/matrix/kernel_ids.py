"""Cells of what lies between ids and rows: the KV write, and the three translations of a batch.

They are exact or wrong. Both run our own operations: Triton on a GPU, their torch twins on a CPU.
"""

import statistics

import torch

from suite.e2e.matrix.kernel_attention import picked
from suite.e2e.matrix.kernel_rig import KernelRig
from suite.e2e.matrix.kernel_times import Times, bandwidth, metrics_of, times_us
from suite.errors import RefusedError
from suite.kernels.geometry import AttentionLayer
from suite.kernels.ids import KernelIds, KVKind
from suite.records import Cell, KernelWorkload, Metric, PoolMode


class _IdsBench:
    """A filled pool; `written` gives the write ids of its batch by kind."""

    def __init__(self, cell: Cell, workload: KernelWorkload, pool: PoolMode) -> None:
        if cell.backend != "triton":
            raise RefusedError(f"{workload.op}: needs backend triton, whose operations these are, got {cell.backend}")
        launcher = "native" if cell.device == "cuda" else "reference"
        if cell.launcher != launcher:
            raise RefusedError(f"{workload.op}: needs launcher {launcher} on {cell.device}, got {cell.launcher}")
        self.library = "triton" if launcher == "native" else "torch"
        self.rig = KernelRig(cell, workload, pool)
        self.moved_share = self.rig.moved_share

    def written(self, layer: AttentionLayer) -> KernelIds:
        batch = self.rig.batch
        ids = batch.write_ids if layer.kind is KVKind.FULL else batch.window_write_ids
        assert ids is not None  # a window layer has a window pool
        return ids

    def rows_at(self, layer: AttentionLayer, ids: torch.Tensor) -> torch.Tensor:
        """Stored rows [tokens, K and V elements] at kernel ids."""
        pool = self.rig.allocator.pool
        views = [pool.k_view(layer.index)] if layer.is_latent else [pool.k_view(layer.index), pool.v_view(layer.index)]
        return torch.cat([view[ids].flatten(1) for view in views], 1)

    def rows_of(self, layer: AttentionLayer, request: int, first: int) -> torch.Tensor:
        """The rows that a request's positions from `first` on must hold."""
        k, v = self.rig.rows(layer, request)
        return torch.cat([side[first:].flatten(1) for side in ((k,) if layer.is_latent else (k, v))], 1)


class WriteBench(_IdsBench):
    """The newest rows of every request are stored; `kv_bytes` are those read and written."""

    def check(self) -> tuple[torch.Tensor, float]:
        queries, kept, is_exact = self.rig.workload.query_tokens, [], True
        for layer in self.rig.kinds:
            ids, (k, v) = self.written(layer), self.rig.newest(layer)
            self.rig.allocator.pool.write(layer.index, ids, torch.zeros_like(k), None if v is None else v * 0)
            self.rig.allocator.pool.write(layer.index, ids, k, v)
            for request in picked(self.rig.workload.batch):
                mine = ids.tensor[request * queries : (request + 1) * queries]
                kept.append(self.rows_at(layer, mine))
                is_exact &= torch.equal(kept[-1], self.rows_of(layer, request, -queries))
        return torch.cat([rows.float().cpu().flatten() for rows in kept]), 0.0 if is_exact else float("inf")

    def time(self) -> tuple[dict[str, Metric], Times]:
        metrics: dict[str, Metric] = {}
        raw: Times = {}
        workload, pool = self.rig.workload, self.rig.allocator.pool
        for layer in self.rig.kinds:
            ids, (k, v) = self.written(layer), self.rig.newest(layer)
            times = times_us(lambda: pool.write(layer.index, ids, k, v), self.rig.device, workload.samples)  # noqa: B023
            moved = 2 * workload.batch * workload.query_tokens * pool.geometry.of(layer.kind).layer_bytes
            metrics |= metrics_of({"write_us": times}, layer.kind)
            metrics[f"kv_bytes.{layer.kind}"] = Metric.of("kv_bytes", moved, 1)
            metrics |= bandwidth(moved, statistics.median(times), len(times), self.rig.device, layer.kind)
            raw[f"write_us.{layer.kind}"] = times
        return metrics, raw


class TranslateBench(_IdsBench):
    """The batch's read table, its read stream and its write loc, each told by the rows that they lead to."""

    def check(self) -> tuple[torch.Tensor, float]:
        workload, kept, is_exact = self.rig.workload, [], True
        for layer in self.rig.kinds:
            stream, written = self._stream(layer.kind)[0], self._write_loc(layer.kind)
            for request in picked(workload.batch):
                reads = stream[request * workload.tokens : (request + 1) * workload.tokens]
                writes = written[request * workload.query_tokens : (request + 1) * workload.query_tokens]
                for ids, first in ((reads, 0), (writes, -workload.query_tokens)):
                    kept.append(self.rows_at(layer, ids)[:, :8])
                    is_exact &= torch.equal(kept[-1], self.rows_of(layer, request, first)[:, :8])
        return torch.cat([rows.float().cpu().flatten() for rows in kept]), 0.0 if is_exact else float("inf")

    def time(self) -> tuple[dict[str, Metric], Times]:
        metrics: dict[str, Metric] = {}
        raw: Times = {}
        rig, size = self.rig, self.rig.allocator.pool.geometry.page_size
        for kind in [layer.kind for layer in rig.kinds]:
            table = torch.zeros(rig.workload.batch, rig.translator.columns, dtype=torch.int32, device=rig.device)
            stream, starts, indptr = self._stream(kind)
            has_map = rig.translator.read_map(kind)[0] is not None
            source = rig.translator.index_table_for_batch(rig.batch)  # memoised: the stream's own time apart
            work = {
                "table_us": lambda: rig.translator.fill_read_table(rig.batch, kind, table),  # noqa: B023
                "stream_us": lambda: rig.translator.fill_read_stream(rig.batch, kind, starts, indptr, stream),  # noqa: B023
            }
            if has_map:  # without one nothing is launched
                work["write_loc_us"] = lambda: self._write_loc(kind)  # noqa: B023
            times = {name: times_us(run, rig.device, rig.workload.samples) for name, run in work.items()}
            assert rig.translator.index_table_for_batch(rig.batch) is source
            # an int32 token id and an int32 entry per column, an int64 of the page map where there is one
            moved = rig.workload.batch * -(-rig.workload.tokens // size) * (16 if has_map else 8)
            metrics |= metrics_of(times, kind) | {f"index_bytes.{kind}": Metric.of("index_bytes", moved, 1)}
            us = statistics.median(times["table_us"])
            metrics |= bandwidth(moved, us, len(times["table_us"]), rig.device, kind)
            raw |= {f"{name}.{kind}": values for name, values in times.items()}
        return metrics, raw

    def _stream(self, kind: KVKind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids of every position of every request, starts, indptr)."""
        rig, workload = self.rig, self.rig.workload
        out = torch.empty(workload.batch * workload.tokens, dtype=torch.int32, device=rig.device)
        starts = torch.zeros(workload.batch, dtype=torch.int32, device=rig.device)
        indptr = torch.arange(workload.batch + 1, dtype=torch.int32, device=rig.device) * workload.tokens
        rig.translator.fill_read_stream(rig.batch, kind, starts, indptr, out)
        return out, starts, indptr

    def _write_loc(self, kind: KVKind) -> torch.Tensor:
        virtual, translator = self.rig.batch.virtual_write_ids, self.rig.translator
        if kind is KVKind.FULL:
            return translator.write_loc(virtual).tensor
        ids = translator.sliding_window_write_loc_for(virtual)
        assert ids is not None
        return ids.tensor
