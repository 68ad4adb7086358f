"""Stand-ins with the vendors' signatures, for machines that can only spell their calls.

Each reads our arguments by the library's own rules and lets the oracle's arithmetic answer, so a wrong
index, length, window or scale gives a wrong answer. A call is bound to the signature of the installed
package where it can be imported, else to the one recorded here: flashinfer 0.6.12, flash-attn-4 4.0.0b36.
"""

import dataclasses
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from suite.kernels.attention.reference import attend
from tests.attention_rig import plain_layer

PAGES = "indptr indices last_page_len"
RECORDED: dict[str, str] = {
    "flashinfer:BatchDecodeWithPagedKVCacheWrapper": "self float_workspace_buffer kv_layout= use_cuda_graph= "
    "use_tensor_cores= paged_kv_indptr_buffer= paged_kv_indices_buffer= paged_kv_last_page_len_buffer= backend= "
    "jit_args=",
    "flashinfer:BatchDecodeWithPagedKVCacheWrapper.plan": "self indptr indices last_page_len num_qo_heads num_kv_heads "
    "head_dim page_size pos_encoding_mode= window_left= logits_soft_cap= q_data_type= kv_data_type= o_data_type= "
    "data_type= sm_scale= rope_scale= rope_theta= non_blocking= block_tables= seq_lens= fixed_split_size= "
    "disable_split_kv=",
    "flashinfer:BatchDecodeWithPagedKVCacheWrapper.run": "self q paged_kv_cache *args",
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper": "self float_workspace_buffer kv_layout= use_cuda_graph= "
    "qo_indptr_buf= paged_kv_indptr_buf= paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= "
    "mask_indptr_buf= backend= jit_args= jit_kwargs=",
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper.plan": "self qo_indptr paged_kv_indptr paged_kv_indices "
    "paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo= custom_mask= "
    "packed_custom_mask= causal= pos_encoding_mode= use_fp16_qk_reduction= sm_scale= window_left= logits_soft_cap= "
    "rope_scale= rope_theta= q_data_type= kv_data_type= o_data_type= non_blocking= prefix_len_ptr= "
    "token_pos_in_items_ptr= token_pos_in_items_len= max_item_len_ptr= seq_lens= seq_lens_q= block_tables= "
    "max_token_per_sequence= max_sequence_kv= fixed_split_size= disable_split_kv=",
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper.run": "self q paged_kv_cache *args",
    "flashinfer:BatchAttentionWithAttentionSinkWrapper": "self float_workspace_buffer kv_layout= use_cuda_graph= "
    "qo_indptr_buf= paged_kv_indptr_buf= paged_kv_indices_buf= paged_kv_last_page_len_buf= custom_mask_buf= "
    "mask_indptr_buf= backend= pos_encoding_mode= use_fp16_qk_reduction= q_data_type= kv_data_type= head_dim_qk= "
    "head_dim_vo= window_left=",
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache": "query kv_cache workspace_buffer block_tables seq_lens "
    "max_seq_len bmm1_scale= bmm2_scale= window_left= out= out_dtype= o_sf_scale= o_sf_vec_size= sinks= kv_layout= "
    "enable_pdl= backend= q_len_per_req= o_scale= mask= max_q_len= cum_seq_lens_q= "
    "skip_softmax_threshold_scale_factor= kv_cache_sf= uses_shared_paged_kv_idx= lse= return_lse=",
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache": "query kv_cache workspace_buffer block_tables seq_lens "
    "max_q_len max_kv_len bmm1_scale bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv window_left= out= out_dtype= "
    "o_sf_scale= o_sf_vec_size= kv_layout= enable_pdl= sinks= kv_cache_sf= skip_softmax_threshold_scale_factor= "
    "uses_shared_paged_kv_idx= causal= lse= return_lse=",
    "flashinfer.gdn_prefill:chunk_gated_delta_rule": "q k v g= beta= scale= initial_state= output_final_state= "
    "cu_seqlens= use_qk_l2norm_in_kernel= output= output_state= state_checkpoints= checkpoint_cu_starts= "
    "checkpoint_every_n_tokens=",
    "flash_attn.cute:flash_attn_varlen_func": "q k v qv= cu_seqlens_q= cu_seqlens_k= max_seqlen_q= max_seqlen_k= "
    "min_seqlen_k= seqused_q= seqused_k= gather_kv_indices= page_table= softmax_scale= causal= window_size= "
    "learnable_sink= softcap= num_splits= pack_gqa= deterministic= score_mod= score_mod_bwd= mask_mod= "
    "block_sparse_tensors= aux_tensors= aux_scalars= return_lse= scheduler_metadata= seqlen_k_per_split= "
    "disable_scheduler_metadata= gather_bwd_recompute_p= gather_bwd_token_chunk=",
}
RECORDED["flashinfer:BatchAttentionWithAttentionSinkWrapper.plan"] = RECORDED[
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper.plan"
]
RECORDED["flashinfer:BatchAttentionWithAttentionSinkWrapper.run"] = RECORDED[
    "flashinfer:BatchPrefillWithPagedKVCacheWrapper.run"
]


def recorded(name: str) -> inspect.Signature:
    """The recorded signature: a word per parameter, `=` where it has a default."""
    kinds = inspect.Parameter
    found = []
    for word in RECORDED[name].split():
        kind = kinds.VAR_POSITIONAL if word.startswith("*") else kinds.POSITIONAL_OR_KEYWORD
        default = None if word.endswith("=") else kinds.empty
        found.append(kinds(word.strip("*="), kind, default=default))
    return inspect.Signature(found)


def installed(name: str) -> inspect.Signature | None:
    """The signature in the installed package; None when it cannot be imported here."""
    module, _, path = name.partition(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part)
    return inspect.signature(found.__init__ if inspect.isclass(found) else found)


def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments as `name` would bind them; TypeError for a call that it would not take."""
    return dict((REAL.get(name) or recorded(name)).bind(*args, **kwargs).arguments)


def ragged(q, rows_of, k, v, offsets, seq_lens, scale, window, sinks) -> torch.Tensor:
    """Causal attention of every request over `rows_of(request)`, its newest `seq_lens[request]` rows of k and v."""
    layer = dataclasses.replace(plain_layer(q.shape[1], k.shape[1], q.shape[2]), scale=scale, sinks=sinks)
    out = torch.empty_like(q)
    for request, seq_len in enumerate(seq_lens):
        mine = slice(offsets[request], offsets[request + 1])
        queries, first = mine.stop - mine.start, 0
        if window is not None:
            first = max(0, seq_len - queries - window + 1)
        rows = rows_of(request)[first:seq_len].long()
        seen = dataclasses.replace(layer, window=window)
        out[mine] = attend(q[mine], k[rows], v[rows], seen, seq_len - queries - first).to(q.dtype)
    return out


def paged(q, k, v, table, seq_lens, offsets, scale, left, sinks) -> torch.Tensor:
    """A page-table kernel: k, v [pages, page_size, heads, dim], `left` tokens to the left of a query or None."""
    assert table.dtype == seq_lens.dtype == torch.int32
    page_size = k.shape[1]
    inside = torch.arange(page_size)

    def rows_of(request: int) -> torch.Tensor:
        return (table[request].long()[:, None] * page_size + inside).flatten()

    window = None if left is None else left + 1
    flat = [side.reshape(-1, *side.shape[2:]) for side in (k, v)]
    return ragged(q, rows_of, *flat, offsets, seq_lens.tolist(), scale, window, sinks)


class Wrapper:
    """FlashInfer's paged wrappers: buffers at construction when captured, everything else in `plan`."""

    name: str
    calls: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        call = bound(f"flashinfer:{self.name}", self, *args, **kwargs)
        assert call["backend"] == "fa2"
        assert call["kv_layout"] == "NHD"
        self.made = {key.replace("_buffer", "").replace("_buf", ""): value for key, value in call.items()}
        self.window_left = call.get("window_left")
        self.calls.append(f"make {self.name}")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        call = bound(f"flashinfer:{self.name}.plan", self, *args, **kwargs)
        plain = {key.replace("paged_kv_", ""): value for key, value in call.items()}
        assert plain["page_size"] == 1
        assert plain["last_page_len"].eq(1).all()
        assert not plain["indptr"].is_cuda, "a plan that waits for the device"
        assert plain["indices"].dtype == plain["indptr"].dtype == torch.int32
        if self.window_left is not None:
            assert plain["window_left"] == self.window_left
        if self.made["use_cuda_graph"]:
            buffers = [self.made[f"paged_kv_{part}"] for part in PAGES.split()]
            assert len(plain["indptr"]) == len(buffers[0])
            assert plain["indices"].data_ptr() == buffers[1].data_ptr(), "indices that were not filled in place"
            for buffer, part in zip(buffers, PAGES.split(), strict=True):
                buffer[: len(plain[part])].copy_(plain[part])
                plain[part] = buffer
        self.planned = plain
        self.calls.append(f"plan {self.name}")

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = bound(f"flashinfer:{self.name}.run", self, *args, **kwargs)
        q, (k, v), extra = call["q"], call["paged_kv_cache"], call.get("args", ())
        assert k.shape[1] == v.shape[1] == 1
        plan, left = self.planned, self.planned["window_left"]
        indptr, indices = plan["indptr"].tolist(), plan["indices"]
        if "qo_indptr" in plan:
            assert plan["causal"]
            offsets = plan["qo_indptr"].tolist()
        else:
            offsets = list(range(len(indptr)))
        assert q.shape[1:] == (plan["num_qo_heads"], plan.get("head_dim") or plan["head_dim_qk"])
        sinks, scale = extra or (None, plan["sm_scale"])
        lens = [end - begin for begin, end in pairwise(indptr)]
        window = None if left < 0 else left + 1
        return ragged(
            q, lambda r: indices[indptr[r] : indptr[r + 1]], k[:, 0], v[:, 0], offsets, lens, scale, window, sinks
        )


def trtllm_decode(**kwargs: Any) -> torch.Tensor:
    call = bound("flashinfer.decode:trtllm_batch_decode_with_kv_cache", **kwargs)
    assert call["kv_layout"] == "NHD"
    assert call["bmm2_scale"] == 1.0
    assert call["block_tables"].is_contiguous()
    assert not call["workspace_buffer"].any(), "a workspace that was not zeroed"
    q, left, queries = call["query"], call["window_left"], call["q_len_per_req"]
    assert len(q) == queries * len(call["block_tables"]) == queries * len(call["seq_lens"])
    assert queries == 1 or call["backend"] == "trtllm-gen", "XQA asks for a mask with more queries than one"
    out = _trtllm(call, list(range(0, len(q) + 1, queries)), left)
    return call["out"].copy_(out)


def trtllm_context(**kwargs: Any) -> torch.Tensor:
    call = bound("flashinfer.prefill:trtllm_batch_context_with_kv_cache", **kwargs)
    assert call["cum_seq_lens_kv"].tolist() == [0, *call["seq_lens"].cumsum(0).tolist()]
    assert call["max_q_len"] == int(call["cum_seq_lens_q"].diff().max())
    assert call["batch_size"] == len(call["seq_lens"])
    return _trtllm(call, call["cum_seq_lens_q"].tolist(), call["window_left"])


def _trtllm(call: dict[str, Any], offsets: list[int], left: int) -> torch.Tensor:
    tail = call["block_tables"].shape[1] * call["kv_cache"][0].shape[1]
    assert int(call["seq_lens"].max()) <= tail
    return paged(
        call["query"],
        *call["kv_cache"],
        call["block_tables"],
        call["seq_lens"],
        offsets,
        call["bmm1_scale"],
        None if left < 0 else left,
        call["sinks"],
    )


def flash_attn_varlen(**kwargs: Any) -> tuple[torch.Tensor, None]:
    call = bound("flash_attn.cute:flash_attn_varlen_func", **kwargs)
    assert call["causal"]
    assert call["max_seqlen_q"] == int(call["cu_seqlens_q"].diff().max())
    assert "max_seqlen_k" not in call, "a length that a later batch of the same graph may pass"
    left, right = call["window_size"]
    assert right == (None if left is None else 0)
    sinks = call["learnable_sink"]
    out = paged(
        *(call[name] for name in ("q", "k", "v", "page_table", "seqused_k")),
        call["cu_seqlens_q"].tolist(),
        call["softmax_scale"],
        left,
        None if sinks is None else sinks.float(),
    )
    return out, None


def stand_in(monkeypatch: Any) -> list[str]:
    """Put the stand-ins where our backends import from; returns the wrappers' calls as they come."""
    calls: list[str] = []
    names = [name.partition(":")[2] for name in RECORDED if name.startswith("flashinfer:") and "." not in name[12:]]
    wrappers = {name: type(name, (Wrapper,), {"name": name, "calls": calls}) for name in names}
    modules: dict[str, dict[str, Callable[..., Any] | type]] = {
        "flashinfer": wrappers,
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache": trtllm_decode},
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": trtllm_context},
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_varlen_func": flash_attn_varlen},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


REAL: dict[str, inspect.Signature | None] = {name: installed(name) for name in RECORDED}
