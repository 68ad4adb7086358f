"""What the MLA backends share: the rows that vendor kernels are built for, and a layer's rows in pages."""

import torch

from suite.kernels.geometry import RunnerGeometry
from suite.kernels.pools import KVPool

LATENT_DIM, ROPE_DIM = 512, 64  # DeepSeek's, and the only ones that every vendor kernel is built for
MAX_VERIFY_TOKENS = 16  # new tokens per request that decode kernels take as one tall tile of queries
DTYPES = (torch.float16, torch.bfloat16)


def row_refusal(name: str, geometry: RunnerGeometry, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str | None:
    """Why vendor kernels do not take these latent rows, with need and got; None when they do."""
    for kv in geometry.pools:
        if kv.dtype not in dtypes:
            return f"{name}: needs {' or '.join(map(str, dtypes))}, got {kv.dtype}"
        widths = kv.value_dim, kv.head_dim - kv.value_dim
        if widths != (LATENT_DIM, ROPE_DIM):
            return f"{name}: needs latent rows of {LATENT_DIM} + {ROPE_DIM}, got {widths[0]} + {widths[1]}"
    return None


def latent_pages(pool: KVPool, layer: int) -> torch.Tensor:
    """Latent rows of `layer` as [pages, page_size, latent + rope], no copy; strided over rows where the pool is."""
    return pool.paged(pool.k_view(layer))[:, :, 0]
