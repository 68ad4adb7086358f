"""Our own Triton kernels: split-KV decode and causal extend over CSR streams of kernel ids.

Native on CUDA; on a CPU the same kernels run under Triton's interpreter, which is slow and exact.
"""

import torch

from suite.errors import InvariantError
from suite.kernels.attention.base import AttentionBackend, CsrMetadata, CsrStream, Metadata
from suite.kernels.attention.csr import CsrCapture, plan_csr
from suite.kernels.attention.reference import execute
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.ops.decode_attention import decode_attention
from suite.kernels.ops.extend_attention import extend_attention
from suite.kernels.ops.interpreter import INTERPRETED, interpreter_reason
from suite.records import Launcher, PoolMode

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256  # a tile of queries, keys and values must fit the shared memory of one SM
MIN_SPLIT_TOKENS = 256  # a shorter split costs more in the merge than it saves
WAVES = 4  # decode programs per multiprocessor: enough to hide the last one's tail
INTERPRETED_PROGRAMS = 8  # the interpreter runs programs one after the other


class TritonBackend(AttentionBackend):
    """CSR int32 metadata; the `reference` launcher executes the same metadata by the oracle."""

    name = "triton"
    captured: CsrCapture | None = None

    @classmethod
    def launchers(cls, device: str) -> dict[Launcher, str | None]:
        on_gpu = device == "cuda" and torch.cuda.is_available()
        native = None if on_gpu and not INTERPRETED else f"triton: needs compiled kernels on CUDA, got {device}"
        if on_gpu and INTERPRETED:
            native = "triton: needs TRITON_INTERPRET unset, got it set"
        interpreter = (
            interpreter_reason("triton") if device == "cpu" else f"triton: needs the CPU to interpret, got {device}"
        )
        return {"native": native, "interpreter": interpreter, "reference": None}

    @classmethod
    def refusal(
        cls, geometry: RunnerGeometry, pool: PoolMode, device: str, launcher: Launcher, sinks: bool
    ) -> str | None:
        for kv in geometry.pools:
            if kv.dtype not in DTYPES:
                return f"triton: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
            if kv.head_dim > MAX_HEAD_DIM:
                return f"triton: needs head_dim <= {MAX_HEAD_DIM}, got {kv.head_dim}"
            if kv.v_row_bytes != kv.k_row_bytes:
                return f"triton: needs equal K and V rows, got {kv.k_row_bytes} and {kv.v_row_bytes} bytes"
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> CsrMetadata:
        return plan_csr(batch, self.translator)

    def capture(self, max_batch: int) -> None:
        self.captured = CsrCapture(self.translator, max_batch)

    def replay(self, batch: ForwardBatch) -> CsrMetadata:
        if self.captured is None:
            raise InvariantError("triton: replay before capture")
        return self.captured.refill(batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, CsrMetadata):
            raise TypeError(f"triton: needs CsrMetadata, got {type(metadata).__name__}")
        stream = metadata.full if layer.kind is KVKind.FULL else metadata.window
        if stream is None:
            raise TypeError("triton: this batch has no window stream: its runner has no window pool")
        return self._attend(layer, q, metadata, stream)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, metadata: CsrMetadata, stream: CsrStream) -> torch.Tensor:
        k_view, v_view = self.pool.k_view(layer.index), self.pool.v_view(layer.index)
        if metadata.mode is ForwardMode.DECODE:
            splits = self.decode_splits(layer, metadata.seq_lens.numel())
            return decode_attention(q, k_view, v_view, stream.indptr, stream.indices, layer.scale, layer.sinks, splits)
        return extend_attention(
            q,
            k_view,
            v_view,
            metadata.cu_query_lens,
            metadata.seq_lens,
            stream.starts,
            stream.indptr,
            stream.indices,
            layer.scale,
            layer.window,
            layer.sinks,
            metadata.max_query_len,
        )

    def decode_splits(self, layer: AttentionLayer, batch: int) -> int:
        """Splits of every request's stream. From sizes that a captured batch shares with an eager one, not lengths."""
        longest = self.translator.req_to_token.shape[1]
        if layer.window is not None:
            longest = min(longest, layer.window)
        programs = INTERPRETED_PROGRAMS if INTERPRETED else WAVES * _multiprocessors(self.pool.device)
        wanted = -(-programs // (batch * layer.kv_heads))
        return max(1, min(wanted, longest // MIN_SPLIT_TOKENS))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
