"""Sensitivity audit: `python -m suite.models.train.audit FOLDER`.

A checkpoint that solves its languages with one layer is blind to faults in the others. So every component that a
layer stores (K, V, latent, recurrent state, convolution window) is corrupted alone, a tenth of it, and the answers
lost are counted per language. Prints a Markdown table; exit code 1 when a component that the checkpoint is meant to
lean on costs less than 5 points on every language.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from suite.kernels.geometry import AttentionLayer
from suite.models.causal import CausalModel
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.models.train.measure import Corruption, Part, exact_match
from suite.models.train.minis import MINIS

AUDIT_SEED = 1_000_003
SHARE = 0.1
LEAST_POINTS = 5.0

Costs = dict[str, dict[str, float]]  # component -> language -> points lost


def components(model: CausalModel) -> dict[str, tuple[tuple[int, ...], Part]]:
    """Everything that the model's layers store, named `layer.part`, in order; `state` is that of all layers at once."""
    found: dict[str, tuple[tuple[int, ...], Part]] = {}
    for layer in (each.mixer for each in model.model.layers):
        if isinstance(layer, AttentionLayer):
            parts: tuple[Part, ...] = ("latent",) if layer.is_latent else ("k", "v")
        else:
            parts = ("state",) if model.linear_family == "lightning" else ("state", "conv")
        found |= {f"{layer.index}.{part}": ((layer.index,), part) for part in parts}
    if model.linear_layers:
        found["state"] = tuple(layer.index for layer in model.linear_layers), "state"
    return found


def audit(model: CausalModel, tasks: tuple[str, ...], *, items: int, length: int, share: float = SHARE) -> Costs:
    """Points lost, of 100, by corrupting `share` of each component alone; under "clean" the points had."""

    def points(task: str, corrupt: Corruption | None) -> float:
        return 100 * exact_match(model, task, items=items, length=length, seed=AUDIT_SEED, corrupt=corrupt)

    costs = {"clean": {task: points(task, None) for task in tasks}}
    for name, (layers, part) in components(model).items():
        corrupt = Corruption(layers, (part,), share)
        costs[name] = {task: costs["clean"][task] - points(task, corrupt) for task in tasks}
    return costs


def redundant(costs: Costs, leans_on: tuple[str, ...]) -> list[str]:
    """Those of `leans_on` that cost less than 5 points on every language."""
    return [name for name in leans_on if max(costs[name].values()) < LEAST_POINTS]


def table(costs: Costs, leans_on: tuple[str, ...]) -> str:
    """Markdown: a row per component."""
    tasks = list(costs["clean"])
    rows = [["component", *tasks, "leans on it"], ["---"] * (len(tasks) + 2)]
    rows.append(["clean, % answered", *(f"{costs['clean'][task]:.1f}" for task in tasks), ""])
    for name, lost in costs.items():
        if name != "clean":
            rows.append([name, *(f"-{lost[task]:.1f}" for task in tasks), "yes" if name in leans_on else ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m suite.models.train.audit", description=__doc__)
    parser.add_argument("folder", help="a checkpoint folder, or the name of a shipped one")
    parser.add_argument("--mini", choices=sorted(MINIS), help="whose list to hold it to; the folder's name by default")
    parser.add_argument("--items", type=int, default=512, help="questions per language and component")
    parser.add_argument("--length", type=int, default=512, help="prompt tokens")
    parser.add_argument("--json", type=Path, help="also write the costs to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    folder = resolve_model(given.folder)
    name = given.mini or folder.name
    if name not in MINIS:
        parser.error(f"{name} is no mini; --mini is one of {', '.join(sorted(MINIS))}")
    model = load_model(folder, dtype=torch.float32, device=given.device)
    costs = audit(model, tuple(MINIS[name].plan.shares), items=given.items, length=given.length)
    leans_on = MINIS[name].leans_on
    print(table(costs, leans_on))
    if given.json:
        given.json.write_text(json.dumps(costs, indent=1) + "\n")
    for component in redundant(costs, leans_on):
        print(f"{component}: {SHARE:.0%} corrupted costs less than {LEAST_POINTS:g} points everywhere", file=sys.stderr)
    return 1 if redundant(costs, leans_on) else 0


if __name__ == "__main__":
    sys.exit(main())
