"""Small shapes and a small random model that many tests share."""

import functools

import torch

from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.kernels.allocators.paged import PageAllocator, StaticAllocator
from suite.kernels.allocators.window import UnifiedAllocator
from suite.kernels.geometry import KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.pools.static import StaticPool
from suite.kernels.pools.unified import UNIFIED_POOLS
from suite.models.config import GptOssConfig
from suite.models.gpt_oss import GptOss

WINDOW = 8
VOCAB = 96
MODEL = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "swiglu_limit": 7.0,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def geometry(
    page_size: int = 4, full: int = 2, window: int = 3, dtype: torch.dtype = torch.float32, head_dim: int = 8
) -> RunnerGeometry:
    """`full` full layers (0, 1, ...) and `window` window layers after them; no window pool for 0."""

    def pool(kind: KVKind, layers: range, reach: int | None) -> KVGeometry:
        return KVGeometry(
            kind=kind,
            layers=tuple(layers),
            kv_heads=1,
            head_dim=head_dim,
            dtype=dtype,
            page_size=page_size,
            window=reach,
        )

    return RunnerGeometry(
        full=pool(KVKind.FULL, range(full), None),
        window=pool(KVKind.WINDOW, range(full, full + window), WINDOW) if window else None,
    )


def allocator(
    mode: str, shape: RunnerGeometry, pages: int = 24, *, poison: bool = True, eager: bool = False
) -> PageAllocator:
    """About `pages` joint pages; the static window pool gets half as many."""
    if mode == "static":
        counts = {pool.kind: pages // (1 + (pool.kind is KVKind.WINDOW)) for pool in shape.pools}
        return StaticAllocator(StaticPool(shape, counts, "cpu", poison=poison))
    page_bytes = sum(pool.page_bytes(mode) for pool in shape.pools)
    return UnifiedAllocator(
        UNIFIED_POOLS[mode](shape, max(pages * page_bytes, 8192), 8, "cpu", poison=poison), eager=eager
    )


@functools.cache
def model(dtype: torch.dtype = torch.float32) -> GptOss:
    """Random weights, large enough that attention is sharp: a wrong row changes the logits."""
    built = GptOss(GptOssConfig.from_hf(MODEL), dtype=dtype, device="cpu")
    built.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in built.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if parameter.ndim > 1 else 0.5))
    return built.eval()


def engine(pool: str = "unified", *, draft=None, truth=None, **changes) -> Engine:
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
    }
    return Engine(model(), EngineConfig(**(fields | changes)), draft=draft, truth=truth)
