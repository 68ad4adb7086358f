"""Drafts that propose a block of tokens in one pass, fed with what the target computed: DSpark and DFlash.

Every token that the target stores leaves a row in the draft's pool too, made from the target's residual streams and
stored at the target's virtual slot. A block pass is a verify batch of `config.width` tokens per request: its own rows
take the look-ahead slots, where the tokens that stay are fed afterwards.
"""

from collections.abc import Sequence

import torch

from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.drafts import drafts_wanted
from suite.e2e.engine.runner import CausalModel, Runner
from suite.e2e.engine.scheduler import Step
from suite.e2e.engine.speculative import Proposal
from suite.errors import InputError
from suite.kernels.geometry import AttentionLayer
from suite.models.dspark import BlockDraft
from suite.models.mixers import Mixers
from suite.records import BLOCK_DRAFTS


class BlockPass:
    """A block draft as a runner runs models: one forward is one block pass, and its logits are those of the drafts."""

    linear_family = None

    def __init__(self, draft: BlockDraft) -> None:
        self.draft = draft

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return self.draft.attention_layers

    @property
    def max_positions(self) -> int:
        return self.draft.max_positions

    def state_geometry(self, dtype: torch.dtype) -> None:
        """No layer recurs."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> torch.Tensor:
        """input_ids, positions [batch * width], each request's anchor first -> fp32 [batch * drafts, vocab]."""
        width = self.draft.config.width
        anchors, begins = (each.view(-1, width)[:, 0] for each in (input_ids, positions))
        return self.draft.propose(anchors, begins, mixers).logits.flatten(0, 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """They are what a block pass returns: each depends on the draft picked before it."""
        return hidden

    def inject(self, features: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> None:
        self.draft.inject(features, positions, mixers)


class BlockDrafter:
    """Proposes the draft's greedy choice, to sampled requests too: then the target's own random numbers decide."""

    def __init__(self, runner: Runner, drafts: int, width: int) -> None:
        self.runner, self.drafts, self.width = runner, drafts, width

    def follow(self, step: Step, features: torch.Tensor | None) -> None:
        assert features is not None  # the target's runner keeps the layers that a block draft is fed from
        self.runner.inject(step, features)

    def settle(self, step: Step, stored: Sequence[int], features: torch.Tensor | None) -> None:
        """Feed all tokens of the verify: rows of rejected ones lie where the next block pass writes before it reads."""
        self.follow(step, features)

    def propose(self, step: Step) -> list[Proposal]:
        requests = step.requests
        rows = torch.arange(len(requests) * self.drafts, device=step.virtual_write_ids.tensor.device)
        logits = self.runner.forward(step.block(self.width), rows).logits
        drafts = logits.argmax(-1).view(len(requests), self.drafts).tolist()
        return [
            Proposal(tokens=mine[: drafts_wanted(request, self.drafts)])
            for request, mine in zip(requests, drafts, strict=True)
        ]


def drafting_model(
    draft: CausalModel | BlockDraft | None, config: EngineConfig
) -> tuple[CausalModel | None, tuple[int, ...], int]:
    """The draft as runners run models, the target's layers that feed it, and the tokens of its block pass, if any.

    InputError for a draft that is missing, or whose block is not what a verify holds.
    """
    if config.speculation not in ("model", *BLOCK_DRAFTS):
        return None, (), 0
    if draft is None:
        raise InputError("draft", None, f"a draft model for speculation = {config.speculation}")
    if not isinstance(draft, BlockDraft):
        return draft, (), 0
    if config.draft_tokens != draft.config.drafts:
        expected = f"{draft.config.drafts}, what the draft proposes in one block"
        raise InputError("draft_tokens", config.draft_tokens, expected)
    return BlockPass(draft), draft.config.target_layers, draft.config.width
