"""A small random model with recurrent layers, for the engine's tests."""

import functools

import torch

from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.models.config import Rope
from suite.models.hybrid_config import QwenHybridConfig
from suite.models.qwen_hybrid import QwenHybrid
from tests import tiny

CONFIG = QwenHybridConfig(
    vocab_size=tiny.VOCAB,
    hidden_size=64,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    linear=(True, False, True),
    k_heads=2,
    v_heads=4,
    k_dim=16,
    v_dim=16,
    conv_kernel=4,
    grouped=False,
    mlp_size=48,
    routing=None,
    expert_size=0,
    shared_size=0,
    norm_eps=1e-6,
    rope=Rope(theta=10000.0),
    max_positions=512,
    tied=False,
)


@functools.cache
def model() -> QwenHybrid:
    """Random weights; decays near 1, so that a state remembers and a wrong one changes the logits."""
    built = QwenHybrid(CONFIG, dtype=torch.float32, device="cpu")
    built.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in built.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "A_log" in name:
            parameter.copy_(-2 + 0.1 * noise)
        elif "norm" in name:
            parameter.copy_(0.1 * noise + (1 if name.endswith("linear_attn.norm.weight") else 0))
        else:
            parameter.copy_(noise * (0.3 if parameter.ndim > 1 else 0.5))
    return built.eval()


def engine(pool: str = "unified", **changes) -> Engine:
    """An engine around `model()`; any field of EngineConfig may be changed."""
    fields = {
        "backend": "reference",
        "launcher": "reference",
        "pool": pool,
        "page_size": 4,
        "max_batch": 4,
        "max_context": 96,
        "chunk_tokens": 16,
        "dtype": torch.float32,
        "device": "cpu",
        "graph": True,
        "seed": 3,
        "snapshot_tokens": 8,
    }
    return Engine(model(), EngineConfig(**(fields | changes)), draft=tiny.model())
