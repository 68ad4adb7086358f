"""Host work of a decode step by part, without a model: `python -m suite.e2e.engine.bench [DEVICE] [BATCH] [POOL]`.

Medians in microseconds over steps of a full batch: the scheduler's `next_step` and `finish`, the forward batch (one
upload and the write translation), the refill of the captured metadata. Nothing waits for the device in between; on a
CPU the device's part is counted too.
"""

import json
import statistics
import sys
import time
from collections import defaultdict

import torch

from suite.e2e.engine.memory import RequestMemory
from suite.e2e.engine.pools import build_allocator
from suite.e2e.engine.requests import Request
from suite.e2e.engine.scheduler import Scheduler
from suite.kernels.attention.support import backend_class
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.translator import KVIndexTranslator

PROMPT, STEPS, WARM, PAGE_SIZE, WINDOW = 1024, 300, 50, 16, 128


def bench(device: str, batch: int, mode: str) -> dict[str, float]:
    """Medians in microseconds by part."""

    def pool(kind: KVKind, layer: int, reach: int | None) -> KVGeometry:
        return KVGeometry(
            kind=kind, layers=(layer,), kv_heads=8, head_dim=64, dtype=torch.bfloat16, page_size=PAGE_SIZE, window=reach
        )

    geometry = RunnerGeometry(full=pool(KVKind.FULL, 0, None), window=pool(KVKind.WINDOW, 1, WINDOW))
    context = PROMPT + STEPS + WARM + PAGE_SIZE
    allocator = build_allocator(geometry, mode, batch * context // PAGE_SIZE + batch, context, device)  # type: ignore[arg-type]
    table = torch.zeros(batch + 1, context // PAGE_SIZE * PAGE_SIZE, dtype=torch.int32, device=device)
    translator = KVIndexTranslator(pool=allocator.pool, allocator=allocator, req_to_token=table)
    backend = backend_class("fa3")(pool=allocator.pool, translator=translator, launcher="reference", sinks=False)
    backend.capture(batch)
    scheduler = Scheduler(RequestMemory(allocator, table), max_batch=batch, chunk_tokens=batch * PROMPT)
    for index in range(batch):
        scheduler.add(Request(prompt=[index] * PROMPT, max_new_tokens=STEPS + WARM))
    times: dict[str, list[float]] = defaultdict(list)
    while scheduler.has_work:
        marks = [time.perf_counter()]
        step = scheduler.next_step()
        marks.append(time.perf_counter())
        made = ForwardBatch.create(
            mode=step.mode,
            input_ids=step.input_ids,
            req_rows=[request.row for request in step.requests],
            seq_lens=step.seq_lens,
            query_lens=step.query_lens,
            virtual_write_ids=step.virtual_write_ids,
            translator=translator,
        )
        marks.append(time.perf_counter())
        if step.mode is ForwardMode.DECODE:
            backend.replay(made)
        marks.append(time.perf_counter())
        for request in step.requests:
            request.accept(1)
        scheduler.finish(step)
        marks.append(time.perf_counter())
        if step.mode is ForwardMode.DECODE:
            for name, begin, end in zip(("schedule", "batch", "metadata", "finish"), marks, marks[1:], strict=False):
                times[name].append((end - begin) * 1e6)
            times["total"].append((marks[-1] - marks[0]) * 1e6)
    return {f"{name}_us": round(statistics.median(values[WARM:]), 1) for name, values in times.items()}


if __name__ == "__main__":
    given = [*sys.argv[1:], *("cpu", "32", "unified")[len(sys.argv) - 1 :]]
    print(
        json.dumps(
            {"device": given[0], "batch": int(given[1]), "pool": given[2], **bench(given[0], int(given[1]), given[2])}
        )
    )
