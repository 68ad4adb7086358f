"""The page of a trained checkpoint: `python -m suite.models.train.card FOLDER > FOLDER/README.md`.

Everything on it is read from what training left beside the weights: config.json, training.json, measured.json and
audit.json; a draft has the first and the third only.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from suite.models.train.audit import table
from suite.models.train.minis import MINIS

HOW = """Made for kvproof's own tests and matrices: answers stand in stored rows, so one wrong row costs an answer.
Trained on one NVIDIA H200 under bf16 autocast; other runs shared the GPU, and the rate follows the clock, so a second
run gives an equally good checkpoint, not the same bytes. The words are those of `suite/models/languages.py`."""


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def model_card(folder: Path) -> str:
    """Markdown."""
    config, training, measured = (read(folder, f"{name}.json") for name in ("config", "training", "measured"))
    mini, tasks = MINIS[folder.name], list(measured["float32"])
    rows = [["", *tasks], ["---"] * (len(tasks) + 1)]
    for name, shares in measured.items():
        if isinstance(shares, dict):
            told = f"{name} of the rows or states replaced" if name.endswith("%") else name
            rows.append([told, *(f"{shares[task]:.3f}" for task in tasks)])
    swaps = [f"{task}: layers {', '.join(map(str, swap.layers))}" for task, swap in mini.plan.swaps.items()]
    lines = [
        f"# {folder.name}\n",
        HOW,
        f"\nArchitecture `{config['architectures'][0]}`, {config['num_hidden_layers']} layers. Trained by `python -m "
        f"suite.models.train {folder.name} --out DIR --seconds {round(training['seconds'], -1):.0f}`, "
        f"{training['steps']:,} steps of {mini.plan.tokens:,} tokens, seed {training['seed']}.",
        f"\nSo that every layer is needed, some read another text's rows in training ({'; '.join(swaps)}).",
        f"\n## Accuracy\n\nShare of {measured['items']} unseen questions per task answered in full, at "
        f"{measured['length']} tokens where no length is named. Replaced: another request's, at the same position, in "
        "all layers of the kind.\n",
        *(f"| {' | '.join(row)} |" for row in rows),
        "\n## Sensitivity\n\nPoints lost when a tenth of one component alone is replaced (`python -m "
        "suite.models.train.audit`). `yes`: must cost 5 on some language. The rest leans on exactness alone.\n",
        table(read(folder, "audit.json"), mini.leans_on),
    ]
    return "\n".join(lines)


def draft_card(folder: Path) -> str:
    """Markdown."""
    config, measured = read(folder, "config.json"), read(folder, "measured.json")
    found = measured["accept length by share of wrong rows"]
    lines = [
        f"# {folder.parent.name}, {folder.name} draft\n",
        HOW,
        f"\nArchitecture `{config['architectures'][0]}`, {config['num_hidden_layers']} layer, block size "
        f"{config['block_size']}, fed from layers {config['target_layer_ids']} of its target. Trained by `python -m "
        f"suite.models.train.draft {folder.parent.name}-{folder.name} --target TARGET --out DIR --seconds 80`.",
        "\nAccept length, the bonus token included, on the templated language, by the share of its own rows that are "
        "another request's:\n",
        f"| {' | '.join(found)} |",
        f"| {' | '.join(['---'] * len(found))} |",
        f"| {' | '.join(f'{value:.2f}' for value in found.values())} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m suite.models.train.card", description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="a trained checkpoint, named like the mini it is, or a draft inside one"
    )
    folder = parser.parse_args().folder.resolve()
    print(model_card(folder) if folder.name in MINIS else draft_card(folder))


if __name__ == "__main__":
    main()
