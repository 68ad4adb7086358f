"""Configuration of Kimi-Linear: which layers recur, which attend, and how wide each is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.errors import InputError
from suite.models.config import FULL, Fields
from suite.models.mla_config import PUBLISHED, LatentShape, boolean, check_plain, check_routing, whole
from suite.models.routed import Routing

LINEAR, DENSE, SPARSE = "linear_attention", "dense", "sparse"
# the published file names a rotary base and rescales nothing; no layer rotates (`mla_use_nope`)
UNUSED = frozenset({"rope_theta", "rope_scaling"})


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Kimi delta attention: `heads` heads whose key, value and query have `head_dim` elements each.

    kernel: taps of the convolution, the current token included.
    """

    heads: int
    head_dim: int
    kernel: int

    @property
    def size(self) -> int:
        """Elements of all heads' keys."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig:
    """Kimi-Linear. attends: per layer, latent attention instead of the delta rule; sparse: experts instead of an MLP.

    max_positions: the context it was trained for; no table ends there.
    """

    vocab_size: int
    hidden_size: int
    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]
    attention: LatentShape
    delta: DeltaShape
    dense_size: int
    routing: Routing
    expert_size: int
    shared_size: int
    norm_eps: float
    max_positions: int

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "KimiLinearConfig":
        """From the object in `config.json`, as published or as transformers writes it. Raises InputError by field."""
        fields = Fields(values)
        fields.only("model_type", "kimi_linear")
        check_plain(fields)
        fields.only("mla_use_nope", True, True)
        fields.only("moe_router_activation_func", "sigmoid", "sigmoid")
        fields.only("use_grouped_topk", True, True)
        fields.only("moe_layer_freq", 1, 1)
        fields.only("num_nextn_predict_layers", 0, 0)
        attends, delta = _mixing(fields)
        expert_size = fields.count("moe_intermediate_size")
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            attends=attends,
            sparse=_sparse(fields),
            attention=LatentShape.read(fields),
            delta=delta,
            dense_size=fields.count("intermediate_size"),
            routing=Routing(
                experts=fields.count("num_experts"),
                top_k=fields.count("num_experts_per_token"),
                score="sigmoid",
                groups=fields.count("num_expert_group"),
                kept_groups=fields.count("topk_group"),
                group_score="best two",
                corrected=True,
                renormalise=boolean(fields, "moe_renormalize", True),
                scaling=fields.number("routed_scaling_factor"),
            ),
            expert_size=expert_size,
            shared_size=expert_size * fields.count("num_shared_experts"),
            norm_eps=fields.number("rms_norm_eps"),
            max_positions=fields.count("model_max_length"),
        )
        fields.refuse_unread(PUBLISHED | UNUSED)
        check_routing(config.routing, "num_experts", "num_expert_group", "num_experts_per_token")
        return config


def _mixing(fields: Fields) -> tuple[tuple[bool, ...], DeltaShape]:
    """Per layer whether it attends, and the delta layers' shape: published in one object, by transformers in four."""
    layers = fields.count("num_hidden_layers")
    if (values := fields.raw("linear_attn_config", None)) is None:
        shape = DeltaShape(
            heads=fields.count("linear_num_heads"),
            head_dim=fields.count("linear_head_dim"),
            kernel=fields.count("linear_conv_kernel_dim"),
        )
        return _kinds(fields, "layer_types", FULL, LINEAR), shape
    linear = Fields(values, "linear_attn_config.")
    shape = DeltaShape(
        heads=linear.count("num_heads"),
        head_dim=linear.count("head_dim"),
        kernel=linear.count("short_conv_kernel_size"),
    )
    full, kda = linear.raw("full_attn_layers"), linear.raw("kda_layers")
    linear.refuse_unread()
    lists = isinstance(full, list) and isinstance(kda, list) and all(type(layer) is int for layer in [*full, *kda])
    if not lists or sorted([*full, *kda]) != list(range(1, layers + 1)):
        expected = f"every layer from 1 to num_hidden_layers ({layers}) in one of the two"
        raise InputError("linear_attn_config.full_attn_layers, kda_layers", (full, kda), expected)
    return tuple(layer in full for layer in range(1, layers + 1)), shape


def _sparse(fields: Fields) -> tuple[bool, ...]:
    if fields.raw("mlp_layer_types", None) is not None:
        return _kinds(fields, "mlp_layer_types", SPARSE, DENSE)
    dense = whole(fields, "first_k_dense_replace")
    return tuple(layer >= dense for layer in range(fields.count("num_hidden_layers")))


def _kinds(fields: Fields, name: str, yes: str, no: str) -> tuple[bool, ...]:
    """Per layer whether `name` says `yes` of it, which or `no` it must say."""
    layers, kinds = fields.count("num_hidden_layers"), fields.raw(name)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(name, kinds, f"a list of num_hidden_layers ({layers}) names")
    for kind in kinds:
        if kind not in (yes, no):
            raise InputError(name, kind, f"{yes!r} or {no!r}")
    return tuple(kind == yes for kind in kinds)
