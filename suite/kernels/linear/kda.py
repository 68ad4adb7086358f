"""Kimi delta attention: one decay per channel of the key, convolution windows with the taps first."""

from suite.kernels.linear.delta import DeltaBackend, window_refusal
from suite.kernels.linear.stamp import LinearAttnBackends
from suite.kernels.pools.state import StateGeometry
from suite.records import Launcher


class KdaBackend(DeltaBackend):
    """The safe gate (`DeltaLayer.lower_bound`) and the plain one, chains and trees: all on our Triton kernels."""

    name = "kda"

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
        if stamp.verify == "flashinfer" and topk > 1:
            return f"kda: needs topk <= 1 for flashinfer verify, which takes chains only, got {topk}"
        if reason := window_refusal(cls.name, geometry, taps_first=True):
            return reason
        return cls.common_refusal(stamp, geometry, device, launcher)
