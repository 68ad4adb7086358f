"""Weights that nobody trained: the real geometry of a model, for capacity and speed, without a checkpoint.

Outputs stay finite and of usual size, so that kernels do what they would do; what they say means nothing.
"""

import math

import torch
from torch import nn

from suite.models.layers import RMSNorm

DUMMY_SEED = 20
DECAY = 1e-2  # per token, of every recurrent head


def fill_dummy(model: nn.Module, seed: int = DUMMY_SEED) -> nn.Module:
    """Draw every parameter in place, on its own device; the same seed gives the same weights there."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            if name.endswith("dt_bias"):
                parameter.fill_(math.log(math.expm1(DECAY)))  # softplus(dt_bias) is the decay
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5, generator=generator)
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1 - module.offset)
    return model
