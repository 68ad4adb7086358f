"""The training script learns, saves what the loader reads, and the shipped checkpoint answers from its KV rows."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from suite.kernels.ids import KVKind
from suite.models.config import GptOssConfig
from suite.models.gpt_oss import GptOss
from suite.models.loader import load_config, load_model
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer
from suite.models.train import gpt_oss_mini
from suite.models.train.measure import Corruption, exact_match
from suite.models.train.recipe import Feed, draw, initialise, set_rate

PLAN = dataclasses.replace(gpt_oss_mini.PLAN, tokens=1024, stages=((0.5, 64), (1.0, 96)))
WINDOWS = (64, None, 64, None)


@pytest.fixture(scope="module")
def mini():
    return load_model(resolve_model("gpt-oss-mini"), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("task", "items"), [("recall", 16), ("needle", 16), ("local", 6), ("copy", 6)])
def test_shipped_checkpoint_answers_at_length_512(task, items, dtype):
    """A spot check; the card's shares are of 512 questions each."""
    model = load_model(resolve_model("gpt-oss-mini"), dtype=dtype, device="cpu")
    right = exact_match(model, task, items=items, length=512, seed=11, rows=8)
    assert right >= 0.97 - 1 / items  # 97 %, and one item for a sample of this size


@pytest.mark.parametrize("kind", list(KVKind))
@pytest.mark.parametrize("task", ["recall", "needle", "copy", "local"])
def test_shipped_checkpoint_leans_on_every_pool(mini, task, kind):
    """Rows of one pool taken from another request must cost every task nearly all its answers."""
    clean = exact_match(mini, task, items=16, length=160, seed=11)
    wrong = exact_match(mini, task, items=16, length=160, seed=11, corrupt=Corruption(kind, 1.0, 0))
    assert clean >= 15 / 16
    assert wrong <= 0.5 * clean


def test_corruption_of_no_row_changes_nothing(mini):
    clean = exact_match(mini, "recall", items=4, length=96, seed=0)
    assert clean == exact_match(mini, "recall", items=4, length=96, seed=0, corrupt=Corruption(KVKind.FULL, 0.0, 0))


def test_shipped_checkpoint_is_small_and_says_how_it_did():
    folder = resolve_model("gpt-oss-mini")
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
    config = load_config(folder)
    assert (config.q_heads, config.head_dim, config.windows) == (8, 64, WINDOWS)
    measured = json.loads((folder / "measured.json").read_text())
    for dtype in ("float32", "bfloat16"):
        assert measured[dtype]["recall"] >= 0.97
        assert measured[dtype]["needle"] >= 0.97


def test_training_lowers_the_loss_and_saves_what_the_loader_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_oss_mini, "PLAN", PLAN)
    losses = []
    loss_of = gpt_oss_mini.loss_of

    def remember(model, batch):
        losses.append(loss_of(model, batch))
        return losses[-1]

    monkeypatch.setattr(gpt_oss_mini, "loss_of", remember)
    gpt_oss_mini.train(tmp_path, steps=16, seconds=60, target=2.0, items=1, seed=0, device="cpu")
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.5
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert load_tokenizer(tmp_path).get_vocab_size() == model.config.vocab_size == 256
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 16


def test_initial_sizes_are_the_recipe():
    model = GptOss(GptOssConfig.from_hf(gpt_oss_mini.CONFIG), dtype=torch.float32, device="cpu")
    initialise(model, seed=0)
    attention = model.model.layers[1].self_attn
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.05)
    assert attention.q_proj.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert attention.o_proj.weight.std().item() == pytest.approx(0.2 * 512**-0.5, rel=0.05)
    assert model.model.layers[1].mlp.experts.down_proj.std().item() == pytest.approx(0.2 * 64**-0.5, rel=0.05)
    assert attention.sinks.abs().max() == 0


def test_batches_are_the_same_for_the_same_seed_and_step():
    first, again, other = (draw(PLAN, WINDOWS, 96, (0, 96, step)) for step in (4, 4, 5))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.keep, again.keep)
    assert not torch.equal(first.ids, other.ids)
    fed = Feed(PLAN, WINDOWS, seed=0).batches(96, first_step=4)
    assert torch.equal(next(fed).ids, first.ids)
    assert torch.equal(next(fed).ids, other.ids)


def test_dropped_layers_are_full_ones_in_the_planned_share():
    plan = dataclasses.replace(PLAN, tokens=100_000)
    batch = draw(plan, WINDOWS, 64, (0,))
    rows = [round(plan.tokens / 64 * share) for share in plan.shares.values()]
    local = batch.keep[:, -rows[-1] :]
    others = batch.keep[:, : -rows[-1]]
    assert batch.keep[0].min() == batch.keep[2].min() == 1
    assert torch.equal(local[1], local[3])
    assert (local[1] == 0).float().mean() == pytest.approx(plan.drop_all_full, abs=0.1)
    assert ((others[1] == 0) & (others[3] == 0)).sum() == 0
    assert (others[1] * others[3] == 0).float().mean() == pytest.approx(plan.drop_one_full, abs=0.1)


def test_each_task_weighs_the_same():
    batch = draw(PLAN, WINDOWS, 96, (0,))
    assert batch.weight.sum().item() == pytest.approx(len(PLAN.shares))


def test_rate_rises_holds_and_falls():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["peak_lr"] = 1.0
    rates = []
    for progress in (0.0, 0.3, 0.5, 0.75, 1.0):
        set_rate([optimizer], progress)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.01, 1.0, 1.0, 0.5, 0.0]


def test_training_needs_no_database_or_accuracy_library():
    """It runs where only torch, numpy, safetensors and tokenizers are installed."""
    code = (
        "import sys, suite.models.train.gpt_oss_mini; print({'msgspec', 'lm_eval', 'suite.records'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
