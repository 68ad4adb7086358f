"""GDN on Ascend NPUs: registered, and refused wherever `torch_npu` is missing.

With `torch_npu` the torch twins run on the NPU, which is the reference launcher; we have no compiled NPU kernel.
"""

import importlib.util

import torch

from suite.kernels.linear.base import LinearBackend
from suite.kernels.linear.delta import window_refusal
from suite.kernels.linear.gdn import GdnBackend
from suite.kernels.linear.stamp import LinearAttnBackends
from suite.kernels.pools.state import StateGeometry
from suite.records import Launcher


class AscendGdnBackend(GdnBackend):
    """GDN by the torch twins on device `npu`."""

    name = "ascend_gdn"
    kernels = LinearBackend.kernels  # no vendor prefill

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        reason = None
        if importlib.util.find_spec("torch_npu") is None:
            reason = "ascend_gdn: needs the package torch_npu, got none installed"
        elif device != "npu":
            reason = f"ascend_gdn: needs device npu, got {device}"
        return {"reference": reason}

    @classmethod
    def refusal(
        cls,
        stamp: LinearAttnBackends,
        geometry: StateGeometry,
        device: str,
        launcher: Launcher,
        *,
        topk: int = 0,
        deterministic: bool = False,
    ) -> str | None:
        # the missing package first: without it nothing else about the machine matters
        for reason in cls.launchers(device).values():
            if reason:
                return reason
        if geometry.temporal_dtype != torch.float32:
            return f"ascend_gdn: needs fp32 states, got {geometry.temporal_dtype}"
        return window_refusal(cls.name, geometry, taps_first=False) or cls.common_refusal(
            stamp, geometry, device, launcher
        )
