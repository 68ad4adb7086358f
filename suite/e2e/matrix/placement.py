"""Where buffers land is drawn, not left to chance.

An identical copy of the data at another address differs in time by more than the effects that are
looked for, reproducibly. So each arm of each block makes random allocations first, gives some of them
back, and keeps the rest while it measures: pools and weights land elsewhere every time, and the spread
over placements becomes part of the noise that a comparison is held against.
"""

import contextlib
import random
from collections.abc import Iterator

import torch

MAX_ALLOCATIONS = 8
SMALLEST_BYTES = {"cpu": 1 << 12, "cuda": 1 << 21}  # a page; a GPU maps its memory in pages of 2 MiB
LARGEST_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}


def draw_padding(device: str, seed: int) -> list[tuple[int, bool]]:
    """(bytes, whether kept) of each allocation, in the order in which they are made."""
    rng, smallest = random.Random(seed), SMALLEST_BYTES[device]
    most = LARGEST_BYTES[device] // smallest
    return [
        (smallest * round(most ** rng.random()), rng.random() < 0.5) for _ in range(rng.randint(1, MAX_ALLOCATIONS))
    ]


@contextlib.contextmanager
def placement(device: str, seed: int | None) -> Iterator[tuple[int, ...]]:
    """Pads the memory of `device` as `seed` says, not at all without one; gives the bytes, given back ones negative."""
    if seed is None or (device == "cuda" and not torch.cuda.is_available()):  # who measures refuses the latter
        yield ()
        return
    drawn = draw_padding(device, seed)
    made = [torch.empty(size, dtype=torch.uint8, device=device) for size, _ in drawn]
    held = [block for block, (_, kept) in zip(made, drawn, strict=True) if kept]
    made.clear()
    yield tuple(size if kept else -size for size, kept in drawn)
    held.clear()
