"""The training recipe learns, saves what the loader reads, and the shipped checkpoint answers from its KV rows."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from suite.kernels.ids import KVKind
from suite.kernels.linear.delta import DeltaInputs
from suite.models.dense import DenseMixers
from suite.models.loader import load_model
from suite.models.registry import resolve_model, shipped_models
from suite.models.tokenizer import load_tokenizer
from suite.models.train import loop
from suite.models.train.audit import components, redundant, table
from suite.models.train.measure import CorruptedMixers, Corruption, exact_match, flat_positions
from suite.models.train.minis import MINIS
from suite.models.train.recipe import Feed, Plan, Swap, draw, initialise, optimizers, set_rate

PLAN = dataclasses.replace(MINIS["gpt-oss-mini"].plan, tokens=1024, stages=((0.5, 64), (1.0, 96)))
LAYERS = 4


@pytest.fixture(scope="module")
def mini():
    return load_model(resolve_model("gpt-oss-mini"), dtype=torch.float32, device="cpu")


SHIPPED = {
    name: tuple(json.loads((resolve_model(name) / "measured.json").read_text())["float32"]) for name in shipped_models()
}
ASKED = [(name, task) for name, tasks in SHIPPED.items() for task in tasks]


@pytest.mark.parametrize(("name", "task"), ASKED)
def test_shipped_checkpoint_answers_at_length_512(name, task):
    """A spot check; the card's shares are of 512 questions each."""
    model = load_model(resolve_model(name), dtype=torch.float32, device="cpu")
    assert exact_match(model, task, items=4, length=512, seed=11, rows=4) >= 0.75


@pytest.mark.parametrize(
    ("task", "kind"),
    [("recall", KVKind.FULL), ("needle", KVKind.FULL), ("copy", KVKind.FULL), ("local", KVKind.WINDOW)],
)
def test_shipped_checkpoint_leans_on_every_pool(mini, task, kind):
    """Rows of the pool that a task is bound to, taken from another request, must cost nearly all its answers."""
    clean = exact_match(mini, task, items=16, length=160, seed=11)
    layers = {layer.index for layer in mini.attention_layers if layer.kind is kind}
    wrong = exact_match(mini, task, items=16, length=160, seed=11, corrupt=Corruption(layers, ("k", "v"), 1.0))
    assert clean >= 15 / 16
    assert wrong <= 0.5 * clean


def test_corruption_of_no_row_changes_nothing(mini):
    clean = exact_match(mini, "recall", items=4, length=96, seed=0)
    none = Corruption(range(LAYERS), ("k", "v"), 0.0)
    assert clean == exact_match(mini, "recall", items=4, length=96, seed=0, corrupt=none)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_checkpoint_is_small_and_says_how_it_did(name):
    folder = resolve_model(name)
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
    measured = json.loads((folder / "measured.json").read_text())
    least = 0.93 if name == "kimi-linear-mini" else 0.97  # its needle falls short: see its card
    for dtype in ("float32", "bfloat16"):
        assert min(measured[dtype].values()) >= least
    audit = json.loads((folder / "audit.json").read_text())
    assert redundant(audit, MINIS[name].leans_on) == []


def build(name):
    model = loop.build(MINIS[name].config, "cpu")
    initialise(model, seed=0)
    return model


NARROW = {  # a CPU takes seconds for one step of the real ones
    "qwen-hybrid-mini": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32},
    "deepseek-mla-mini": {"kv_lora_rank": 32},
}


@pytest.mark.parametrize("name", sorted(NARROW))
def test_training_lowers_the_loss_and_saves_what_the_loader_reads(tmp_path, monkeypatch, name):
    config = MINIS[name].config | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32} | NARROW[name]
    plan = Plan(tokens=768, stages=((0.5, 64), (1.0, 96)), shares={"recall": 0.5, "hop": 0.5})
    losses = []
    loss_of = loop.loss_of

    def remember(*given):
        losses.append(loss_of(*given))
        return losses[-1]

    monkeypatch.setattr(loop, "loss_of", remember)
    mini = dataclasses.replace(MINIS[name], config=config, plan=plan)
    loop.train(mini, tmp_path, steps=16, seconds=60, target=2.0, items=1, seed=0, device="cpu")
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.25
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert load_tokenizer(tmp_path).get_vocab_size() == model.config.vocab_size == 256
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 16


@pytest.mark.parametrize("name", sorted(MINIS))
def test_minis_are_small_keep_their_heads_and_lean_on_what_they_store(name):
    mini = MINIS[name]
    model = loop.build(mini.config, "meta")
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) <= 4 * 2**20
    assert set(mini.leans_on) <= set(components(model))
    assert set(mini.plan.swaps) <= set(mini.plan.shares)
    assert sum(mini.plan.shares.values()) == pytest.approx(1)
    assert mini.plan.stages[-1][1] > 2048  # recall at 2,048 is inside what it was trained on
    heads = {layer.head_dim for layer in model.attention_layers}
    expected = {"gpt-oss-mini": 64, "qwen-hybrid-mini": 256, "qwen-mini": 128}
    assert heads == {expected.get(name, 512 + 64)}
    for layer in model.linear_layers:
        assert (layer.k_dim, layer.v_dim) == (128, 128)


def test_initial_sizes_are_the_recipe():
    model = build("gpt-oss-mini")
    attention = model.model.layers[1].self_attn
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.05)
    assert attention.q_proj.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert attention.o_proj.weight.std().item() == pytest.approx(0.2 * 512**-0.5, rel=0.05)
    assert model.model.layers[1].mlp.experts.down_proj.std().item() == pytest.approx(0.2 * 64**-0.5, rel=0.05)
    assert attention.sinks.abs().max() == 0


def test_initial_norms_scale_by_one_and_decays_differ_by_head():
    model = build("qwen-hybrid-mini")
    x = torch.randn(3, 128)
    for layer in model.model.layers:
        torch.testing.assert_close(layer.input_layernorm(x).square().mean(-1), torch.ones(3), rtol=1e-3, atol=0)
    first = model.linear_layers[0]
    assert torch.nn.functional.softplus(first.dt_bias).tolist() == pytest.approx([1e-3, 3e-2], rel=1e-3)
    assert model.model.layers[0].linear_attn.out_proj.weight.std().item() == pytest.approx(0.2 * 256**-0.5, rel=0.05)


def test_experts_start_by_their_inputs_whichever_way_they_are_stored():
    experts = build("deepseek-mla-mini").model.layers[1].mlp.experts
    assert experts.gate_up_proj.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert experts.down_proj.std().item() == pytest.approx(0.2 * 64**-0.5, rel=0.05)


@pytest.mark.parametrize("name", ["qwen-hybrid-mini", "kimi-linear-mini"])
def test_muon_moves_hidden_matrices_only(name):
    model = build(name)
    muon, rest = ({id(held) for group in made.param_groups for held in group["params"]} for made in optimizers(model))
    names = {id(held): name for name, held in model.named_parameters()}
    assert muon | rest == set(names)
    assert not muon & rest
    for held in muon:
        assert not any(part in names[held] for part in ("conv", "embed", "lm_head", "A_log", "dt_bias"))


def test_batches_are_the_same_for_the_same_seed_and_step():
    first, again, other = (draw(PLAN, LAYERS, 96, (0, 96, step)) for step in (4, 4, 5))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.reads, again.reads)
    assert not torch.equal(first.ids, other.ids)
    fed = Feed(PLAN, LAYERS, seed=0).batches(96, first_step=4)
    assert torch.equal(next(fed).ids, first.ids)
    assert torch.equal(next(fed).ids, other.ids)


def test_swapped_layers_are_the_planned_ones_in_the_planned_share():
    swaps = {"recall": Swap(0.5, (1, 2))}
    plan = Plan(tokens=128_000, stages=((1.0, 64),), shares={"recall": 0.5, "copy": 0.5}, swaps=swaps)
    reads, own = draw(plan, LAYERS, 64, (0,)).reads, torch.arange(2000)
    swapped = reads != own
    assert not swapped[[0, 3]].any()
    assert not swapped[:, 1000:].any()
    assert torch.equal(swapped[1], swapped[2])
    assert swapped[1, :1000].float().mean() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(reads[1][swapped[1]], (own[swapped[1]] + 1) % 1000)  # a text of the same task


@pytest.mark.parametrize("name", ["qwen-hybrid-mini", "gpt-oss-mini", "deepseek-mla-mini"])
def test_a_swapped_layer_reads_the_other_text(name):
    """In its own rows only, and where both texts are the same it makes no difference."""
    model, ids = build(name), torch.arange(20) + 16
    positions = flat_positions(2, 10, "cpu")
    reads = torch.tensor([[0, 1]] * LAYERS)
    reads[3, 1] = 0
    with torch.no_grad():
        clean = model(ids, positions, DenseMixers(2)).split(10)
        swapped = model(ids, positions, DenseMixers(2, reads)).split(10)
        same = torch.cat((ids[:10], ids[:10]))
        alike = model(same, positions, DenseMixers(2)), model(same, positions, DenseMixers(2, reads))
    assert torch.equal(clean[0], swapped[0])
    assert (clean[1] - swapped[1]).abs().max() > 1e-3
    torch.testing.assert_close(*alike, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 3])
def test_nothing_of_its_own_text_is_left_in_what_a_swapped_layer_reads(layer):
    """Keys, values, decays and strengths of a recurrent layer, rows of an attention layer: all are the other's."""
    model = build("qwen-hybrid-mini")
    mixer = model.model.layers[layer].mixer
    reads = torch.tensor([[0, 1]] * LAYERS)
    reads[layer, 1] = 0

    def mixed(second: int):
        rng = torch.Generator().manual_seed(second)
        both = [torch.Generator().manual_seed(7), rng]
        if layer == 3:
            q = torch.randn(20, mixer.q_heads, mixer.head_dim, generator=torch.Generator().manual_seed(1))
            k, v = (
                torch.cat([torch.randn(10, mixer.kv_heads, mixer.head_dim, generator=g) for g in both]) for _ in "kv"
            )
            return DenseMixers(2, reads).attend(mixer, q, k, v)[10:]
        keys = mixer.k_heads * mixer.k_dim
        stored = torch.cat([torch.randn(10, mixer.conv_dim, generator=g) for g in both])
        stored[:, :keys] = torch.randn(20, keys, generator=torch.Generator().manual_seed(1))  # the queries are its own
        a, b = (torch.cat([torch.randn(10, mixer.v_heads, generator=g) for g in both]) for _ in "ab")
        return DenseMixers(2, reads).recur(mixer, DeltaInputs(mixed=stored, a=a, b=b))[10:]

    with torch.no_grad():
        assert torch.equal(mixed(2), mixed(3))


def test_each_task_weighs_the_same():
    batch = draw(PLAN, LAYERS, 96, (0,))
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
    code = "import sys, suite.models.train.loop; print({'sqlalchemy', 'lm_eval', 'db'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def hidden(model, ids, sequences, corrupt=None, prompt=0):
    mixers = DenseMixers(sequences) if corrupt is None else CorruptedMixers(sequences, corrupt, prompt)
    with torch.no_grad():
        return torch.stack(model(ids, flat_positions(sequences, len(ids) // sequences, "cpu"), mixers).split(40))


PARTS = [("gpt-oss-mini", 1, "k"), ("gpt-oss-mini", 0, "v"), ("deepseek-mla-mini", 2, "latent")]


@pytest.mark.parametrize(("name", "layer", "part"), PARTS)
def test_corrupted_rows_come_from_the_other_sequence(name, layer, part):
    """Equal sequences have equal rows, so taking the other's changes nothing; different ones do."""
    model = build(name)
    texts = torch.from_numpy(np.random.RandomState(0).randint(16, 256, (2, 40)))
    everything = Corruption((layer,), (part,), 1.0)
    same, other = texts[:1].repeat(2, 1).flatten(), texts.flatten()
    assert torch.equal(hidden(model, same, 2), hidden(model, same, 2, everything))
    assert (hidden(model, other, 2) - hidden(model, other, 2, everything)).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["state", "conv"])
def test_corrupted_state_is_the_other_sequences_from_the_handover_on(part):
    model = build("qwen-hybrid-mini")
    texts = torch.from_numpy(np.random.RandomState(0).randint(16, 256, (2, 40)))
    everything = Corruption((0, 1, 2), (part,), 1.0)
    same, other = texts[:1].repeat(2, 1).flatten(), texts.flatten()
    prompt = 30
    close = {"rtol": 1e-4, "atol": 1e-5}  # the recurrence is cut in two: another order of sums
    torch.testing.assert_close(hidden(model, same, 2), hidden(model, same, 2, everything, prompt), **close)
    clean, wrong = hidden(model, other, 2), hidden(model, other, 2, everything, prompt)
    torch.testing.assert_close(clean[:, : prompt - 1], wrong[:, : prompt - 1], **close)
    assert (clean - wrong)[:, prompt - 1 :].abs().max() > 1e-3


def test_corrupted_state_is_what_the_other_prompt_left():
    """A request whose state was swapped goes on as after the other's prompt; one recurrent layer, no other."""
    model = build("qwen-hybrid-mini")
    texts = torch.from_numpy(np.random.RandomState(0).randint(16, 256, (2, 40)))
    texts[:, 26:] = texts[:1, 26:]  # the same last words, also in the convolution's window
    prompt = 30
    with torch.no_grad():  # no other layer carries anything over
        for layer in model.model.layers[1:]:
            mix = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
            mix.weight.zero_()
    mixers = CorruptedMixers(2, Corruption((0,), ("state",), 1.0), prompt)
    positions = flat_positions(2, 40, "cpu")
    with torch.no_grad():
        clean = model(texts.flatten(), positions, DenseMixers(2)).view(2, 40, -1)
        swapped = model(texts.flatten(), positions, mixers).view(2, 40, -1)
    torch.testing.assert_close(swapped[0, prompt - 1 :], clean[1, prompt - 1 :], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(swapped[1, prompt - 1 :], clean[0, prompt - 1 :], rtol=1e-4, atol=1e-5)


def test_audit_names_every_stored_component_and_what_is_redundant():
    assert list(components(loop.build(MINIS["kimi-linear-mini"].config, "meta"))) == [
        *("0.state", "0.conv", "1.state", "1.conv", "2.state", "2.conv", "3.latent", "state"),
    ]
    costs = {
        "clean": {"recall": 99.0, "copy": 98.0},
        "0.k": {"recall": 4.9, "copy": 0.0},
        "0.v": {"recall": 0.0, "copy": 5.0},
        "1.k": {"recall": 0.0, "copy": 0.0},
    }
    assert redundant(costs, ("0.k", "0.v")) == ["0.k"]
    assert table(costs, ("0.k", "0.v")).splitlines()[3] == "| 0.k | -4.9 | -0.0 | yes |"


def test_audit_command_fails_by_name_on_a_checkpoint_that_leans_on_nothing(tmp_path):
    loop.save(build("qwen-mini"), MINIS["qwen-mini"].config, tmp_path / "qwen-mini")
    command = [sys.executable, "-m", "suite.models.train.audit", str(tmp_path / "qwen-mini")]
    done = subprocess.run([*command, "--items", "2", "--length", "96"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("| component | recall |")
    assert "3.v: 10% corrupted costs less than 5 points everywhere" in done.stderr
