"""Our own Triton kernels: split-KV decode and verify, and causal extend, over CSR streams of kernel ids.

Native on CUDA; on a CPU the same kernels run under Triton's interpreter, which is slow and exact.
"""

import torch

from suite.errors import InputError, InvariantError
from suite.kernels.attention.base import AttentionBackend, CsrMetadata, CsrStream, Metadata
from suite.kernels.attention.csr import CsrCapture, plan_csr
from suite.kernels.attention.reference import execute
from suite.kernels.attention.support import table_refusal
from suite.kernels.batch import ForwardBatch, ForwardMode
from suite.kernels.geometry import AttentionLayer, KVGeometry, RunnerGeometry
from suite.kernels.ids import KVKind
from suite.kernels.ops.decode_attention import MIN_TILE, decode_attention, tiles_of
from suite.kernels.ops.extend_attention import extend_attention
from suite.kernels.ops.interpreter import INTERPRETED, interpreter_reason
from suite.kernels.ops.mla_decode import mla_attention
from suite.kernels.ops.mla_tiles import MAX_SPLITS, programs_per_split, tile_for
from suite.records import Launcher, PoolMode

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256  # a tile of queries, keys and values must fit the shared memory of one SM
MAX_LATENT_DIM, MAX_ROPE_DIM = 512, 64  # of an MLA row; what fits there with room for two blocks of keys
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
        if reason := table_refusal(cls.name, geometry, pool, device, launcher, sinks):
            return reason
        for kv in geometry.pools:
            if kv.dtype not in DTYPES:
                return f"triton: needs {' or '.join(map(str, DTYPES))}, got {kv.dtype}"
            if kv.is_latent:
                if reason := _latent_refusal(kv, launcher):
                    return reason
                continue
            if kv.head_dim > MAX_HEAD_DIM:
                return f"triton: needs head_dim <= {MAX_HEAD_DIM}, got {kv.head_dim}"
        return cls.launcher_refusal(device, launcher)

    def plan(self, batch: ForwardBatch) -> CsrMetadata:
        return plan_csr(batch, self.translator)

    def capture(self, max_batch: int, draft_tokens: int = 1) -> None:
        self.captured = CsrCapture(self.translator, max_batch, draft_tokens)

    def replay(self, batch: ForwardBatch) -> CsrMetadata:
        if self.captured is None:
            raise InvariantError("triton: replay before capture")
        return self.captured.refill(batch)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, metadata: Metadata
    ) -> torch.Tensor:
        self.pool.write(layer.index, metadata.write_ids_of(layer.kind), k, v)
        if self.launcher == "reference":
            return execute(metadata, layer, q, self.pool)
        if not isinstance(metadata, CsrMetadata):
            raise TypeError(f"triton: needs CsrMetadata, got {type(metadata).__name__}")
        stream = metadata.full if layer.kind is KVKind.FULL else metadata.window
        if stream is None:
            raise TypeError("triton: this batch has no window stream: its runner has no window pool")
        attend = self._attend_latent if layer.is_latent else self._attend
        return attend(layer, q, metadata, stream)

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, metadata: CsrMetadata, stream: CsrStream) -> torch.Tensor:
        k_view, v_view = self.pool.k_view(layer.index), self.pool.v_view(layer.index)
        if not layer.is_causal:
            return self._attend_block(layer, q, metadata, stream)
        if metadata.mode is not ForwardMode.EXTEND:
            queries = metadata.max_query_len
            splits = self.decode_splits(layer, metadata.seq_lens.numel(), queries)
            streams, softmax = (stream.indptr, stream.indices), (layer.scale, layer.sinks)
            return decode_attention(q, k_view, v_view, *streams, *softmax, splits, queries, layer.window)
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

    def _attend_block(
        self, layer: AttentionLayer, q: torch.Tensor, metadata: CsrMetadata, stream: CsrStream
    ) -> torch.Tensor:
        """Tokens of a request that all see all of it are so many more heads of one query."""
        if metadata.mode is not ForwardMode.VERIFY:
            raise InputError("mode", metadata.mode, "a verify batch: a block has as many tokens in every request")
        batch, queries = metadata.seq_lens.numel(), metadata.max_query_len
        apart = (batch, queries, layer.kv_heads, layer.q_heads // layer.kv_heads, -1)
        folded = q.view(apart).transpose(1, 2).reshape(batch, queries * layer.q_heads, layer.head_dim)
        out = decode_attention(
            folded,
            self.pool.k_view(layer.index),
            self.pool.v_view(layer.index),
            stream.indptr,
            stream.indices,
            layer.scale,
            None,
            self.decode_splits(layer, batch, 1),
        )
        return out.view(batch, layer.kv_heads, queries, -1, layer.out_dim).transpose(1, 2).reshape(*q.shape[:2], -1)

    def _attend_latent(
        self, layer: AttentionLayer, q: torch.Tensor, metadata: CsrMetadata, stream: CsrStream
    ) -> torch.Tensor:
        return mla_attention(
            q,
            self.pool.latent_view(layer.index),
            metadata.cu_query_lens,
            stream.indptr,
            stream.indices,
            layer.out_dim,
            layer.scale,
            metadata.max_query_len,
            self.latent_splits(layer, metadata.seq_lens.numel(), metadata.max_query_len),
        )

    def latent_splits(self, layer: AttentionLayer, batch: int, max_query_len: int) -> int:
        """Splits of every request's latent rows: one wave of programs, from sizes alone, as `decode_splits`."""
        fitting = INTERPRETED_PROGRAMS
        if not INTERPRETED:
            fitting = tile_for(layer.q_heads, max_query_len).resident * _multiprocessors(self.pool.device)
        fitting //= batch * programs_per_split(layer.q_heads, max_query_len)
        longest = self.translator.req_to_token.shape[1]
        return max(1, min(fitting, longest // MIN_SPLIT_TOKENS, MAX_SPLITS))

    def decode_splits(self, layer: AttentionLayer, batch: int, queries: int) -> int:
        """Splits of every request's stream. From sizes that a captured batch shares with an eager one, not lengths."""
        longest = self.translator.req_to_token.shape[1]
        if layer.window is not None:
            longest = min(longest, layer.window + queries - 1)
        programs = INTERPRETED_PROGRAMS if INTERPRETED else WAVES * _multiprocessors(self.pool.device)
        tiles = tiles_of(layer.q_heads // layer.kv_heads, queries)[2]
        wanted = -(-programs // (batch * layer.kv_heads * tiles))
        return max(1, min(wanted, longest // MIN_SPLIT_TOKENS))


def _latent_refusal(kv: KVGeometry, launcher: Launcher) -> str | None:
    """Why our kernel does not take these latent rows; None when it does."""
    widths = kv.value_dim, kv.head_dim - kv.value_dim
    for width, most in zip(widths, (MAX_LATENT_DIM, MAX_ROPE_DIM), strict=True):
        if width < MIN_TILE or width > most or width & (width - 1):
            most_text = f"{MAX_LATENT_DIM} + {MAX_ROPE_DIM}"
            need = f"latent rows of two powers of two from {MIN_TILE} to {most_text}"
            return f"triton: needs {need}, got {widths[0]} + {widths[1]}"
    if launcher == "native" and kv.dtype is torch.float32:
        return "triton: needs torch.float16 or torch.bfloat16 for latent rows on a GPU, got torch.float32"
    return None


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
