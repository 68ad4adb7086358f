"""A mix-up of id spaces is a TypeError at the call."""

import pytest
import torch

from suite.kernels.ids import KernelIds, KVKind, VirtualIds, require_kernel, require_virtual
from suite.kernels.translator import KVIndexTranslator
from tests import tiny


def test_only_the_right_space_passes():
    ids = torch.tensor([1, 2])
    assert require_virtual(VirtualIds(ids), "here") is ids
    assert require_kernel(KernelIds(ids, KVKind.FULL), KVKind.FULL, "here") is ids
    for wrong in (ids, KernelIds(ids, KVKind.FULL), [1]):
        with pytest.raises(TypeError, match="here: needs VirtualIds, got"):
            require_virtual(wrong, "here")
    for wrong in (ids, VirtualIds(ids)):
        with pytest.raises(TypeError, match="here: needs KernelIds, got"):
            require_kernel(wrong, KVKind.FULL, "here")
    with pytest.raises(TypeError, match="of the window pool, got ids of the full pool"):
        require_kernel(KernelIds(ids, KVKind.FULL), KVKind.WINDOW, "here")


def test_pools_and_translator_refuse_foreign_ids():
    allocator = tiny.allocator("unified", tiny.geometry())
    translator = KVIndexTranslator(
        pool=allocator.pool, allocator=allocator, req_to_token=torch.zeros(2, 8, dtype=torch.int32)
    )
    rows = torch.zeros(1, 1, 8)
    once = translator.write_loc(VirtualIds(torch.tensor([5])))
    with pytest.raises(TypeError, match="write_loc: needs VirtualIds, got KernelIds"):
        translator.write_loc(once)
    with pytest.raises(TypeError, match="needs KernelIds, got VirtualIds"):
        allocator.pool.write(0, VirtualIds(torch.tensor([5])), rows, rows)
    with pytest.raises(TypeError, match="needs KernelIds of the window pool"):
        allocator.pool.write(2, once, rows, rows)
