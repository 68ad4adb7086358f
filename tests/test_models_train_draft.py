"""Training of block drafts: what it computes without a pool is the naive draft, and its loss falls."""

import json

import pytest
import torch

from suite.models.draft_config import DraftConfig
from suite.models.drafts import find_draft, load_draft
from suite.models.dspark import BlockDraft
from suite.models.qwen3 import DenseDecoder
from suite.models.train import draft as training
from suite.models.train.draft import DRAFTS, BlockMixers, accept_length, draw, feed, loss_of, train
from suite.models.train.loop import build
from suite.models.train.minis import MINIS
from suite.models.train.recipe import initialise, optimizers
from tests.draft_rig import NaiveDraft
from tests.model_rig import relative_error
from tests.test_models_drafts import DEPTH, DRAFT, HIDDEN, SLIDING, loaded, published, target, written  # noqa: F401

TARGET_CONFIG = dict(MINIS["qwen-mini"].config) | {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}
DRAFT_CONFIG = DRAFTS["qwen-mini-dspark"] | {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}


@pytest.fixture(scope="module")
def teacher() -> DenseDecoder:
    model = build(TARGET_CONFIG, "cpu")
    initialise(model, 1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("changes", [{}, SLIDING, {"is_causal": True}], ids=["blocks", "windows", "causal"])
def test_blocks_without_a_pool_equal_the_naive_draft(tmp_path, target, changes):  # noqa: F811
    values = DRAFT | changes
    draft = loaded(written(tmp_path, values), target)
    config = DraftConfig.from_hf(values, target_depth=DEPTH)
    naive = NaiveDraft(published(values), config, target.model.embed_tokens.weight, target.lm_head.weight)
    features = torch.randn(2, 12, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    anchors, tokens = torch.tensor([[7, 3, 7], [5, 12, 1]]), torch.tensor([[4, 5, 6], [7, 8, 9]])
    mixers = BlockMixers(anchors, 12)
    with torch.no_grad():
        draft.inject(features.flatten(0, 1), torch.arange(12).repeat(2), mixers)
        proposal = draft.propose(tokens.flatten(), anchors.flatten(), mixers)
    for index, (anchor, token) in enumerate(zip(anchors.flatten().tolist(), tokens.flatten().tolist(), strict=True)):
        ids, logits, _ = naive.propose(features[index // 3, :anchor].double(), token)
        assert proposal.ids[index].tolist() == ids
        assert relative_error(proposal.logits[index], logits) <= 1e-4


def test_wrong_rows_are_another_texts_at_the_same_position(teacher):
    draft = BlockDraft(DraftConfig.from_hf(DRAFT_CONFIG, target_depth=4), dtype=torch.float32, device="cpu")
    initialise(draft.borrow(teacher), 0)
    drawn = draw(teacher, draft, 3, (1,), "cpu")
    hit = torch.zeros(3, drawn.ids.shape[1], dtype=torch.bool)
    hit[1, 40] = True
    clean, wrong = feed(draft, drawn).stored[0], feed(draft, drawn, hit).stored[0]
    for before, after in zip(clean, wrong, strict=True):
        assert torch.equal(after[1, 40], before[0, 40])
        assert torch.equal(after[~hit], before[~hit])


@pytest.mark.parametrize("name", DRAFTS)
def test_loss_falls_and_the_target_stays(teacher, name):
    config = DRAFTS[name] | {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}
    draft = BlockDraft(DraftConfig.from_hf(config, target_depth=4), dtype=torch.float32, device="cpu").borrow(teacher)
    initialise(draft, 0)
    before = [parameter.clone() for parameter in teacher.parameters()]
    made, losses = optimizers(draft), []
    drawn = draw(teacher, draft, 4, (1,), "cpu")
    for _ in range(40):
        losses.append(loss_of(draft, teacher, drawn))
        draft.zero_grad()
        losses[-1].backward()
        for optimizer in made:
            optimizer.step()
    assert losses[-1].item() < 0.8 * losses[0].item()
    assert all(parameter.grad is not None for parameter in draft.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))


def test_accept_length_counts_the_leading_matches_and_the_bonus(teacher, monkeypatch):
    """A draft that says what the target would say, up to a wrong token at index 3 of every block, gets 3 + 1."""
    draft = BlockDraft(DraftConfig.from_hf(DRAFT_CONFIG, target_depth=4), dtype=torch.float32, device="cpu")
    initialise(draft.borrow(teacher), 0)
    drawn = draw(teacher, draft, 4, (training.DEV_SEED,), "cpu")
    after = drawn.anchors[:, :, None] + torch.arange(7)
    right = drawn.said.gather(1, after.flatten(1)).view(-1, 7)
    proposal = draft.propose(right[:, 0], drawn.anchors.flatten(), feed(draft, drawn))
    for wrong, length in ((3, 4.0), (0, 1.0), (7, 8.0)):
        ids = right.clone()
        ids[:, wrong : wrong + 1] += 1
        monkeypatch.setattr(draft, "propose", lambda *_, ids=ids: training_proposal(proposal, ids))
        assert accept_length(draft, teacher, texts=4, device="cpu") == length


def training_proposal(proposal, ids):
    return type(proposal)(ids=ids, logits=proposal.logits, confidence=None)


def test_a_trained_draft_loads_beside_its_target(teacher, tmp_path):
    draft = train(DRAFT_CONFIG, teacher, tmp_path, steps=2, seconds=60, texts=2, seed=0)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET_CONFIG))
    found = find_draft(tmp_path / "target", "DSPARK", tmp_path)
    again = load_draft(found, teacher, dtype=torch.float32, device="cpu")
    assert all(
        torch.equal(a.bfloat16(), b.bfloat16()) for a, b in zip(draft.parameters(), again.parameters(), strict=True)
    )
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * 2**20
