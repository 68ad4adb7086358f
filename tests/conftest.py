"""Shared by every test: Triton's interpreter where there is no GPU, chosen before triton is imported."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # small matrices gain nothing from more, and lose all where cores are shared


@pytest.fixture(autouse=True)
def interpreter_as_it_was() -> Iterator[None]:
    """A cell run in this process sets the variable to what its launcher needs; the next test finds it unchanged."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
