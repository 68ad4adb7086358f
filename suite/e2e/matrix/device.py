"""What every child does to its device before it measures."""

import torch

from suite.errors import RefusedError
from suite.records import Cell

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prepare_device(cell: Cell) -> None:
    """Seed torch; on a CPU take one thread. RefusedError where the cell asks for a GPU and there is none."""
    if cell.device == "cuda" and not torch.cuda.is_available():
        raise RefusedError(f"{cell.backend}: needs a CUDA device, got a machine where torch finds none")
    torch.manual_seed(cell.seed)
    if cell.device == "cpu":
        torch.set_num_threads(1)  # small matrices gain nothing from more, and lose all where cores are shared
