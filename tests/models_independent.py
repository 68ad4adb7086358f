"""Our models beside transformers' own: random checkpoints that transformers writes, its logits and its greedy words."""

from pathlib import Path

import torch

from suite.models.loader import load_model
from tests.model_rig import ModelRig, assert_pools_agree, dense_logits, ragged_texts, relative_error

GREEDY_STEPS = 64
TEXT = 70  # tokens: more than one chunk of the delta rule


def write_random(model, folder: Path, *, seed: int = 0, scale: float = 0.15, shard: str = "5GB"):
    """Save `model` with every parameter random and bf16-exact; transformers leaves norms and biases flat, which
    would hide them. Returns the model."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = parameter.ndim == 1 or "norm" in name
            parameter.copy_(torch.randn(parameter.shape, generator=random) * (0.3 if small else scale))
            parameter.copy_(parameter.bfloat16())
    model.eval().save_pretrained(folder, max_shard_size=shard)
    return model


def their_logits(model, texts: list[list[int]]) -> torch.Tensor:
    """fp32 [texts * tokens, vocab]; equally long texts."""
    with torch.no_grad():
        return model(torch.tensor(texts)).logits.float().flatten(0, 1)


def their_greedy(model, prompt: list[int], steps: int) -> list[int]:
    """The prompt and `steps` greedy tokens after it, one by one with transformers' own cache."""
    model.generation_config.eos_token_id = None
    return model.generate(torch.tensor([prompt]), max_new_tokens=steps, do_sample=False, pad_token_id=0)[0].tolist()


def assert_agrees(theirs, folder: Path, vocab: int, *, pools: bool = True, expanded: bool = False):
    """fp32: logits within 1e-4, dense and through the pools, and 64 greedy tokens from a pool. Returns our model."""
    ours = load_model(folder, dtype=torch.float32, device="cpu")
    texts = ragged_texts(vocab, [TEXT, TEXT])
    exact = their_logits(theirs, texts).split(TEXT)
    for text, want in zip(texts, exact, strict=True):
        assert relative_error(dense_logits(ours, text), want) <= 1e-4
    if pools:
        assert_pools_agree(ours, vocab, expanded=expanded)
        text = their_greedy(theirs, texts[0][:9], GREEDY_STEPS)
        (logits,) = ModelRig(ours, "unified", requests=2, expanded=expanded).run([text], [9], 8)
        assert logits[8:-1].argmax(-1).tolist() == text[9:]
    return ours
