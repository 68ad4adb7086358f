"""Random checkpoints written by transformers, and what transformers says of them: the independent implementation."""

from pathlib import Path

import torch

from suite.models.dense import DenseMixers


def write_theirs(folder: Path, model: torch.nn.Module, *, seed: int = 0, shard: str = "5GB") -> Path:
    """Save `model` with every parameter and buffer of a checkpoint random: defaults of 0 and 1 would hide them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            value = 1.0 + 0.2 * noise if "norm" in name else noise * (0.15 if tensor.ndim > 1 else 0.5)
            tensor.copy_(value.bfloat16())
    model.to(torch.float32).save_pretrained(folder, max_shard_size=shard)
    return folder


@torch.no_grad()
def their_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """fp32 [sequences * length, vocab]."""
    return model.eval()(ids).logits.float().flatten(0, 1)


@torch.no_grad()
def our_logits(model, ids: torch.Tensor, *, expands_latent: bool = False) -> torch.Tensor:
    """Our logits over the same sequences, without a pool."""
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    return model.logits(model(ids.flatten(), positions, DenseMixers(len(ids), expands_latent=expands_latent)))


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest exact logit."""
    return float((got - exact).abs().max() / exact.abs().max())


def greedy(logits_of, prompt: torch.Tensor, steps: int) -> list[int]:
    """`steps` tokens after `prompt` [1, length], every one from all before it."""
    ids = prompt
    for _ in range(steps):
        ids = torch.cat((ids, logits_of(ids)[-1].argmax().view(1, 1)), dim=1)
    return ids[0, prompt.shape[1] :].tolist()


def said(logits_of, prompt: torch.Tensor, tokens: list[int]) -> list[int]:
    """What follows the prompt and each of its `tokens` but the last: equal to them exactly where `greedy` is."""
    ids = torch.cat((prompt, torch.tensor([tokens])), dim=1)
    return logits_of(ids)[prompt.shape[1] - 1 : -1].argmax(-1).tolist()
