"""DFlash and DSpark: a draft that proposes a whole block of tokens in one pass over rows the target fed it.

Every committed token leaves a row in each draft layer, made from the target's residual streams and stored at the
target's own slot. A block pass puts the anchor, the last committed token, and mask tokens behind those rows; its
temporary rows take the slots that the committed tokens will be fed to. DSpark then walks the block once more, token by
token, adding what the token before makes likely. Embedding and output projection are the target's.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from suite.kernels.geometry import AttentionLayer
from suite.models.borrowing import BorrowingDraft
from suite.models.causal import Turn
from suite.models.draft_config import DraftConfig
from suite.models.layers import Embedding, Linear, RMSNorm, Rotary, rotate
from suite.models.mixers import Mixers
from suite.models.routed import GatedMLP
from suite.models.stored import stored_tensors

BORROWED = ("embed_tokens.weight", "lm_head.weight")  # in some files, and the target's own in all of them
Pick = Callable[[torch.Tensor, int], torch.Tensor]  # fp32 logits [batch, vocab] of draft i -> tokens [batch]


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """ids: int64 [batch, drafts]; logits: fp32 [batch, drafts, vocab] that they were picked from; confidence: fp32
    [batch, drafts], that each is accepted if all before it are, or None without such a head."""

    ids: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


def greedy(logits: torch.Tensor, index: int) -> torch.Tensor:
    """The likeliest token of every row."""
    return logits.argmax(-1)


class DraftAttention(nn.Module):
    """Attention of block tokens over fed rows and over the block itself; keys and values of fed rows."""

    def __init__(self, config: DraftConfig, index: int, **place) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(hidden, config.q_heads * dim, bias=False, **place)
        self.k_proj = Linear(hidden, config.kv_heads * dim, bias=False, **place)
        self.v_proj = Linear(hidden, config.kv_heads * dim, bias=False, **place)
        self.o_proj = Linear(config.q_heads * dim, hidden, bias=False, **place)
        self.q_norm = RMSNorm(dim, config.norm_eps, place["device"])
        self.k_norm = RMSNorm(dim, config.norm_eps, place["device"])
        self.layer = AttentionLayer(
            index=index,
            q_heads=config.q_heads,
            kv_heads=config.kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=config.windows[index],
            is_causal=config.is_causal or config.windows[index] is not None,
        )

    def rows(self, x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, kv_heads, head_dim] of x [tokens, hidden]."""
        heads = (self.layer.kv_heads, self.layer.head_dim)
        k = self.k_norm(self.k_proj(x).unflatten(-1, heads))
        return rotate(k, *turn), self.v_proj(x).unflatten(-1, heads)

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.layer.q_heads, self.layer.head_dim)))
        return self.o_proj(mixers.attend(self.layer, rotate(q, *turn), *self.rows(x, turn)).flatten(1))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DraftConfig, index: int, **place) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.self_attn = DraftAttention(config, index, **place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, place["device"])
        self.mlp = GatedMLP(config.hidden_size, config.mlp_size, **place)

    def forward(self, x: torch.Tensor, turn: Turn, mixers: Mixers) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, mixers)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """What the token before adds to the logits; e = W1[previous], h = the block's hidden state.

    vanilla: W2 e. gated: W2 (sigmoid(G [h; e]) * e). rnn: with (g, c, o) = J [s; e; h], the state becomes
    sigmoid(g) s + (1 - sigmoid(g)) tanh(c), and the bias is W2 tanh(o).
    """

    def __init__(self, kind: str, rank: int, config: DraftConfig, **place) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = Embedding(config.vocab_size, rank, **place)
        self.markov_w2 = Linear(rank, config.vocab_size, bias=False, **place)
        if kind == "gated":
            self.gate_proj = Linear(config.hidden_size + rank, rank, **place)
        if kind == "rnn":
            self.joint_proj = Linear(2 * rank + config.hidden_size, 3 * rank, **place)

    def step(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """previous: [batch], hidden: [batch, hidden], state: [batch, rank], None at first -> fp32 bias, next state."""
        embedded = self.markov_w1(previous)
        if self.kind == "gated":
            embedded = self.gate_proj(torch.cat((hidden, embedded), dim=-1)).sigmoid() * embedded
        if self.kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            keep, new, out = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
            state = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh()
            embedded = out.tanh()
        return self.markov_w2(embedded).float(), state


class ConfidenceHead(nn.Module):
    """sigmoid(w [h; W1[previous]] / temperature): that the draft picked after `previous` is accepted."""

    def __init__(self, config: DraftConfig, **place) -> None:
        super().__init__()
        rank = config.markov[1] if config.markov and config.confidence_with_markov else 0
        self.proj = Linear(config.hidden_size + rank, 1, **place)
        heats = torch.tensor(config.temperatures or (1.0,) * config.drafts, device=place["device"])
        self.register_buffer("temperatures", heats, persistent=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """hidden: [batch, drafts, hidden], embedded: [batch, drafts, rank] or None -> fp32 [batch, drafts]."""
        seen = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        return (self.proj(seen)[..., 0].float() / self.temperatures).sigmoid()


def walk(head: MarkovHead, logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, pick: Pick) -> Proposal:
    """Pick the block's tokens one after the other, each biased by the one before; the first by the anchor.

    logits: fp32 [batch, drafts, vocab]; hidden: [batch, drafts, hidden]; anchors: int64 [batch].
    """
    previous, state = anchors, None
    ids, biased = [], []
    for index in range(logits.shape[1]):
        bias, state = head.step(previous, hidden[:, index], state)
        biased.append(logits[:, index] + bias)
        previous = pick(biased[-1], index)
        ids.append(previous)
    return Proposal(ids=torch.stack(ids, dim=1), logits=torch.stack(biased, dim=1), confidence=None)


class BlockDraft(BorrowingDraft):
    """The draft.

    What it asks of its mixers: `store` at `inject`, `attend` in a block pass, which is a verify batch of `config.width`
    tokens per request.
    """

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(config)
        place = {"dtype": dtype, "device": device}
        hidden = config.hidden_size
        self.fc = Linear(len(config.target_layers) * hidden, hidden, bias=False, **place)
        self.hidden_norm = RMSNorm(hidden, config.norm_eps, device)
        self.layers = nn.ModuleList(DraftLayer(config, index, **place) for index in range(len(config.windows)))
        self.norm = RMSNorm(hidden, config.norm_eps, device)
        self.markov_head = MarkovHead(*config.markov, config, **place) if config.markov else None
        self.confidence_head = ConfidenceHead(config, **place) if config.confidence else None
        self.rotary = Rotary(config.rope, config.rope.rotated(config.head_dim), config.max_positions, device)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [layer.self_attn.layer for layer in self.layers]

    def features(self, residuals: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What `inject` is given, [tokens, picks * hidden], from the target's streams after each layer."""
        return torch.cat([residuals[layer] for layer in self.config.target_layers], dim=-1)

    def inject(self, features: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> None:
        """Store the rows of committed tokens: features [tokens, picks * hidden] at positions [tokens], where mixers
        write."""
        turn, fed = self.rotary.at(positions), self.hidden_norm(self.fc(features))
        for layer in self.layers:
            mixers.store(layer.self_attn.layer, *layer.self_attn.rows(fed, turn))

    def block(self, anchors: torch.Tensor, positions: torch.Tensor, mixers: Mixers) -> torch.Tensor:
        """One block pass: anchors, positions [batch], the anchors' own -> hidden states [batch, drafts, hidden]."""
        batch, width = len(anchors), self.config.width
        ids = torch.full((batch, width), self.config.mask_id, dtype=anchors.dtype, device=anchors.device)
        ids[:, 0] = anchors
        turn = self.rotary.at((positions[:, None] + torch.arange(width, device=positions.device)).flatten())
        x = self.embed(ids.flatten())
        for layer in self.layers:
            x = layer(x, turn, mixers)
        return self.norm(x).view(batch, width, -1)[:, width - self.config.drafts :]

    def propose(self, anchors: torch.Tensor, positions: torch.Tensor, mixers: Mixers, pick: Pick = greedy) -> Proposal:
        """Drafts after anchors [batch] at positions [batch], `config.drafts` each. No shape depends on the data."""
        hidden = self.block(anchors, positions, mixers)
        logits = self.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        if self.markov_head is None:
            ids = torch.stack([pick(logits[:, index], index) for index in range(logits.shape[1])], dim=1)
            proposal = Proposal(ids=ids, logits=logits, confidence=None)
        else:
            proposal = walk(self.markov_head, logits, hidden, anchors, pick)
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence(hidden, torch.cat((anchors[:, None], proposal.ids[:, :-1]), dim=1))
        return Proposal(ids=proposal.ids, logits=proposal.logits, confidence=confidence)

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """hidden: [batch, drafts, hidden], before: int64 [batch, drafts], the token before each -> fp32, as before."""
        assert self.confidence_head is not None
        embedded = None
        if self.markov_head is not None and self.config.confidence_with_markov:
            embedded = self.markov_head.markov_w1(before)
        return self.confidence_head(hidden, embedded)

    def checkpoint_tensors(self, held: Collection[str]) -> dict[str, torch.Tensor]:
        """Published with or without `model.` before the names."""
        return {
            f"model.{name}" if f"model.{name}" in held else name: each for name, each in stored_tensors(self).items()
        }

    def other_runners_tensor(self, name: str) -> bool:
        """Embedding and output projection are borrowed, whether the file has copies or not."""
        return name.removeprefix("model.") in BORROWED
