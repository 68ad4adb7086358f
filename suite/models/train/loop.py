"""The training loop: the same for every mini, the best weights so far saved as it goes."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn import functional as F

from suite.models.causal import CausalModel
from suite.models.dense import DenseMixers
from suite.models.languages import WORDS
from suite.models.registry import entry_of
from suite.models.train.measure import exact_match, flat_positions
from suite.models.train.minis import Mini
from suite.models.train.recipe import Batch, Feed, initialise, optimizers, set_rate

DEV_SEED = 1_000_001
MOST_SHORT = 512  # evaluations while training, in tokens; the longest stage is measured at its end


def build(config: Mapping[str, Any], device: str) -> CausalModel:
    """The unfilled fp32 model of a configuration."""
    entry = entry_of(config)
    return entry.model_class()(entry.config_class().from_hf(config), dtype=torch.float32, device=device)


def save(model: CausalModel, config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json, tokenizer.json and bf16 model.safetensors, under the published names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for name, tensor in model.checkpoint_tensors(()).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def loss_of(model: CausalModel, batch: Batch, tasks: int) -> torch.Tensor:
    """Mean over the tasks of the mean cross-entropy of their graded words."""
    rows, length = batch.ids.shape
    mixers = DenseMixers(rows, batch.reads, expands_latent=True)
    hidden = model(batch.ids.flatten(), flat_positions(rows, length, batch.ids.device), mixers)
    logits = model.logits(hidden.view(rows, length, -1)[:, :-1].flatten(0, 1))
    losses = F.cross_entropy(logits, batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * batch.weight[:, 1:].flatten()).sum() / tasks


def train(mini: Mini, out: Path, *, steps: int, seconds: float, target: float, items: int, seed: int, device: str):
    """Until `target` is reached by every task, or at the last step, or when time is up. Writes the checkpoint."""
    model = build(mini.config, device)
    initialise(model, seed)
    plan, layers = mini.plan, mini.config["num_hidden_layers"]
    made, feed = optimizers(model), Feed(plan, layers, seed)
    start, best, length, step, batches = time.monotonic(), -1.0, 0, 0, iter(())
    while (progress := max(step / steps, (time.monotonic() - start) / seconds)) < 1:
        if plan.length(progress) != length:
            length = plan.length(progress)
            batches = feed.batches(length, step)
        drawn = next(batches)
        batch = Batch(*(part.to(device, non_blocking=True) for part in (drawn.ids, drawn.weight, drawn.reads)))
        set_rate(made, progress)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            loss = loss_of(model, batch, len(plan.shares))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
        step += 1
        if step % 200 == 0:
            shares = _evaluate(model, mini, items, min(MOST_SHORT, length))
            told = " ".join(f"{task} {share:.3f}" for task, share in shares.items())
            spent = time.monotonic() - start
            print(f"{spent:6.1f} s step {step} length {length} loss {loss.item():.4f} {told}", file=sys.stderr)
            if length == plan.stages[-1][1] and min(shares.values()) > best:
                best = min(shares.values())
                save(model, mini.config, out)
            if best >= target:
                break
    feed.threads.shutdown(cancel_futures=True)
    if length != plan.stages[-1][1] or min(_evaluate(model, mini, items, min(MOST_SHORT, length)).values()) > best:
        save(model, mini.config, out)
    (out / "training.json").write_text(json.dumps({"steps": step, "seconds": time.monotonic() - start, "seed": seed}))


def _evaluate(model: CausalModel, mini: Mini, items: int, length: int) -> dict[str, float]:
    return {task: exact_match(model, task, items=items, length=length, seed=DEV_SEED) for task in mini.plan.shares}
