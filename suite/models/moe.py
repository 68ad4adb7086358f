"""gpt-oss' mixture of experts: a biased router, the top k renormalised, clamped SwiGLU experts.

All experts run on all tokens and the unselected ones weigh zero: no shape depends
on the data, so the forward can be captured in a CUDA graph, and the sum over
experts has one order, so equal inputs give equal bits.
"""

import torch
from torch import nn

from suite.models.config import GptOssConfig
from suite.models.layers import Linear


class Experts(nn.Module):
    """gate_up_proj: [experts, hidden, 2 * size], gate and up interleaved; down_proj: [experts, size, hidden]."""

    def __init__(self, config: GptOssConfig, **place) -> None:
        super().__init__()
        experts, hidden, size = config.experts, config.hidden_size, config.expert_size
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden, 2 * size, **place))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * size, **place))
        self.down_proj = nn.Parameter(torch.empty(experts, size, hidden, **place))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden, **place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> [experts, tokens, hidden]."""
        every = x.expand(len(self.gate_up_proj), *x.shape)
        gate_up = torch.baddbmm(self.gate_up_proj_bias[:, None], every, self.gate_up_proj)
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        inner = gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return torch.baddbmm(self.down_proj_bias[:, None], inner, self.down_proj)


class MixtureOfExperts(nn.Module):
    """Weighted sum of the `experts_per_token` experts that the router scores highest."""

    def __init__(self, config: GptOssConfig, **place) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.router = Linear(config.hidden_size, config.experts, **place)
        self.experts = Experts(config, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        scores = self.router(x).float()
        top, chosen = scores.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, top.softmax(-1))
        outputs = self.experts(x)
        return (outputs * weights.T[:, :, None]).sum(0).to(x.dtype)
