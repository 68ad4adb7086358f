"""Random gpt-oss checkpoints written by transformers, and a dense server: what the model and accuracy tests share."""

from pathlib import Path

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from suite.models.dense import DenseMixers
from suite.models.gpt_oss import GptOss

SMALL = {
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}


def write_checkpoint(folder: Path, *, seed: int = 0, shard: str = "5GB", **fields) -> Path:
    """A checkpoint whose every parameter is random: transformers leaves biases at zero, which would hide them."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**{**SMALL, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "sinks" in name or "norm" in name else 0.15
            parameter.normal_(0.0, scale)
            parameter.copy_(parameter.bfloat16())
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    return folder


def their_logits(folder: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits, fp32 [sequences * length, vocab]."""
    model = GptOssForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(ids).logits.float().flatten(0, 1)


def our_logits(model: GptOss, ids: torch.Tensor) -> torch.Tensor:
    """Our logits over the same sequences, fp32 [sequences * length, vocab]."""
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    with torch.no_grad():
        return model.logits(model(ids.flatten(), positions, DenseMixers(len(ids))))


class DenseServer:
    """The accuracy protocol, served without a pool: every token recomputed. Remembers what it was asked."""

    def __init__(self, model: GptOss) -> None:
        self.model, self.generated, self.scored = model, [], []

    def generate(self, prompts, max_new_tokens, stop):
        self.generated += list(zip(prompts, max_new_tokens, stop, strict=True))
        return [self._continue(*request) for request in zip(prompts, max_new_tokens, stop, strict=True)]

    def _continue(self, prompt, most, stop):
        ids = list(prompt)
        while len(ids) < len(prompt) + most:
            said = int(our_logits(self.model, torch.tensor([ids]))[-1].argmax())
            if said in stop:
                break
            ids.append(said)
        return ids[len(prompt) :]

    def score(self, prompts, continuations):
        self.scored += list(zip(prompts, continuations, strict=True))
        return [self._score(*pair) for pair in zip(prompts, continuations, strict=True)]

    def _score(self, prompt, continuation):
        shares = our_logits(self.model, torch.tensor([prompt + continuation]))[len(prompt) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(continuation)
        return float(shares.gather(1, wanted[:, None]).sum()), bool((shares.argmax(-1) == wanted).all())
