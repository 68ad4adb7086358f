"""What an engine is built for: geometry of the work, sizes of the pool, and the features that are switched on."""

from dataclasses import dataclass

import torch

from suite.errors import InputError, UnknownNameError
from suite.records import SPECULATIONS, Launcher, PoolMode, Speculation


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`max_context` in tokens, prompt and generated together.

    `pool_pages`: how many pages requests and prefix cache may hold together; None for every request at its longest.
    `split`: pages of each kind (and slots of "state") of a static pool, whose bytes the unified pool gets as one;
    then nothing but these bytes limits anybody. `prefix_cache`, `mixed` (prefill chunks beside decoding requests),
    `speculation` with `draft_tokens` drafts per verify. `snapshot_tokens`: how far apart recurrent states are kept
    for the prefix cache, `snapshots` of them at most.
    """

    backend: str
    launcher: Launcher
    pool: PoolMode
    page_size: int
    max_batch: int
    max_context: int
    chunk_tokens: int
    dtype: torch.dtype
    device: str
    graph: bool
    seed: int
    poison: bool = False
    pool_pages: int | None = None
    split: dict[str, int] | None = None
    prefix_cache: bool = False
    mixed: bool = False
    speculation: Speculation = "none"
    draft_tokens: int = 0
    script: tuple[int, ...] = ()
    fused_draft: bool = False
    snapshot_tokens: int = 64
    snapshots: int = 8
    expand_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch", "max_context", "chunk_tokens", "pool_pages", "snapshot_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(name, value, "a positive number")
        if self.speculation not in SPECULATIONS:
            raise UnknownNameError("speculation", self.speculation, SPECULATIONS)
        if (self.speculation == "none") != (self.draft_tokens == 0) or self.draft_tokens < 0:
            raise InputError(
                "draft_tokens", self.draft_tokens, f"0 without speculation, else 1 or more, for {self.speculation}"
            )
        if self.split is not None and self.pool_pages is not None:
            raise InputError("split", self.split, "nothing where pool_pages is given: one of them sizes the pool")
        if self.snapshot_tokens % self.page_size and self.prefix_cache:
            raise InputError("snapshot_tokens", self.snapshot_tokens, f"a multiple of the page size {self.page_size}")

    @property
    def request_pages(self) -> int:
        """Pages of all requests at their longest."""
        return self.max_batch * -(-(self.max_context + self.draft_tokens) // self.page_size)
