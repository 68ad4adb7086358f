"""Configurations of the Qwen hybrids: Qwen3-Next and Qwen3.5, dense and MoE."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.errors import InputError
from suite.models.config import BOOKKEEPING, FULL, Fields, Rope
from suite.models.routed import Routing

LINEAR = "linear_attention"
# the draft's fields, and of the published files what nothing computes
TEXT_UNREAD = BOOKKEEPING | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "intermediate_size"}
# what surrounds the language model of a vision checkpoint
VISION_UNREAD = BOOKKEEPING | {
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_config"),
}


@dataclass(frozen=True, kw_only=True)
class QwenHybridConfig:
    """Gated delta nets with a gated full-attention layer between them.

    linear: per layer, whether it has recurrent state. grouped: Qwen3-Next's projections, whose rows lie group of
    heads after group. mlp_size: of a dense layer; with `routing`, layers are mixtures of experts of `expert_size`
    and one shared of `shared_size` instead.
    """

    vocab_size: int
    hidden_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    linear: tuple[bool, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    grouped: bool
    mlp_size: int | None
    routing: Routing | None
    expert_size: int
    shared_size: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool

    @property
    def layers(self) -> int:
        return len(self.linear)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "QwenHybridConfig":
        """From the object in `config.json`. Raises InputError naming the first field that is missing or bad."""
        outer = Fields(values)
        if "text_config" not in values:
            return cls._read(outer, outer.flag("tie_word_embeddings", False))
        tied = outer.flag("tie_word_embeddings", False)
        text = Fields(outer.raw("text_config"), "text_config.")
        text.only("tie_word_embeddings", tied, tied)  # one model has one answer
        outer.refuse_unread(VISION_UNREAD)
        return cls._read(text, tied)

    @classmethod
    def _read(cls, fields: Fields, tied: bool) -> "QwenHybridConfig":
        fields.only("hidden_act", "silu", "silu")
        fields.only("attention_bias", False, False)
        fields.only("attn_output_gate", True, True)
        fields.only("mamba_ssm_dtype", "float32", "float32")
        fields.only("use_sliding_window", False, False)
        is_mixture = "num_experts" in fields.values
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            q_heads=fields.count("num_attention_heads"),
            kv_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            linear=_linear(fields),
            k_heads=fields.count("linear_num_key_heads"),
            v_heads=fields.count("linear_num_value_heads"),
            k_dim=fields.count("linear_key_head_dim"),
            v_dim=fields.count("linear_value_head_dim"),
            conv_kernel=fields.count("linear_conv_kernel_dim"),
            grouped=fields.raw("model_type") == "qwen3_next",
            mlp_size=None if is_mixture else fields.count("intermediate_size"),
            routing=_routing(fields) if is_mixture else None,
            expert_size=fields.count("moe_intermediate_size") if is_mixture else 0,
            shared_size=fields.count("shared_expert_intermediate_size") if is_mixture else 0,
            norm_eps=fields.number("rms_norm_eps"),
            rope=Rope.read(fields, share=0.25),
            max_positions=fields.count("max_position_embeddings"),
            tied=tied,
        )
        fields.refuse_unread(TEXT_UNREAD)
        config._check()
        return config

    def _check(self) -> None:
        for many, few, name in (
            (self.q_heads, self.kv_heads, "num_attention_heads"),
            (self.v_heads, self.k_heads, "linear_num_value_heads"),
        ):
            if many % few:
                raise InputError(name, many, f"a multiple of {few}, the heads of keys")
        if self.conv_kernel < 2:
            raise InputError(
                "linear_conv_kernel_dim", self.conv_kernel, "at least 2: a window of inputs before this one"
            )
        self.rope.rotated(self.head_dim)


def _linear(fields: Fields) -> tuple[bool, ...]:
    layers = fields.count("num_hidden_layers")
    every = fields.count("full_attention_interval", 4)
    types = fields.raw("layer_types", None)
    if types is None:
        types = [LINEAR if (index + 1) % every else FULL for index in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise InputError(f"{fields.prefix}layer_types", types, f"a list of num_hidden_layers ({layers}) names")
    for kind in types:
        if kind not in (LINEAR, FULL):
            raise InputError(f"{fields.prefix}layer_types", kind, f"{LINEAR!r} or {FULL!r}")
    if FULL not in types:
        raise InputError(f"{fields.prefix}layer_types", types, f"at least one {FULL!r} layer")
    return tuple(kind == LINEAR for kind in types)


def _routing(fields: Fields) -> Routing:
    fields.only("decoder_sparse_step", 1, 1)
    fields.only("mlp_only_layers", [], [])
    experts, top_k = fields.count("num_experts"), fields.count("num_experts_per_tok")
    if top_k > experts:
        raise InputError(f"{fields.prefix}num_experts_per_tok", top_k, f"at most num_experts ({experts})")
    return Routing(
        experts=experts,
        top_k=top_k,
        score="softmax",
        renormalise=fields.flag("norm_topk_prob", True),
        scaling=1.0,
    )
