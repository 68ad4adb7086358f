"""What every draft has in common: one target, whose embedding and output projection it uses as its own."""

from typing import Any

import torch
from torch import nn

from suite.errors import InputError


class BorrowingDraft(nn.Module):
    """Base of the drafts. Parameters are uninitialised until loaded; `borrow` a target before anything is drafted."""

    linear_family = None
    linear_layers = ()

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self._target: list[Any] = []  # in a list, so that its parameters do not become the draft's

    @property
    def target(self) -> Any:
        """Whose embedding and output projection these are. InputError before `borrow`."""
        if not self._target:
            raise InputError("target", None, "a target to borrow embedding and output projection from")
        return self._target[0]

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def state_geometry(self, dtype: torch.dtype) -> None:
        """No layer of a draft recurs."""

    def borrow(self, target: Any) -> "BorrowingDraft":
        """Use `target`'s embedding and output projection. InputError for one of another width or vocabulary."""
        shape, ours = tuple(target.output_weight.shape), (self.config.vocab_size, self.config.hidden_size)
        if shape != ours:
            raise InputError(
                "vocab_size, hidden_size", ours, f"{shape}, the target's: embedding and output are its own"
            )
        self._target = [target]
        return self

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.target.embed(input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> fp32 [n, vocab]."""
        return self.target.logits(hidden)
