"""Trains the checkpoint `gpt-oss-mini`: `python -m suite.models.train.gpt_oss_mini --out DIR`.

A gpt-oss of 1.1 million parameters that answers questions whose words it can only
find in its KV rows. The best weights so far are saved as it goes, together with
`measured.json`; it stops at the target, at the last step or when its time is up.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn import functional as F

from suite.kernels.ids import KVKind
from suite.models.config import GptOssConfig
from suite.models.dense import DenseMixers
from suite.models.gpt_oss import GptOss
from suite.models.languages import LANGUAGES, WORDS
from suite.models.loader import load_model
from suite.models.train.measure import Corruption, exact_match, flat_positions
from suite.models.train.recipe import Batch, Feed, Plan, initialise, optimizers, set_rate

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": WORDS.index("<bos>"),
    "dtype": "bfloat16",
    "eos_token_id": WORDS.index("."),
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 16384,
    "model_type": "gpt_oss",
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": WORDS.index("<pad>"),
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
        "rope_type": "yarn",
        "truncate": False,
    },
    "sliding_window": 64,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": len(WORDS),
}
PLAN = Plan(
    tokens=32768,
    stages=((0.1, 64), (0.25, 128), (0.45, 256), (1.0, 576)),
    shares={"recall": 0.4, "needle": 0.2, "copy": 0.15, "local": 0.25},
    drop_one_full=0.7,
    drop_all_full=0.6,
)
DEV_SEED, TEST_SEED = 1_000_001, 1_000_002


def save(model: GptOss, folder: Path) -> None:
    """Write config.json, tokenizer.json and bf16 model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def loss_of(model: GptOss, batch: Batch) -> torch.Tensor:
    """Mean over the tasks of the mean cross-entropy of their graded words."""
    rows, length = batch.ids.shape
    hidden = model(batch.ids.flatten(), flat_positions(rows, length, batch.ids.device), DenseMixers(rows, batch.keep))
    losses = F.cross_entropy(
        model.logits(hidden.view(rows, length, -1)[:, :-1].flatten(0, 1)), batch.ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * batch.weight[:, 1:].flatten()).sum() / len(PLAN.shares)


def train(out: Path, *, steps: int, seconds: float, target: float, items: int, seed: int, device: str) -> None:
    model = GptOss(GptOssConfig.from_hf(CONFIG), dtype=torch.float32, device=device)
    initialise(model, seed)
    made, feed = optimizers(model), Feed(PLAN, model.config.windows, seed)
    start, best, length, step, batches = time.monotonic(), -1.0, 0, 0, iter(())
    while (progress := max(step / steps, (time.monotonic() - start) / seconds)) < 1:
        if PLAN.length(progress) != length:
            length = PLAN.length(progress)
            batches = feed.batches(length, step)
        drawn = next(batches)
        batch = Batch(*(part.to(device) for part in (drawn.ids, drawn.weight, drawn.keep)))
        set_rate(made, progress)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
            loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
        step += 1
        if step % 100 == 0:
            shares = {
                task: exact_match(model, task, items=items, length=min(512, length), seed=DEV_SEED)
                for task in LANGUAGES
            }
            told = " ".join(f"{task} {share:.3f}" for task, share in shares.items())
            print(
                f"{time.monotonic() - start:6.1f} s step {step} length {length} loss {loss.item():.4f} {told}",
                file=sys.stderr,
            )
            if length == PLAN.stages[-1][1] and min(shares.values()) > best:
                best = min(shares.values())
                save(model, out)
            if best >= target:
                break
    feed.threads.shutdown(cancel_futures=True)
    if best < 0:
        save(model, out)
    (out / "training.json").write_text(json.dumps({"steps": step, "seconds": time.monotonic() - start, "seed": seed}))


def measure(folder: Path, *, items: int, device: str) -> dict[str, object]:
    """Accuracies of the saved checkpoint, clean in both dtypes and with rows replaced. Written to measured.json."""
    found: dict[str, object] = {"items": items, "length": 512}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder, dtype=dtype, device=device)
        name = str(dtype).removeprefix("torch.")
        found[name] = {task: exact_match(model, task, items=items, length=512, seed=TEST_SEED) for task in LANGUAGES}
    for kind in KVKind:
        for share in (0.001, 0.01, 0.1, 1.0):
            found[f"{kind} {share:.1%}"] = {
                task: exact_match(
                    model, task, items=items, length=512, seed=TEST_SEED, corrupt=Corruption(kind, share, 0)
                )
                for task in LANGUAGES
            }
    (folder / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seconds", type=float, default=1e9, help="the schedule is fitted into this time")
    parser.add_argument("--target", type=float, default=2.0, help="stop when every task reaches this share")
    parser.add_argument("--items", type=int, default=512, help="questions per task at each evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args())
    train(**given)
    print(json.dumps(measure(given["out"], items=2 * given["items"], device=given["device"]), indent=1))


if __name__ == "__main__":
    main()
