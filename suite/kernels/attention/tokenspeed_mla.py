"""TokenSpeed's MLA kernels for sm_10x: decode only, with `trtllm_mla`'s tables and its kernels for extends.

Nothing has run; what could be checked is the signature of `tokenspeed_mla_decode` in release 2.0.4.
"""

import torch

from suite.kernels.attention.support import native_refusal
from suite.kernels.attention.trtllm_mla import TrtllmMlaBackend, TrtllmMlaMetadata
from suite.kernels.batch import ForwardMode
from suite.kernels.geometry import AttentionLayer
from suite.records import Launcher


class TokenSpeedMlaBackend(TrtllmMlaBackend):
    """As `trtllm_mla`, but for the kernel that decodes."""

    name = "tokenspeed_mla"

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        native = native_refusal(cls.name, device)
        if native is None and (reason := native_refusal("trtllm_mla", device)):
            native = f"{cls.name}: needs what its extends run on, got {reason}"
        return {"native": native, "reference": None}

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, pages: torch.Tensor, metadata: TrtllmMlaMetadata
    ) -> torch.Tensor:
        if metadata.mode is not ForwardMode.DECODE:
            return super()._attend(layer, query, pages, metadata)
        from tokenspeed_mla import tokenspeed_mla_decode  # a GPU library, loaded by whoever launches it

        out: torch.Tensor = tokenspeed_mla_decode(
            query=query,
            kv_cache=pages,
            workspace_buffer=self._workspace(),
            kv_lora_rank=layer.out_dim,
            qk_rope_head_dim=layer.head_dim - layer.out_dim,
            block_tables=metadata.page_table,
            seq_lens=metadata.seq_lens,
            max_seq_len=metadata.page_table.shape[1] * metadata.page_size,
            softmax_scale=layer.scale * self.pool.scales(layer.index)[0],
            output_scale=self.pool.scales(layer.index)[1],
            causal_mask=True,
        )
        return out
