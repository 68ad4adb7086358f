"""FlashInfer's paged wrappers over CSR int32 streams of kernel ids: its page is one token, whatever ours is.

One wrapper for the window layers and one for the full ones. A decode's window stream ends where the window
does, so only an extend or a verify tells the kernel about it, by the tokens to the left of a query, itself apart: our
window of W tokens is `window_left` W - 1. Sinks exist in the sink wrapper only, whose compiled library is named
without the head_dim: one that was built ahead must have been built for this model's. All use the `fa2` kernels
on tensor cores, so that eager and captured, decode and extend run one family of kernels on every GPU.

A wrapper plans on the host, and needs the query heads for it, which no metadata knows: the first forward
of a kind of layer plans, and every later replay plans again before its graph runs.
"""

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, CsrMetadata, CsrStream, Metadata
from suite.kernels.attention.csr import CsrCapture, host_indptr, plan_csr
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import native_refusal, table_refusal
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.translator import KVIndexTranslator
from suite.records import Launcher, PoolMode

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 512 << 20  # captured verify batches plan for their widest split: 132 MiB were asked for once
KERNELS = "fa2"


@dataclass(frozen=True, kw_only=True, eq=False)
class FlashInferMetadata(CsrMetadata):
    """CSR, and what a plan reads on the host: [batch + 1] offsets of the queries and of each kind's stream."""

    query_indptr_host: tuple[int, ...]
    kv_indptr_host: dict[KVKind, tuple[int, ...]]
    is_captured: bool

    @classmethod
    def of(
        cls, metadata: CsrMetadata, batch: ForwardBatch, translator: KVIndexTranslator, *, is_captured: bool
    ) -> "FlashInferMetadata":
        kinds = [pool.kind for pool in translator.pool.geometry.pools]
        return cls(
            **{field.name: getattr(metadata, field.name) for field in fields(CsrMetadata)},
            query_indptr_host=tuple(accumulate(batch.query_lens_host, initial=0)),
            kv_indptr_host={kind: tuple(host_indptr(batch, translator, kind)) for kind in kinds},
            is_captured=is_captured,
        )

    @property
    def shape(self) -> tuple[int, ForwardMode]:
        """What a graph is captured for: requests, and decode or verify."""
        return self.seq_lens.numel(), self.mode

    def stream_of(self, kind: KVKind) -> CsrStream:
        stream = self.full if kind is KVKind.FULL else self.window
        if stream is None:
            raise TypeError("flashinfer: this batch has no window stream: its runner has no window pool")
        return stream


class FlashInferBackend(AttentionBackend):
    """CSR int32 metadata; native through `flashinfer`, or the same streams through the oracle."""

    name = "flashinfer"
    captured: CsrCapture | None = None

    def __init__(self, *, pool: Any, translator: KVIndexTranslator, launcher: Launcher, sinks: bool) -> None:
        super().__init__(pool=pool, translator=translator, launcher=launcher, sinks=sinks)
        self._wrappers: dict[tuple[object, ...], _Wrapper] = {}
        self._replayed: dict[tuple[int, ForwardMode], FlashInferMetadata] = {}  # what the stable buffers hold now
        self._workspace: torch.Tensor | None = None
        if launcher == "native":  # shared: wrappers run one after the other
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        return {"native": native_refusal("flashinfer", device), "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        if reason := table_refusal("flashinfer", geometry, pool, device, launcher, sinks):
            return reason
        for kv in geometry.pools:
            if launcher == "native" and kv.dtype not in DTYPES:
                return f"flashinfer: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
            if launcher == "native" and kv.head_dim not in HEAD_DIMS:
                return f"flashinfer: needs head_dim {' or '.join(map(str, HEAD_DIMS))}, got {kv.head_dim}"
        if reason := cls.launcher_refusal(device, launcher):
            return reason
        return _sink_wrapper_refusal() if launcher == "native" and sinks else None

    def plan(self, batch: ForwardBatch) -> FlashInferMetadata:
        return FlashInferMetadata.of(plan_csr(batch, self.translator), batch, self.translator, is_captured=False)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        self.captured = CsrCapture(self.translator, max_batch, draft_tokens)
        self._wrappers = {key: wrapper for key, wrapper in self._wrappers.items() if not wrapper.is_captured}
        self._replayed = {}

    def replay(self, batch: ForwardBatch) -> FlashInferMetadata:
        if self.captured is None:
            raise InvariantError("flashinfer: replay before capture")
        refilled = self.captured.refill(batch)
        metadata = FlashInferMetadata.of(refilled, batch, self.translator, is_captured=True)
        self._replayed[metadata.shape] = metadata
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
            raise TypeError(f"flashinfer: needs FlashInferMetadata, got {type(metadata).__name__}")
        if metadata.is_captured:  # an earlier replay's metadata has the same buffers, but its host side is stale
            metadata = self._replayed[metadata.shape]
        wrapper = self._wrapper(layer, metadata)
        if wrapper.planned_for is not metadata:
            wrapper.plan(metadata)
        cache = _one_token_pages(self.pool.k_view(layer.index)), _one_token_pages(self.pool.v_view(layer.index))
        return wrapper.run(q, cache, layer)

    def _wrapper(self, layer: AttentionLayer, metadata: FlashInferMetadata) -> "_Wrapper":
        """The wrapper of this kind of layer and forward; a captured one belongs to one batch size and mode."""
        where = metadata.shape if metadata.is_captured else (metadata.mode,)
        has_sinks = layer.sinks is not None
        key = (metadata.is_captured, *where, layer.kind, layer.q_heads, layer.scale, has_sinks)
        if key not in self._wrappers:
            assert self._workspace is not None  # the launcher is native
            geometry = self.pool.geometry.of(layer.kind)
            self._wrappers[key] = _Wrapper(layer, metadata, geometry, self._workspace)
        return self._wrappers[key]


class _Wrapper:
    """One FlashInfer wrapper, and the metadata that it was planned for last."""

    def __init__(
        self, layer: AttentionLayer, metadata: FlashInferMetadata, geometry: KVGeometry, workspace: torch.Tensor
    ) -> None:
        self.kind, self.q_heads, self.scale, self.geometry = layer.kind, layer.q_heads, layer.scale, geometry
        self.is_captured, self.shape = metadata.is_captured, metadata.shape
        self.has_sinks = layer.sinks is not None
        is_decode = metadata.mode is ForwardMode.DECODE
        self.plans_queries = self.has_sinks or not is_decode
        self.window_left = -1 if is_decode or layer.window is None else layer.window - 1
        self.planned_for: FlashInferMetadata | None = None
        self._copied = torch.cuda.Event() if workspace.device.type == "cuda" else None
        self._wrapper = self._make(metadata, workspace)

    def plan(self, metadata: FlashInferMetadata) -> None:
        """Schedule this batch on the host. InvariantError inside a graph capture, which would replay one schedule."""
        if _is_capturing():
            raise InvariantError("flashinfer: needs a forward of every captured batch size before its capture")
        if self._copied is not None:
            self._copied.synchronize()  # the last schedule travels from a pinned buffer that this one overwrites
        indptr, indices = metadata.kv_indptr_host[self.kind], metadata.stream_of(self.kind).indices
        pages = {
            # a captured wrapper copies the head of its own buffer onto itself, which does nothing
            "indptr": _host(indptr),
            "indices": indices[: indptr[-1]],
            "last_page_len": torch.ones(len(indptr) - 1, dtype=torch.int32),
        }
        shape: dict[str, Any] = {
            "num_qo_heads": self.q_heads,
            "num_kv_heads": self.geometry.kv_heads,
            "page_size": 1,
            "window_left": self.window_left,
            "sm_scale": self.scale,
            "q_data_type": self.geometry.dtype,
            "kv_data_type": self.geometry.dtype,
        }
        if self.plans_queries:
            pages = {f"paged_kv_{name}": value for name, value in pages.items()}
            shape |= {"qo_indptr": _host(metadata.query_indptr_host), "causal": True}
            self._wrapper.plan(**pages, **shape, head_dim_qk=self.geometry.head_dim)
        else:
            self._wrapper.plan(**pages, **shape, head_dim=self.geometry.head_dim)
        if self._copied is not None:
            self._copied.record()
        self.planned_for = metadata

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], layer: AttentionLayer) -> torch.Tensor:
        extra = () if layer.sinks is None else (layer.sinks, self.scale)
        out: torch.Tensor = self._wrapper.run(q, cache, *extra)
        return out

    def _make(self, metadata: FlashInferMetadata, workspace: torch.Tensor) -> Any:
        import flashinfer  # a GPU library, loaded by whoever launches it

        common = {"kv_layout": "NHD", "use_cuda_graph": self.is_captured, "backend": KERNELS}
        stream, ones = metadata.stream_of(self.kind), torch.ones_like(metadata.seq_lens)
        buffers = {"indptr": stream.indptr, "indices": stream.indices, "last_page_len": ones}
        if not self.plans_queries:
            own = {f"paged_kv_{name}_buffer": buffer for name, buffer in buffers.items()} if self.is_captured else {}
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True, **common, **own)
        own = {f"paged_kv_{name}_buf": buffer for name, buffer in buffers.items()} if self.is_captured else {}
        if self.is_captured:
            own["qo_indptr_buf"] = metadata.cu_query_lens
        if not self.has_sinks:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, **common, **own)
        return flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace,
            **common,
            **own,
            q_data_type=self.geometry.dtype,
            kv_data_type=self.geometry.dtype,
            head_dim_qk=self.geometry.head_dim,
            head_dim_vo=self.geometry.head_dim,
            window_left=self.window_left,
        )


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _host(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _one_token_pages(view: torch.Tensor) -> torch.Tensor:
    """[rows, kv_heads, head_dim] -> [rows, 1, kv_heads, head_dim]; the page and its one token share the row stride."""
    row, head, element = view.stride()
    return view.as_strided((view.shape[0], 1, *view.shape[1:]), (row, row, head, element))


def _sink_wrapper_refusal() -> str | None:
    import flashinfer  # only asked for when the model has sinks, and after the package was found

    if hasattr(flashinfer, "BatchAttentionWithAttentionSinkWrapper"):
        return None
    need = "the attention sink wrapper for a model with sinks"
    return f"flashinfer: needs {need}, got flashinfer {flashinfer.__version__}"
