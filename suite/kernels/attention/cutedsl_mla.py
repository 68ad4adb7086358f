"""FlashInfer's CuTe DSL MLA kernels for sm_10x: decode only, with `trtllm_mla`'s tables and its kernels for extends."""

import torch

from suite.kernels.attention.trtllm_mla import AUTO, TrtllmMlaBackend, TrtllmMlaMetadata
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import AttentionLayer


class CuteDslMlaBackend(TrtllmMlaBackend):
    """As `trtllm_mla`, but for the kernel that decodes."""

    name = "cutedsl_mla"

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, pages: torch.Tensor, metadata: TrtllmMlaMetadata
    ) -> torch.Tensor:
        kernels = "cute-dsl" if metadata.mode is ForwardMode.DECODE else AUTO
        return self._flashinfer(layer, query, pages, metadata, kernels=kernels)
