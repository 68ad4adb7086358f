"""Trains a block draft beside a frozen target: `python -m suite.models.train.draft NAME --target DIR --out DIR`.

On texts of the templated language the target gives the features, random positions become anchors, and every anchor's
block is trained on the words that follow. Prints the accept length, clean and with stored rows of other requests.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from suite.kernels.geometry import AttentionLayer
from suite.models.causal import CausalModel
from suite.models.dense import DenseMixers
from suite.models.draft_config import DraftConfig
from suite.models.dspark import BlockDraft
from suite.models.languages import LANGUAGES, WORDS
from suite.models.loader import SINGLE, load_model
from suite.models.train.minis import MINIS
from suite.models.train.recipe import initialise, optimizers, set_rate

LENGTH, ANCHORS = 192, 12  # tokens of a text, blocks drawn from it
FIRST_ANCHOR = 24  # the bindings at the head of a text cannot be foreseen
DEV_SEED, SHARES = 2_000_001, (0.0, 0.01, 0.1, 0.5, 1.0)

_QWEN_MINI = {
    name: MINIS["qwen-mini"].config[name]
    for name in (
        *("attention_bias", "dtype", "head_dim", "hidden_act", "hidden_size", "max_position_embeddings", "model_type"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "vocab_size"),
    )
} | {
    "intermediate_size": 384,
    "mask_token_id": WORDS.index("<unk>"),
    "num_hidden_layers": 1,
    "target_layer_ids": [1, 3],
}
DRAFTS: dict[str, dict[str, Any]] = {
    "qwen-mini-dspark": _QWEN_MINI
    | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 32,
    },
    "qwen-mini-dflash": _QWEN_MINI | {"architectures": ["DFlashDraftModel"], "block_size": 8},
}


class Listener(DenseMixers):
    """Runs the target and keeps its residual streams."""

    def __init__(self, sequences: int) -> None:
        super().__init__(sequences)
        self.residuals: dict[int, torch.Tensor] = {}

    def after_layer(self, index: int, residual: torch.Tensor) -> None:
        self.residuals[index] = residual


@dataclass
class BlockMixers:
    """`Mixers` of `blocks` blocks in each of `sequences` texts, whose tokens up to each anchor have fed the draft.

    anchors: int64 [sequences, blocks], positions. corrupt: bool [sequences, length], stored rows that are another
    text's, at the same position; None for none.
    """

    anchors: torch.Tensor
    length: int
    corrupt: torch.Tensor | None = None
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    expands_latent: bool = False

    def store(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        self.stored[layer.index] = self._kept(k), self._kept(v)

    def attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sequences = len(self.anchors)
        width = len(q) // self.anchors.numel()
        fed_k, fed_v = self.stored[layer.index]
        group = layer.q_heads // layer.kv_heads
        keys, values = (
            torch.cat((fed, own.reshape(sequences, -1, *own.shape[1:])), dim=1).repeat_interleave(group, dim=2)
            for fed, own in ((fed_k, k), (fed_v, v))
        )
        out = F.scaled_dot_product_attention(
            q.reshape(sequences, -1, *q.shape[1:]).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self._visible(layer, width)[:, None],
            scale=layer.scale,
        )
        return out.transpose(1, 2).reshape(q.shape)

    def _visible(self, layer: AttentionLayer, width: int) -> torch.Tensor:
        """bool [sequences, blocks * width, length + blocks * width]: fed rows before the anchor, and the own block."""
        device, (sequences, blocks) = self.anchors.device, self.anchors.shape
        offset = torch.arange(width, device=device)
        here = (self.anchors[:, :, None] + offset).flatten(1)[:, :, None]
        at = torch.arange(self.length, device=device)
        fed = at < self.anchors.repeat_interleave(width, dim=1)[:, :, None]
        block = torch.arange(blocks, device=device).repeat_interleave(width)
        own = (block[:, None] == block).expand(sequences, -1, -1)
        if layer.is_causal:
            own = own & (offset.repeat(blocks)[:, None] >= offset.repeat(blocks))
        if layer.window is not None:
            fed = fed & (here - at < layer.window)
        return torch.cat((fed, own), dim=2)

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [sequences, length, heads, dim], some of it another text's."""
        mine = rows.view(len(self.anchors), self.length, *rows.shape[1:])
        return mine if self.corrupt is None else torch.where(self.corrupt[:, :, None, None], mine.roll(1, 0), mine)


@dataclass(frozen=True)
class Drawn:
    """Texts ids [texts, length], the anchors in them [texts, blocks], the draft's features, the target's own words."""

    ids: torch.Tensor
    anchors: torch.Tensor
    features: torch.Tensor
    said: torch.Tensor  # what the target would say after each token, [texts, length]


@torch.no_grad()
def draw(target: CausalModel, draft: BlockDraft, texts: int, seed: tuple[int, ...], device: str) -> Drawn:
    """Texts of the templated language, run through the target once."""
    rng = np.random.RandomState(seed)
    ids = torch.from_numpy(LANGUAGES["template"].text(rng, texts, LENGTH, 1).ids).to(device)
    last = LENGTH - draft.config.drafts - 1
    anchors = FIRST_ANCHOR + (rng.random_sample((texts, ANCHORS)) * (last - FIRST_ANCHOR)).astype(np.int64)
    listener = Listener(texts)
    hidden = target(ids.flatten(), torch.arange(LENGTH, device=device).repeat(texts), listener)
    said = target.logits(hidden).argmax(-1).view(texts, LENGTH)
    return Drawn(ids, torch.from_numpy(anchors).to(device), draft.features(listener.residuals), said)


def feed(draft: BlockDraft, drawn: Drawn, corrupt: torch.Tensor | None = None) -> BlockMixers:
    """Mixers with the rows of every token stored."""
    mixers = BlockMixers(drawn.anchors, LENGTH, corrupt)
    draft.inject(drawn.features, torch.arange(LENGTH, device=drawn.ids.device).repeat(len(drawn.ids)), mixers)
    return mixers


def loss_of(draft: BlockDraft, target: CausalModel, drawn: Drawn) -> torch.Tensor:
    """Mean cross-entropy of the words after the anchors, each biased by the true word before, and of confidence."""
    following = drawn.anchors[:, :, None] + torch.arange(draft.config.drafts + 1, device=drawn.ids.device)
    words = drawn.ids.gather(1, following.flatten(1)).view(-1, draft.config.drafts + 1)
    hidden = draft.block(words[:, 0], drawn.anchors.flatten(), feed(draft, drawn))
    logits, state = target.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1), None
    if draft.markov_head is not None:
        biases = []
        for index in range(draft.config.drafts):
            bias, state = draft.markov_head.step(words[:, index], hidden[:, index], state)
            biases.append(bias)
        logits = logits + torch.stack(biases, dim=1)
    loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    if draft.confidence_head is not None:
        right = (logits.detach().argmax(-1) == words[:, 1:]).float()
        confidence = draft.confidence(hidden.detach(), words[:, :-1])
        loss = loss + F.binary_cross_entropy(confidence, right)
    return loss


@torch.no_grad()
def accept_length(draft: BlockDraft, target: CausalModel, *, texts: int, device: str, share: float = 0.0) -> float:
    """Committed tokens per pass, the bonus token included, with `share` of the stored rows another request's."""
    drawn = draw(target, draft, texts, (DEV_SEED,), device)
    corrupt = torch.rand(texts, LENGTH, generator=torch.Generator().manual_seed(DEV_SEED)) < share
    mixers = feed(draft, drawn, corrupt.to(device))
    anchors = drawn.ids.gather(1, drawn.anchors).flatten()
    proposed = draft.propose(anchors, drawn.anchors.flatten(), mixers).ids
    after = drawn.anchors[:, :, None] + torch.arange(draft.config.drafts, device=device)
    wanted = drawn.said.gather(1, after.flatten(1)).view(proposed.shape)
    return 1.0 + float((proposed == wanted).int().cumprod(1).sum(1).float().mean())


def train(
    config: Mapping[str, Any], target: CausalModel, out: Path, *, steps: int, seconds: float, texts: int, seed: int
) -> BlockDraft:
    """Until the last step or when time is up; writes the draft's checkpoint."""
    device = str(target.output_weight.device)
    parsed = DraftConfig.from_hf(config, target_depth=len(target.model.layers))
    draft = BlockDraft(parsed, dtype=torch.float32, device=device).borrow(target)
    initialise(draft, seed)
    made, start, step = optimizers(draft), time.monotonic(), 0
    while (progress := max(step / steps, (time.monotonic() - start) / seconds)) < 1:
        set_rate(made, progress)
        loss = loss_of(draft, target, draw(target, draft, texts, (seed, step), device))
        draft.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
        step += 1
        if step % 100 == 0:
            length = accept_length(draft, target, texts=32, device=device)
            told = f"{time.monotonic() - start:6.1f} s step {step} loss {loss.item():.4f} accept length {length:.2f}"
            print(told, file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    held = draft.checkpoint_tensors(())
    save_file({name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in held.items()}, out / SINGLE)
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m suite.models.train.draft", description=__doc__)
    parser.add_argument("name", choices=sorted(DRAFTS))
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=1e9, help="the schedule is fitted into this time")
    parser.add_argument("--texts", type=int, default=64, help="texts per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args())
    config, out, device = DRAFTS[given.pop("name")], given.pop("out"), given.pop("device")
    target = load_model(given.pop("target"), dtype=torch.float32, device=device)
    draft = train(config, target, out, **given)
    lengths = {f"{share:.0%}": accept_length(draft, target, texts=256, device=device, share=share) for share in SHARES}
    (out / "measured.json").write_text(json.dumps({"accept length by share of wrong rows": lengths}, indent=1) + "\n")
    print(json.dumps(lengths, indent=1))


if __name__ == "__main__":
    main()
