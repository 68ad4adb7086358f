"""The rig's own proof on the tiny gpt-oss: windows, sinks, moves; and that it sees a fault."""

import pytest
import torch

from tests import tiny
from tests.model_rig import ModelRig, assert_pools_agree, dense_logits, ragged_texts, relative_error


def test_pools_give_the_dense_logits():
    assert_pools_agree(tiny.model(), tiny.VOCAB, window=tiny.WINDOW)


def test_pages_move_while_requests_live():
    texts = ragged_texts(tiny.VOCAB, [20, 30])
    rig = ModelRig(tiny.model(), "unified")
    rig.run(texts, [10, 12], 8)
    assert rig.allocator.pages_moved > 0


@pytest.mark.parametrize("row", [1, 2])
def test_a_swapped_row_is_seen(row):
    (text,) = ragged_texts(tiny.VOCAB, [12])
    rig = ModelRig(tiny.model(), "static")
    rig.forward({1: text[:10]})
    ids = rig.translator.req_to_token[1]
    view = rig.allocator.pool.k_view(1)
    view[ids[row].item()], view[ids[0].item()] = view[ids[0].item()].clone(), view[ids[row].item()].clone()
    got = torch.cat([rig.forward({1: [token]})[1] for token in text[10:]])
    assert relative_error(got, dense_logits(tiny.model(), text)[10:]) > 1e-3
