"""Configurations of the models with latent attention: DeepSeek V2 and V3, Kimi-Linear's half of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.errors import InputError
from suite.models.config import BOOKKEEPING, Fields, Rope
from suite.models.routed import Routing

# fmt: off
# of the published files: what nothing here computes
PUBLISHED = BOOKKEEPING | frozenset({
    "auto_map", "aux_loss_alpha", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux", "tokenizer_class",
})
# fmt: on


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention.

    A stored row is [latent | rotary key], one for all heads. nope_dim, rope_dim: unrotated and rotated elements of a
    head's query and key. q_rank: of the query's low-rank projection, None for a full one. interleaved: rotary pairs are
    (2i, 2i + 1) instead of (i, i + rope_dim / 2). scale: on the scores, of the expanded and the absorbed form alike.
    """

    heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None
    scale: float
    interleaved: bool = True

    @property
    def q_dim(self) -> int:
        """Elements of a head's query and expanded key."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Elements of a stored row."""
        return self.latent_dim + self.rope_dim

    @classmethod
    def read(cls, fields: Fields, *, score_factor: float = 1.0, interleaved: bool = True) -> "LatentShape":
        """score_factor: what the rotary scaling multiplies `(nope_dim + rope_dim) ** -0.5` by."""
        heads, nope, rope = (
            fields.count(name) for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        if rope % 2:
            raise InputError("qk_rope_head_dim", rope, "an even number: rotary pairs")
        if fields.raw("num_key_value_heads", None) not in (None, heads):
            expected = f"num_attention_heads ({heads}): every head expands the one latent"
            raise InputError("num_key_value_heads", fields.raw("num_key_value_heads"), expected)
        return cls(
            heads=heads,
            latent_dim=fields.count("kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=fields.count("v_head_dim"),
            q_rank=None if fields.raw("q_lora_rank", None) is None else fields.count("q_lora_rank"),
            scale=(nope + rope) ** -0.5 * score_factor,
            interleaved=interleaved,
        )


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """DeepSeek V2 and V3: latent attention, `dense_layers` layers with an MLP, then mixtures with shared experts.

    draft_layers: layers of the checkpoint's own draft, numbered after the model's. max_positions: how many
    positions the rotary table covers.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    attention: LatentShape
    rope: Rope
    dense_layers: int
    dense_size: int
    routing: Routing
    expert_size: int
    shared_size: int
    norm_eps: float
    max_positions: int
    draft_layers: int = 0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DeepseekConfig":
        """From the object in `config.json`. Raises InputError naming the first field that is missing or bad."""
        fields = Fields(values)
        is_v3 = fields.raw("model_type") == "deepseek_v3"
        if not is_v3:
            fields.only("model_type", "deepseek_v2")
        check_plain(fields)
        fields.only("mlp_bias", False, False)
        fields.only("moe_layer_freq", 1, 1)
        rope, score_factor = read_rope(fields)
        interleaved = boolean(fields, "rope_interleave", True) if is_v3 else True
        expert_size = fields.count("moe_intermediate_size")
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            layers=fields.count("num_hidden_layers"),
            attention=LatentShape.read(fields, score_factor=score_factor, interleaved=interleaved),
            rope=rope,
            dense_layers=whole(fields, "first_k_dense_replace"),
            dense_size=fields.count("intermediate_size"),
            routing=_routing_v3(fields) if is_v3 else _routing_v2(fields),
            expert_size=expert_size,
            shared_size=expert_size * fields.count("n_shared_experts"),
            norm_eps=fields.number("rms_norm_eps"),
            max_positions=fields.count("max_position_embeddings"),
            draft_layers=whole(fields, "num_nextn_predict_layers", 0) if is_v3 else 0,
        )
        fields.refuse_unread(PUBLISHED)
        check_routing(config.routing, "n_routed_experts", "n_group", "num_experts_per_tok")
        return config


def check_plain(fields: Fields) -> None:
    """What all of these models have in common and this implementation takes for granted."""
    fields.only("hidden_act", "silu", "silu")
    fields.only("attention_bias", False, False)
    fields.only("tie_word_embeddings", False, False)


def boolean(fields: Fields, name: str, default: bool) -> bool:
    value = fields.raw(name, default)
    if not isinstance(value, bool):
        raise InputError(fields.prefix + name, value, "true or false")
    return value


def whole(fields: Fields, name: str, default: Any = ...) -> int:
    """A whole number, 0 included."""
    value = fields.raw(name, default)
    return value if type(value) is int and value == 0 else fields.count(name, default)


def check_routing(routing: Routing, experts: str, groups: str, top_k: str) -> None:
    """The names are those of the fields, which differ between families."""
    if routing.experts % routing.groups:
        raise InputError(groups, routing.groups, f"a divisor of {experts} ({routing.experts})")
    if routing.kept_groups > routing.groups:
        raise InputError("topk_group", routing.kept_groups, f"at most {groups} ({routing.groups})")
    kept = routing.experts // routing.groups * routing.kept_groups
    if routing.top_k > kept:
        raise InputError(top_k, routing.top_k, f"at most {kept}, the experts of {routing.kept_groups} groups")


def _routing_v2(fields: Fields) -> Routing:
    """Softmax over all experts; `group_limited_greedy` keeps the groups with the best experts."""
    fields.only("scoring_func", "softmax", "softmax")
    fields.only("norm_topk_prob", False, False)
    limited = fields.raw("topk_method", "greedy") == "group_limited_greedy"
    if not limited:
        fields.only("topk_method", "greedy", "greedy")
    groups, kept = (fields.raw(name, None) for name in ("n_group", "topk_group"))
    return Routing(
        experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        score="softmax",
        groups=fields.count("n_group") if limited and groups != 1 else 1,
        kept_groups=fields.count("topk_group") if limited and kept != 1 else 1,
        renormalise=False,
        scaling=fields.number("routed_scaling_factor"),
    )


def _routing_v3(fields: Fields) -> Routing:
    """Sigmoid scores, groups ranked by their best two, a learnt bias in the choice only."""
    fields.only("scoring_func", "sigmoid", "sigmoid")
    fields.only("topk_method", "noaux_tc", "noaux_tc")
    return Routing(
        experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        score="sigmoid",
        groups=fields.count("n_group"),
        kept_groups=fields.count("topk_group"),
        group_score="best two",
        corrected=True,
        renormalise=boolean(fields, "norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor"),
    )


def read_rope(fields: Fields) -> tuple[Rope, float]:
    """The rotary embedding and the factor that its scaling puts on the scores.

    DeepSeek's YaRN has two magnitudes, m(x) = 0.1 x ln(factor) + 1: cos and sin are multiplied by
    m(mscale) / m(mscale_all_dim), scores by m(mscale_all_dim) squared. Without them, cos and sin by m(1).
    """
    if (values := fields.raw("rope_parameters", None)) is not None:
        rope = Fields(values, "rope_parameters.")
        theta = rope.number("rope_theta")
    else:
        theta = fields.number("rope_theta")
        if (scaling := fields.raw("rope_scaling", None)) is None:
            return Rope(theta=theta), 1.0
        rope = Fields(scaling, "rope_scaling.")
    name = "rope_type" if "rope_type" in rope.values else "type"  # published files say `type`
    rope.raw("type", None)
    if rope.raw(name) == "default":
        rope.refuse_unread()
        return Rope(theta=theta), 1.0
    rope.only(name, "yarn")
    factor = rope.number("factor", above=1.0)
    mscale, mscale_all = (rope.number(name, 0.0, above=-1.0) for name in ("mscale", "mscale_all_dim"))
    if (mscale > 0) != (mscale_all > 0):
        raise InputError(rope.prefix + "mscale", (mscale, mscale_all), "mscale and mscale_all_dim, or neither")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    read = Rope(
        theta=theta,
        factor=factor,
        original_positions=rope.count("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=True,
        amplitude=magnitude(mscale) / magnitude(mscale_all) if mscale else magnitude(1.0),
    )
    rope.refuse_unread()
    return read, magnitude(mscale_all) ** 2 if mscale else 1.0
