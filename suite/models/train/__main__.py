"""Trains a small checkpoint: `python -m suite.models.train NAME --out DIR`.

The best weights so far are saved as it goes; it stops at the target, at the last step or when its time is up, then
measures what it saved and writes `measured.json`.
"""

import argparse
import json
from pathlib import Path

import torch

from suite.models.loader import load_model
from suite.models.train.loop import train
from suite.models.train.measure import Corruption, exact_match
from suite.models.train.minis import MINIS, Mini

TEST_SEED = 1_000_002
LENGTH, LONG = 512, 2048


def measure(mini: Mini, folder: Path, *, items: int, device: str) -> dict[str, object]:
    """Accuracies of the saved checkpoint, clean in both dtypes and with a share of all rows of a kind replaced."""
    tasks, found = tuple(mini.plan.shares), {"items": items, "length": LENGTH}

    def shares(model, length: int, corrupt: Corruption | None = None) -> dict[str, float]:
        return {
            task: exact_match(model, task, items=items, length=length, seed=TEST_SEED, corrupt=corrupt)
            for task in tasks
        }

    for dtype in (torch.bfloat16, torch.float32):
        model = load_model(folder, dtype=dtype, device=device)
        found[str(dtype).removeprefix("torch.")] = shares(model, LENGTH)
    found[f"float32 at {LONG}"] = {
        task: exact_match(model, task, items=items // 4, length=LONG, seed=TEST_SEED) for task in tasks
    }
    kinds = {str(kind): {at.index for at in model.attention_layers if at.kind is kind} for kind in _kinds(model)}
    if model.linear_layers:
        kinds["state"] = {layer.index for layer in model.linear_layers}
    for kind, layers in kinds.items():
        for share in (0.001, 0.01, 0.1, 1.0):
            corrupt = Corruption(layers, ("state",) if kind == "state" else ("k", "v", "latent"), share)
            found[f"{kind} {share:.1%}"] = shares(model, LENGTH, corrupt)
    (folder / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _kinds(model) -> list:
    return sorted({layer.kind for layer in model.attention_layers})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m suite.models.train", description=__doc__)
    parser.add_argument("name", choices=sorted(MINIS))
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=1e9, help="the schedule is fitted into this time")
    parser.add_argument("--target", type=float, default=2.0, help="stop when every task reaches this share")
    parser.add_argument("--items", type=int, default=256, help="questions per task at each evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args())
    mini, out, device = MINIS[given.pop("name")], given.pop("out"), given["device"]
    train(mini, out, **given)
    print(json.dumps(measure(mini, out, items=2 * given["items"], device=device), indent=1))


if __name__ == "__main__":
    main()
