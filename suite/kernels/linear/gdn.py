"""Gated delta net: one decay per value head. Our own kernels, or FlashInfer's for the prefill."""

import importlib.util
from typing import ClassVar

import torch

from suite.errors import RefusedError
from suite.kernels.linear.delta import DeltaBackend, window_refusal
from suite.kernels.linear.metadata import BatchShape, LinearMetadata, Tracking
from suite.kernels.linear.stamp import LinearAttnBackends
from suite.kernels.ops.delta_chunk import ChunkPlan, ChunkResult
from suite.kernels.ops.delta_step import StepInputs, normalised
from suite.kernels.pools.state import KernelSlots, StateGeometry
from suite.records import Launcher

FLASHINFER_HEAD_DIM = 128


class GdnBackend(DeltaBackend):
    """Draft trees and chains verify on our Triton kernel."""

    name = "gdn"
    kernels: ClassVar[dict[str, tuple[str, ...]]] = {
        "decode": ("triton",),
        "prefill": ("triton", "flashinfer"),
        "verify": ("triton",),
    }

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
        if reason := window_refusal(cls.name, geometry, taps_first=False):
            return reason
        if reason := cls.common_refusal(stamp, geometry, device, launcher):
            return reason
        if stamp.prefill == "flashinfer":
            return flashinfer_refusal(geometry, device, launcher, deterministic=deterministic)
        return None

    def plan(
        self,
        batch: BatchShape,
        slots: KernelSlots,
        *,
        verify: bool = False,
        parents: torch.Tensor | None = None,
        tracking: Tracking | None = None,
    ) -> LinearMetadata:
        if tracking is not None and self._vendor_prefill:
            raise RefusedError(
                f"{self.name}: needs prefill kernel triton to keep chunk-boundary states, got flashinfer"
            )
        return super().plan(batch, slots, verify=verify, parents=parents, tracking=tracking)

    def prefill(
        self, inputs: StepInputs, initial: torch.Tensor, chunks: ChunkPlan, cu_query_lens: torch.Tensor
    ) -> ChunkResult:
        if self._vendor_prefill:
            return flashinfer_prefill(inputs, initial, cu_query_lens)
        return super().prefill(inputs, initial, chunks, cu_query_lens)

    @property
    def _vendor_prefill(self) -> bool:
        return self.stamp.prefill == "flashinfer" and self.launcher == "native"


def flashinfer_refusal(geometry: StateGeometry, device: str, launcher: Launcher, *, deterministic: bool) -> str | None:
    """Why FlashInfer's GDN prefill cannot serve; None when it can. The reference launcher stands in for it anywhere."""
    if deterministic:
        return "gdn: needs prefill kernel triton to be deterministic, got flashinfer"
    if geometry.temporal_dtype != torch.float32:
        return f"gdn: needs fp32 states for flashinfer prefill, got {geometry.temporal_dtype}"
    if geometry.conv_dtype != torch.bfloat16:
        return f"gdn: needs bf16 activations for flashinfer prefill, got {geometry.conv_dtype}"
    if (dims := (geometry.k_dim, geometry.v_dim)) != (FLASHINFER_HEAD_DIM, FLASHINFER_HEAD_DIM):
        return f"gdn: needs k_dim and v_dim of {FLASHINFER_HEAD_DIM} for flashinfer prefill, got {dims}"
    if launcher == "reference":
        return None
    if launcher != "native" or device != "cuda":
        return f"gdn: needs launcher native or reference for flashinfer prefill, got {launcher}"
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        return f"gdn: needs sm_90 for flashinfer prefill with fp32 states, got sm_{capability[0]}{capability[1]}"
    if importlib.util.find_spec("flashinfer") is None:
        return "gdn: needs the package flashinfer-python for flashinfer prefill, got none installed"
    if importlib.util.find_spec("flashinfer.gdn_prefill") is None:
        return "gdn: needs a flashinfer with gdn_prefill, got one without"
    return None


def flashinfer_prefill(inputs: StepInputs, initial: torch.Tensor, cu_query_lens: torch.Tensor) -> ChunkResult:
    """FlashInfer's chunked delta rule. It takes unit q and k, the decay itself and not its logarithm, and states
    [batch, v_heads, V, K] like ours; it keeps no chunk boundaries, so `boundaries` is empty."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule  # a GPU library, loaded by whoever launches it

    assert inputs.beta is not None
    dtype = inputs.v.dtype
    out, final = chunk_gated_delta_rule(
        q=normalised(inputs.q).to(dtype),
        k=normalised(inputs.k).to(dtype),
        v=inputs.v.contiguous(),
        g=inputs.g.exp(),
        beta=inputs.beta,
        scale=inputs.k.shape[2] ** -0.5,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=cu_query_lens.long(),
        output_state=torch.empty_like(initial),
    )
    return ChunkResult(out=out, final=final, boundaries=initial[:0])
