"""Stand-ins with the signatures of the vendors' MLA kernels, for machines that can only spell their calls.

Each reads our arguments by the library's own rules and lets plain maths answer, so a wrong index, length
or scale gives a wrong answer. A call is bound to the signature of the installed package where it can be
imported, else to the one recorded here: sglang-kernel 0.4.2, flashinfer 0.6.12, tokenspeed-mla 2.0.4.
"""

import inspect
import sys
import types
from itertools import pairwise
from typing import Any

import torch

from suite.kernels.geometry import AttentionLayer
from tests.attention_vendor import installed
from tests.mla_rig import absorbed

RECORDED: dict[str, str] = {
    "sgl_kernel.flash_attn:flash_attn_with_kvcache": "q k_cache v_cache k= v= qv= rotary_cos= rotary_sin= "
    "cache_seqlens= cache_batch_idx= cache_leftpad= page_table= cu_seqlens_q= cu_seqlens_k_new= max_seqlen_q= "
    "rotary_seqlens= q_descale= k_descale= v_descale= softmax_scale= causal= window_size= attention_chunk= softcap= "
    "rotary_interleaved= scheduler_metadata= num_splits= pack_gqa= sm_margin= return_softmax_lse= sinks= score_mod= "
    "aux_tensors= ver= out=",
    "sgl_kernel.flash_attn:flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q= max_seqlen_k= "
    "seqused_q= seqused_k= page_table= softmax_scale= causal= qv= q_descale= k_descale= v_descale= window_size= "
    "attention_chunk= softcap= num_splits= pack_gqa= sm_margin= return_softmax_lse= sinks= score_mod= aux_tensors= "
    "ver= out=",
    "sgl_kernel.flash_mla:get_mla_metadata": "cache_seqlens num_q_tokens_per_head_k num_heads_k num_heads_q= "
    "is_fp8_kvcache= topk=",
    "sgl_kernel.flash_mla:flash_mla_with_kvcache": "q k_cache block_table cache_seqlens head_dim_v "
    "tile_scheduler_metadata num_splits softmax_scale= causal= descale_q= descale_k= is_fp8_kvcache= indices=",
    "flashinfer.mla:BatchMLAPagedAttentionWrapper": "self float_workspace_buffer use_cuda_graph= qo_indptr= kv_indptr= "
    "kv_indices= kv_len_arr= backend=",
    "flashinfer.mla:BatchMLAPagedAttentionWrapper.plan": "self qo_indptr kv_indptr kv_indices kv_len_arr num_heads "
    "head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type use_profiler=",
    "flashinfer.mla:BatchMLAPagedAttentionWrapper.run": "self q_nope q_pe ckv_cache kpe_cache out= lse= return_lse= "
    "profiler_buffer= kv_len= page_table= return_lse_base_on_e= o_scale=",
    "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla": "query kv_cache workspace_buffer qk_nope_head_dim "
    "kv_lora_rank qk_rope_head_dim block_tables seq_lens max_seq_len sparse_mla_top_k= out= bmm1_scale= bmm2_scale= "
    "sinks= skip_softmax_threshold_scale_factor= enable_pdl= backend= is_var_seq= uses_shared_paged_kv_idx= lse= "
    "return_lse= cute_dsl_impl=",
    "tokenspeed_mla:tokenspeed_mla_decode": "query kv_cache workspace_buffer kv_lora_rank qk_rope_head_dim "
    "block_tables seq_lens max_seq_len softmax_scale output_scale= out= is_var_seq= causal_mask= window_left= "
    "enable_pdl= return_lse= causal_seqs= cp_world= cp_rank= cp_interleave_size= min_split_kv= local_visible_lens=",
}


def recorded(name: str) -> inspect.Signature:
    """The recorded signature: a word per parameter, `=` where it has a default."""
    one = inspect.Parameter
    words = RECORDED[name].split()
    defaults = [None if word.endswith("=") else one.empty for word in words]
    kind = one.POSITIONAL_OR_KEYWORD
    return inspect.Signature([one(w.strip("="), kind, default=d) for w, d in zip(words, defaults, strict=True)])


def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments as `name` would bind them; TypeError for a call that it would not take."""
    return dict((REAL.get(name) or recorded(name)).bind(*args, **kwargs).arguments)


def answer(q: torch.Tensor, rows_of: Any, pages: torch.Tensor, offsets, seq_lens, latent: int, scale: float) -> Any:
    """Causal absorbed attention of every request over `rows_of(request)`, the first seq_len of them."""
    layer = AttentionLayer(
        index=0, q_heads=q.shape[1], kv_heads=1, head_dim=q.shape[2], scale=scale, v_head_dim=latent, is_latent=True
    )
    flat = pages.reshape(-1, pages.shape[-1])
    out = q.new_empty(*q.shape[:2], latent)
    for request, seq_len in enumerate(seq_lens):
        mine = slice(offsets[request], offsets[request + 1])
        out[mine] = absorbed(q[mine], flat[rows_of(request)[:seq_len].long()], layer, torch.float32)
    return out


def paged_answer(q, pages, table, seq_lens, offsets, latent: int, scale: float) -> torch.Tensor:
    """By a block table: pages [pages, page_size, width]."""
    assert table.dtype == seq_lens.dtype == torch.int32
    size = pages.shape[1]

    def rows_of(request: int) -> torch.Tensor:
        live = -(-int(seq_lens[request]) // size)
        assert live <= table.shape[1]
        return (table[request, :live].long()[:, None] * size + torch.arange(size)).flatten()

    return answer(q, rows_of, pages, offsets, seq_lens.tolist(), latent, scale)


def uniform_answer(query, pages, table, seq_lens, latent: int, scale: float) -> torch.Tensor:
    """As many queries for every row of the table: query [rows, queries, heads, width]."""
    assert query.is_contiguous()
    assert len(query) == len(table) == len(seq_lens)
    offsets = range(0, query.shape[0] * query.shape[1] + 1, query.shape[1])
    out = paged_answer(query.flatten(0, 1), pages, table, seq_lens, offsets, latent, scale)
    return out.view(*query.shape[:3], latent)


def fa3(**kwargs: Any) -> torch.Tensor:
    call = bound("sgl_kernel.flash_attn:flash_attn_with_kvcache", **kwargs)
    assert call["causal"]
    assert call["k_cache"].shape[2] == call["v_cache"].shape[2] == 1
    assert call["max_seqlen_q"] == int(call["cu_seqlens_q"].diff().max())
    pages = torch.cat([call["v_cache"], call["k_cache"]], -1)[:, :, 0]
    q, offsets = torch.cat([call["qv"], call["q"]], -1), call["cu_seqlens_q"].tolist()
    latent = call["v_cache"].shape[-1]
    return paged_answer(q, pages, call["page_table"], call["cache_seqlens"], offsets, latent, call["softmax_scale"])


def fa3_ragged(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Contrary to the oracle, a request without keys answers garbage and +inf."""
    call = bound("sgl_kernel.flash_attn:flash_attn_varlen_func", **kwargs)
    assert call["return_softmax_lse"]
    out = call["q"].new_full((*call["q"].shape[:2], call["v"].shape[2]), torch.nan)
    lse = torch.full((call["q"].shape[1], call["q"].shape[0]), torch.inf)
    for (a, b), (c, d) in zip(
        pairwise(call["cu_seqlens_q"].tolist()), pairwise(call["cu_seqlens_k"].tolist()), strict=True
    ):
        assert b - a <= call["max_seqlen_q"]
        assert d - c <= call["max_seqlen_k"]
        if c == d:
            continue
        scores = torch.einsum("qhd,khd->hqk", call["q"][a:b], call["k"][c:d]) * call["softmax_scale"]
        if call["causal"]:
            hidden = torch.ones(b - a, d - c, dtype=torch.bool).triu(1 + (d - c) - (b - a))
            scores = scores.masked_fill(hidden, -torch.inf)
        lse[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), call["v"][c:d])
    return out, lse


class FlashMla:
    """A schedule that is wrong for any other lengths, query rows or address answers NaN."""

    def __init__(self) -> None:
        self.scheduled = 0

    def metadata(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = bound("sgl_kernel.flash_mla:get_mla_metadata", *args, **kwargs)
        assert call["num_heads_k"] == 1
        self.scheduled += 1
        lens = call["cache_seqlens"]
        return torch.cat([lens, lens.new_tensor([call["num_q_tokens_per_head_k"]])]), lens.cumsum(0)

    def attend(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        call = bound("sgl_kernel.flash_mla:flash_mla_with_kvcache", *args, **kwargs)
        assert call["causal"]
        pages, query = call["k_cache"], call["q"]
        assert pages.shape[1:3] == (64, 1)
        expected = [*call["cache_seqlens"].tolist(), query.shape[1] * query.shape[2]]
        assert call["tile_scheduler_metadata"].tolist() == expected, "a schedule of another batch"
        table, latent, scale = call["block_table"], call["head_dim_v"], call["softmax_scale"]
        return uniform_answer(query, pages[:, :, 0], table, call["cache_seqlens"], latent, scale), None


class MlaWrapper:
    """FlashInfer's MLA wrapper: buffers at construction when captured, everything else in `plan`."""

    name = "flashinfer.mla:BatchMLAPagedAttentionWrapper"
    plans = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made = bound(self.name, self, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        call = bound(f"{self.name}.plan", self, *args, **kwargs)
        MlaWrapper.plans += 1
        assert call["page_size"] == 1
        assert call["causal"]
        assert call["kv_len_arr"].tolist() == call["kv_indptr"].diff().tolist()
        assert all(call[key].dtype == torch.int32 for key in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"))
        if self.made.get("use_cuda_graph"):
            assert call["kv_indices"].data_ptr() == self.made["kv_indices"].data_ptr(), "not filled in place"
            for key in ("qo_indptr", "kv_indptr", "kv_len_arr"):
                self.made[key].copy_(call[key])
        self.planned = call

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = bound(f"{self.name}.run", self, *args, **kwargs)
        q = torch.cat([call["q_nope"], call["q_pe"]], -1)
        pages = torch.cat([call["ckv_cache"], call["kpe_cache"]], -1)
        plan, indptr = self.planned, self.planned["kv_indptr"].tolist()
        assert (plan["num_heads"], plan["head_dim_ckv"], plan["head_dim_kpe"]) == (
            q.shape[1], call["q_nope"].shape[2], call["q_pe"].shape[2],
        )  # fmt: skip

        def rows_of(request: int) -> torch.Tensor:
            return plan["kv_indices"][indptr[request] : indptr[request + 1]]

        lens, offsets = plan["kv_len_arr"].tolist(), plan["qo_indptr"].tolist()
        return call["out"].copy_(answer(q, rows_of, pages, offsets, lens, plan["head_dim_ckv"], plan["sm_scale"]))


def trtllm(calls: list[str]) -> Any:
    def decode(**kwargs: Any) -> torch.Tensor:
        call = bound("flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla", **kwargs)
        calls.append(call["backend"])
        assert not call["workspace_buffer"].any(), "a workspace that was not zeroed"
        assert call["bmm2_scale"] == 1.0
        pages, table, query = call["kv_cache"], call["block_tables"], call["query"]
        assert pages.ndim == 4
        assert query.shape[3] == call["kv_lora_rank"] + call["qk_rope_head_dim"] == pages.shape[3]
        assert table.shape[1] % (4096 // pages.shape[2]) == 0
        assert call["max_seq_len"] == table.shape[1] * pages.shape[2]
        lens, latent = call["seq_lens"], call["kv_lora_rank"]
        return uniform_answer(query, pages[:, 0], table, lens, latent, call["bmm1_scale"])

    return decode


def tokenspeed(calls: list[str]) -> Any:
    def decode(**kwargs: Any) -> torch.Tensor:
        call = bound("tokenspeed_mla:tokenspeed_mla_decode", **kwargs)
        calls.append("tokenspeed")
        assert call["causal_mask"]
        assert call["workspace_buffer"].dtype == torch.uint8
        latent, scale = call["kv_lora_rank"], call["softmax_scale"]
        return uniform_answer(call["query"], call["kv_cache"], call["block_tables"], call["seq_lens"], latent, scale)

    return decode


def stand_in(monkeypatch: Any) -> tuple[list[str], FlashMla]:
    """Put the stand-ins where our backends import from; returns the decode calls as they come, and FlashMLA."""
    calls: list[str] = []
    flash_mla = FlashMla()
    mla = {
        "BatchMLAPagedAttentionWrapper": MlaWrapper,
        "trtllm_batch_decode_with_kv_cache_mla": trtllm(calls),
    }
    modules: dict[str, dict[str, Any]] = {
        "sgl_kernel": {},
        "sgl_kernel.flash_attn": {"flash_attn_with_kvcache": fa3, "flash_attn_varlen_func": fa3_ragged},
        "sgl_kernel.flash_mla": {
            "get_mla_metadata": flash_mla.metadata,
            "flash_mla_with_kvcache": flash_mla.attend,
        },
        "flashinfer": {},
        "flashinfer.mla": mla,
        "tokenspeed_mla": {"tokenspeed_mla_decode": tokenspeed(calls)},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls, flash_mla


REAL: dict[str, inspect.Signature | None] = {name: installed(name) for name in RECORDED}
