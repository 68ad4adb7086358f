"""FlashInfer's MLA wrapper over CSR int32 streams of kernel ids: its page is one token, whatever ours is.

The kernels are the library's choice for the GPU: `fa3` on sm_90, `fa2` elsewhere. A captured wrapper
holds our stable stream as its own index buffer, which a replay refills in place and never rebinds.

A wrapper plans on the host, and needs the query heads for it, which no metadata knows: the first forward
plans, and every later replay plans again before its graph runs.
"""

from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, Metadata
from suite.kernels.attention.csr import CsrCapture, plan_csr
from suite.kernels.attention.flashinfer import FlashInferMetadata
from suite.kernels.attention.latent import row_refusal
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.records import Launcher, PoolMode

WORKSPACE_BYTES = 128 << 20
KERNELS = "auto"


class FlashInferMlaBackend(AttentionBackend):
    """CSR int32 metadata; native through `flashinfer.mla`, or the same streams through the oracle."""

    name = "flashinfer_mla"
    captured: CsrCapture | None = None

    def __init__(self, **runner: Any) -> None:
        super().__init__(**runner)
        self._wrappers: dict[tuple[object, ...], _Wrapper] = {}
        self._workspace: torch.Tensor | None = None
        if self.launcher == "native":  # shared: wrappers run one after the other
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.pool.device)

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal("flashinfer_mla", device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal("flashinfer_mla", geometry, pool, device, launcher, sinks):
            return reason
        if launcher == "native" and (reason := row_refusal("flashinfer_mla", geometry)):
            return reason
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> FlashInferMetadata:
        return FlashInferMetadata.of(plan_csr(batch, self.translator), batch, self.translator, is_captured=False)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        self.captured = CsrCapture(self.translator, max_batch, draft_tokens)
        self._wrappers = {key: wrapper for key, wrapper in self._wrappers.items() if not wrapper.is_captured}

    def replay(self, batch: ForwardBatch) -> FlashInferMetadata:
        if self.captured is None:
            raise InvariantError("flashinfer_mla: replay before capture")
        refilled = self.captured.refill(batch)
        metadata = FlashInferMetadata.of(refilled, batch, self.translator, is_captured=True)
        for wrapper in self._wrappers.values():
            if wrapper.is_captured and wrapper.shape == metadata.shape:
                wrapper.plan(metadata)
        return metadata

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, FlashInferMetadata):
            raise TypeError(f"flashinfer_mla: needs FlashInferMetadata, got {type(metadata).__name__}")
        wrapper = self._wrapper(layer, metadata)
        if wrapper.planned_for is not metadata:
            wrapper.plan(metadata)
        return wrapper.run(q, self.pool.latent_view(layer.index))

    def _wrapper(self, layer: AttentionLayer, metadata: FlashInferMetadata) -> "_Wrapper":
        """The wrapper of layers like this one; a captured one belongs to one batch size and mode."""
        shape = metadata.shape if metadata.is_captured else None
        key = (shape, layer.q_heads, layer.scale)
        if key not in self._wrappers:
            assert self._workspace is not None  # the launcher is native
            self._wrappers[key] = _Wrapper(layer, metadata, self.pool.geometry.full.dtype, self._workspace)
        return self._wrappers[key]


class _Wrapper:
    """One FlashInfer MLA wrapper, and the metadata that it was planned for last."""

    def __init__(
        self, layer: AttentionLayer, metadata: FlashInferMetadata, dtype: torch.dtype, workspace: torch.Tensor
    ) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # a GPU library, loaded by whoever launches it

        self.q_heads, self.scale, self.dtype = layer.q_heads, layer.scale, dtype
        self.latent, self.rope = layer.out_dim, layer.head_dim - layer.out_dim
        self.is_captured, self.shape = metadata.is_captured, metadata.shape
        self.planned_for: FlashInferMetadata | None = None
        self._copied = torch.cuda.Event() if workspace.device.type == "cuda" else None
        own: dict[str, Any] = {}
        if self.is_captured:
            stream = metadata.stream_of(KVKind.FULL)
            own = {
                "use_cuda_graph": True,
                "qo_indptr": metadata.cu_query_lens,
                "kv_indptr": stream.indptr,
                "kv_indices": stream.indices,  # a graph reads this address, so never rebind it
                "kv_len_arr": metadata.seq_lens,
            }
        self._wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=KERNELS, **own)

    def plan(self, metadata: FlashInferMetadata) -> None:
        """Schedule this batch on the host. InvariantError inside a graph capture, which would replay one schedule."""
        if self._copied is not None:
            if torch.cuda.is_current_stream_capturing():
                raise InvariantError("flashinfer_mla: needs a forward of every captured batch size before its capture")
            self._copied.synchronize()  # the last schedule travels from a pinned buffer that this one overwrites
        indptr = torch.tensor(metadata.kv_indptr_host[KVKind.FULL], dtype=torch.int32)
        self._wrapper.plan(
            qo_indptr=torch.tensor(metadata.query_indptr_host, dtype=torch.int32),
            kv_indptr=indptr,
            # a captured wrapper copies the head of its own buffer onto itself, which does nothing
            kv_indices=metadata.full.indices[: int(indptr[-1])],
            kv_len_arr=indptr.diff(),
            num_heads=self.q_heads,
            head_dim_ckv=self.latent,
            head_dim_kpe=self.rope,
            page_size=1,
            causal=True,
            sm_scale=self.scale,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        if self._copied is not None:
            self._copied.record()
        self.planned_for = metadata

    def run(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, latent + rope] over latent rows [all rows, latent + rope], which may be strided."""
        pages = rows.as_strided((rows.shape[0], 1, rows.shape[1]), (rows.stride(0), rows.stride(0), 1))
        out: torch.Tensor = self._wrapper.run(
            q[..., : self.latent],
            q[..., self.latent :],
            pages[..., : self.latent],
            pages[..., self.latent :],
            out=q.new_empty(*q.shape[:2], self.latent),
        )
        return out
