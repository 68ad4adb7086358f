"""Named attention and recurrent shapes for kernel cells: the geometry of real models, without their weights.

The names are known without importing torch: a plan is checked by them.
"""

from typing import TYPE_CHECKING

from suite.errors import UnknownNameError

if TYPE_CHECKING:
    from suite.kernels.geometry import AttentionLayer

LAYERS_EACH = 2  # of each kind: enough for a page multiplier that is not that of one layer
# (query heads, KV heads, head width, value width of latent rows, window, sinks)
SHAPES: dict[str, tuple[int, int, int, int | None, int | None, bool]] = {
    "llama-8b": (32, 8, 128, None, None, False),
    "gpt-oss-20b": (64, 8, 64, None, 128, True),
    "qwen3.5-9b": (16, 4, 256, None, None, False),
    "deepseek-v2-lite": (16, 1, 576, 512, None, False),
}

# (linear family, key heads, value heads, head width) of recurrent layers
STATE_SHAPES: dict[str, tuple[str, int, int, int]] = {
    "qwen3-next": ("gdn", 16, 32, 128),
    "kimi-linear": ("kda", 32, 32, 128),
    "ring-mini-linear": ("lightning", 16, 16, 128),
}


def attention_layers(name: str, device: str) -> "list[AttentionLayer]":
    """Full layers of shape `name`, and window layers between them where it has a window. Sinks are N(0, 1), seeded."""
    import torch

    from suite.kernels.geometry import AttentionLayer

    if name not in SHAPES:
        raise UnknownNameError("model", name, SHAPES)
    q_heads, kv_heads, head_dim, value_dim, window, has_sinks = SHAPES[name]
    windows = (window, None) * LAYERS_EACH if window else (None,) * LAYERS_EACH
    generator = torch.Generator().manual_seed(0)
    return [
        AttentionLayer(
            index=index,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=(192 if value_dim else head_dim) ** -0.5,  # absorbed MLA keeps the scale of its 128 + 64 query
            window=reach,
            # bf16 values, so that a kernel that takes sinks in bf16 loses nothing
            sinks=torch.randn(q_heads, generator=generator).bfloat16().float().to(device) if has_sinks else None,
            v_head_dim=value_dim,
            is_latent=value_dim is not None,
        )
        for index, reach in enumerate(windows)
    ]
