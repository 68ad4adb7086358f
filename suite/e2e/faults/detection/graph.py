"""Graph faults: a captured forward reads the addresses of its capture, so what is not refilled there is stale."""

from dataclasses import replace
from typing import Any

import torch

from suite.e2e.faults.detection.layers import PAGE_TABLE, REFERENCE, layers
from suite.e2e.faults.detection.serving import serving
from suite.e2e.faults.fault import plants
from suite.kernels.batch import ForwardMode

READ, WRITE, NARROW = "metadata.wrong_read_row", "metadata.wrong_write_row", "metadata.too_narrow"
DIFFERS = "judge.outputs_differ"
LOGITS, NAN = "judge.logits_differ", "engine.not_finite"
SERVED, TABLES = layers(REFERENCE), layers(PAGE_TABLE)
CSR, TABLE = "suite.kernels.attention.csr:CsrCapture", "suite.kernels.attention.page_table:PageTableCapture"


@plants(
    "graph", "suite.kernels.attention.reference:ReferenceBackend.replay", SERVED, READ, NARROW, DIFFERS, source="B27"
)
def replay_without_refill(own: Any) -> Any:
    """after the capture nothing is refilled: every replay reads what the first one did"""
    first: dict[tuple[int, int], Any] = {}

    def stale(self: Any, batch: Any) -> Any:
        key = (id(self), batch.size)
        if key not in first:
            first[key] = own(self, batch)
        return first[key]

    return stale


@plants("graph", f"{CSR}.refill", SERVED, READ, DIFFERS, source="U6", smoke=True)
def stream_buffers_rebound(own: Any) -> Any:
    """row streams are put into fresh tensors at every replay; the graph goes on reading the captured ones"""

    def rebound(self: Any, batch: Any) -> Any:
        self.indices = {kind: torch.empty_like(stable) for kind, stable in self.indices.items()}
        return own(self, batch)

    return rebound


@plants("graph", f"{TABLE}.refill", TABLES, READ, NARROW, DIFFERS, source="U6")
def tables_rebound(own: Any) -> Any:
    """page tables are built anew at every replay; the graph goes on reading the captured ones"""

    def rebound(self: Any, batch: Any) -> Any:
        self.tables = self.translator.make_capture_tables(self.limits.max_batch)
        return own(self, batch)

    return rebound


@plants("graph", f"{TABLE}._fill", TABLES, READ, DIFFERS, source="B27")
def replay_fills_no_page_table(own: Any) -> Any:
    """a replay refills lengths and write ids, and no page table: all zeros, the sink for everybody"""
    return lambda self, batch, kind, table: None


@plants("graph", f"{TABLE}._fill", TABLES, READ, DIFFERS, source="U5")
def window_table_kept_from_capture(own: Any) -> Any:
    """a replay refills the full table, the window table stays as it was first filled"""

    def full_only(self: Any, batch: Any, kind: Any, table: torch.Tensor) -> None:
        if kind.value == "full" or not bool(table.any()):
            own(self, batch, kind, table)

    return full_only


@plants("graph", f"{CSR}.refill", SERVED, READ, NARROW, "attention.invariant", DIFFERS, source="B30")
def lengths_kept_from_the_batch_before(own: Any) -> Any:
    """streams are refilled, the lengths and offsets beside them are those of the replay before"""

    def stale(self: Any, batch: Any) -> Any:
        before = self.integers.clone()
        metadata = own(self, batch)
        if bool(before.any()):
            self.integers.copy_(before)
        return metadata

    return stale


@plants("graph", "suite.kernels.attention.csr:refill_write_ids", SERVED, WRITE, DIFFERS, source="U27")
def write_ids_kept_from_the_batch_before(own: Any) -> Any:
    """the captured write ids are refilled once and then kept"""

    def stale(stable: torch.Tensor, batch: Any, kind: Any) -> torch.Tensor:
        written = batch.write_ids.tensor.numel()
        return own(stable, batch, kind) if not bool(stable.any()) else stable[:written]

    return stale


@plants(
    "graph",
    "suite.kernels.attention.csr:refill_write_ids",
    SERVED,
    "metadata.padding_writes",
    source="B28",
    severity=1,
)
def padding_keeps_live_write_ids(own: Any) -> Any:
    """after a larger batch, padded lanes still write into the slots of requests that live"""

    def kept(stable: torch.Tensor, batch: Any, kind: Any) -> torch.Tensor:
        before = stable.clone()
        ids = own(stable, batch, kind)
        return ids.copy_(torch.where(ids == 0, before[: ids.numel()], ids))

    return kept


@plants("graph", "suite.e2e.engine.graphs:StepGraphs.run", serving(), LOGITS, NAN)
def positions_kept_from_the_batch_before(own: Any) -> Any:
    """token ids are copied into the captured inputs, positions are not"""

    def stale(self: Any, batch: Any) -> Any:
        return own(self, replace(batch, positions=self._positions[: batch.input_ids.numel()].clone()))

    return stale


@plants("graph", "suite.e2e.engine.graphs:StepGraphs.run", serving(), LOGITS, NAN)
def input_ids_of_the_batch_before(own: Any) -> Any:
    """the captured token ids are those of the replay before"""
    last: dict[int, torch.Tensor] = {}

    def stale(self: Any, batch: Any) -> Any:
        before = last.get(id(self))
        last[id(self)] = batch.input_ids
        if before is not None and before.numel() == batch.input_ids.numel():
            batch = replace(batch, input_ids=before)
        return own(self, batch)

    return stale


@plants("graph", "suite.e2e.engine.runner:Runner._batch", serving(), "allocators.invariant", LOGITS, NAN, source="B28")
def padding_requests_are_real(own: Any) -> Any:
    """padded lanes repeat the first request: they read and write its newest row with another token"""

    def repeated(self: Any, step: Any, lanes: int) -> Any:
        batch = own(self, step, lanes)
        live = len(step.requests)
        if lanes == live or batch.mode is not ForwardMode.DECODE:
            return batch
        ids = batch.write_ids.tensor.clone()
        ids[live:] = ids[0]
        return replace(batch, write_ids=replace(batch.write_ids, tensor=ids))

    return repeated


@plants("graph", "suite.kernels.linear.metadata:CapturedLinear.refill", serving("hybrid"), LOGITS, NAN, source="B28")
def state_slots_kept_from_the_batch_before(own: Any) -> Any:
    """captured state slots are filled once: later batches step the states of requests that are gone"""

    def stale(self: Any, mode: Any, batch: Any, slots: torch.Tensor, scratch: Any) -> Any:
        kept = self.slots.clone()
        metadata = own(self, mode, batch, slots, scratch)
        if bool((kept > 0).any()):
            self.slots.copy_(kept)
        return metadata

    return stale
