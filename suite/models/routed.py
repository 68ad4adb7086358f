"""Mixture of many experts: route, sort the tokens by expert, two grouped products, sum in the order of rank.

Only the chosen experts' weights are read, no shape depends on the data (so a decode can be captured), nothing
is accumulated atomically (so equal inputs give equal bits).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from suite.models.layers import Linear

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
EPSILON = 1e-20  # keeps a renormalisation of all-zero scores finite


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, no bias."""

    def __init__(self, hidden: int, size: int, **place) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, size, bias=False, **place)
        self.up_proj = Linear(hidden, size, bias=False, **place)
        self.down_proj = Linear(size, hidden, bias=False, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RoutedExperts(nn.Module):
    """Experts as `GatedMLP`. gate_up_proj: [experts, 2 * size, hidden], gate rows first; down_proj: [experts, hidden,
    size]. `names`: what the checkpoint calls an expert's gate, up and down."""

    def __init__(
        self, experts: int, hidden: int, size: int, names: tuple[str, str, str] = GATE_UP_DOWN, **place
    ) -> None:
        super().__init__()
        self.size, self.names = size, names
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * size, hidden, **place))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, size, **place))

    def stored_as(self) -> dict[str, torch.Tensor]:
        """Checkpoints store every expert's matrices apart."""
        gate, up, down = self.names
        found = {}
        for expert, (gate_up, downwards) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            found[f"{expert}.{gate}.weight"], found[f"{expert}.{up}.weight"] = gate_up.split(self.size)
            found[f"{expert}.{down}.weight"] = downwards
        return found

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]; chosen, weights: [tokens, top_k] expert and fp32 factor -> [tokens, hidden]."""
        tokens, top_k = chosen.shape
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        # grouped products know nothing of autocast
        rows, gate_up_proj, down_proj = (held.to(dtype) for held in (x, self.gate_up_proj, self.down_proj))
        experts, order = chosen.flatten().sort(stable=True)
        every = torch.arange(len(self.down_proj), device=x.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)  # of each expert's rows
        gate_up = F.grouped_mm(rows[order // top_k], gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        sorted_out = F.grouped_mm(F.silu(gate) * up, down_proj.transpose(1, 2), offs=ends)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        ranked = sorted_out[back].view(tokens, top_k, -1)
        return (ranked * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen.

    score: of each expert, a softmax over all or a sigmoid of its own. groups, kept_groups: `groups` equal
    groups, of which only the best `kept_groups` can be chosen from. group_score: a group's best score, or the sum of
    its best two. corrected: choose by score plus a learnt bias, weigh by the score alone. renormalise: weights sum to 1
    before they are multiplied by `scaling`.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    corrected: bool = False
    renormalise: bool
    scaling: float


class Router(nn.Module):
    """Chooses in fp32, whatever the model's dtype: a rounded score picks another expert. weight: [experts, hidden]."""

    def __init__(self, routing: Routing, hidden: int, device: torch.device | str) -> None:
        super().__init__()
        wide = {"dtype": torch.float32, "device": device}
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden, **wide))
        self.e_score_correction_bias = nn.Parameter(torch.empty(routing.experts, **wide)) if routing.corrected else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, hidden] -> experts [tokens, top_k] int64, weights [tokens, top_k] fp32."""
        logits = F.linear(x.float(), self.weight)
        scores = logits.softmax(-1) if self.routing.score == "softmax" else logits.sigmoid()
        return choose(scores, self.e_score_correction_bias, self.routing)


def choose(scores: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: fp32 [tokens, experts], bias: [experts] or None -> experts and weights [tokens, top_k]."""
    wanted = scores if bias is None else scores + bias
    if routing.groups > routing.kept_groups:
        grouped = wanted.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(1 if routing.group_score == "best" else 2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(routing.kept_groups).indices, True)
        wanted = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    chosen = wanted.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    return chosen, weights * routing.scaling


class SharedMixtureOfExperts(nn.Module):
    """Routed experts and, for every token, shared ones: one MLP as wide as all of them together.

    expert_size: of one routed expert; shared_size: of the shared MLP.
    """

    def __init__(
        self,
        routing: Routing,
        hidden: int,
        expert_size: int,
        shared_size: int,
        names: tuple[str, str, str] = GATE_UP_DOWN,
        **place,
    ) -> None:
        super().__init__()
        self.gate = Router(routing, hidden, place["device"])
        self.experts = RoutedExperts(routing.experts, hidden, expert_size, names, **place)
        self.shared_experts = GatedMLP(hidden, shared_size, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)
