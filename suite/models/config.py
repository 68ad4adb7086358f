"""The configuration of a model, read strictly from a Hugging Face `config.json`.

Every field that changes the arithmetic is required and checked; fields that only
keep books (`transformers_version`, token ids, training losses) are listed and
ignored; anything else is an error, because a field nobody reads is arithmetic
nobody does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.errors import InputError

SLIDING, FULL = "sliding_attention", "full_attention"

# fmt: off
BOOKKEEPING = frozenset({
    "_attn_implementation", "_experts_implementation", "_name_or_path", "architectures", "attention_dropout",
    "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "experts_per_token", "id2label",
    "initial_context_length", "initializer_range", "is_encoder_decoder", "label2id", "max_length", "min_length",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type",
    "quantization_config", "return_dict", "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache",
})
# fmt: on


class Fields:
    """A mapping read field by field; each read is remembered, so that what is left over can be refused."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InputError(prefix.rstrip(".") or "config.json", values, "an object")
        self.values, self.prefix, self.seen = values, prefix, set[str]()

    def raw(self, name: str, default: Any = ...) -> Any:
        self.seen.add(name)
        if name not in self.values and default is ...:
            raise InputError(self.prefix + name, "nothing", "the field to be present")
        return self.values.get(name, default)

    def count(self, name: str, default: Any = ...) -> int:
        """A positive whole number, of those that a tensor's shape can hold."""
        value = self.raw(name, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise InputError(self.prefix + name, value, "a positive whole number below 2**31")
        return value

    def number(self, name: str, default: Any = ..., above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self.raw(name, default)
        if type(value) not in (int, float) or not above < value < float("inf"):
            raise InputError(self.prefix + name, value, f"a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: Any = ...) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise InputError(self.prefix + name, value, "true or false")
        return value

    def only(self, name: str, allowed: Any, default: Any = ...) -> Any:
        """The one value that this implementation computes."""
        value = self.raw(name, default)
        if type(value) is not type(allowed) or value != allowed:
            raise InputError(self.prefix + name, value, f"{allowed!r}, the only one implemented")
        return value

    def refuse_unread(self, ignored: frozenset[str] = frozenset()) -> None:
        for name in sorted(set(self.values) - self.seen - ignored):
            raise InputError(
                self.prefix + name, self.values[name], f"no such field; known are {', '.join(sorted(self.seen))}"
            )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: frequencies `theta ** (-2i / dim)`, stretched by YaRN where `factor` is above 1.

    `original_positions`: the context in tokens that YaRN stretches from. `beta_fast`, `beta_slow`: turns over
    that context above which a frequency is kept and below which it is divided by `factor`. `truncate`: round
    the ends of the ramp between the two to whole dimensions. `amplitude`: factor on cos and sin, None for YaRN's own.
    `share`: of a head's elements, the first ones, that are rotated.
    """

    theta: float
    factor: float = 1.0
    original_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False
    amplitude: float | None = None
    share: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """How many elements of a head are rotated. Raises InputError where they do not pair up."""
        rotated = int(head_dim * self.share)
        if rotated < 2 or rotated % 2:
            raise InputError("head_dim", head_dim, f"an even number of rotated elements, {self.share:g} of it")
        return rotated

    @classmethod
    def read(cls, fields: Fields, share: float = 1.0) -> "Rope":
        """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (the published files).

        share: the family's `partial_rotary_factor`, where the file does not say.
        """
        if (values := fields.raw("rope_parameters", None)) is not None:
            rope = Fields(values, "rope_parameters.")
            theta, share = rope.number("rope_theta"), rope.number("partial_rotary_factor", share)
        else:
            theta, share = fields.number("rope_theta"), fields.number("partial_rotary_factor", share)
            rope = Fields(fields.raw("rope_scaling", None) or {"rope_type": "default"}, "rope_scaling.")
        if share > 1:
            raise InputError("partial_rotary_factor", share, "a number up to 1")
        kind = rope.raw("rope_type")
        if kind == "default":
            _check_sections(rope)
            rope.refuse_unread()
            return cls(theta=theta, share=share)
        if kind != "yarn":
            raise InputError(rope.prefix + "rope_type", kind, "'yarn' or 'default'")
        read = cls(
            theta=theta,
            factor=rope.number("factor", above=1.0),
            original_positions=rope.count("original_max_position_embeddings"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            share=share,
        )
        rope.refuse_unread()
        return read


def _check_sections(rope: Fields) -> None:
    """mrope turns sections of the pairs by time, height and width; a text's three positions are one and the same."""
    sections = rope.raw("mrope_section", None)
    if sections is not None and not (isinstance(sections, list) and len(sections) == 3):
        raise InputError(rope.prefix + "mrope_section", sections, "three numbers of pairs: time, height and width")
    rope.flag("mrope_interleaved", False)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig:
    """gpt-oss: alternating window and full attention with sinks, clamped SwiGLU experts.

    `windows`: per layer, how many positions a token attends to, itself included; None attends to all.
    `max_positions`: how many positions the rotary table covers.
    """

    vocab_size: int
    hidden_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    experts: int
    experts_per_token: int
    expert_size: int
    swiglu_alpha: float
    swiglu_limit: float
    norm_eps: float
    rope: Rope
    max_positions: int

    @property
    def layers(self) -> int:
        return len(self.windows)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "GptOssConfig":
        """From the object in `config.json`. Raises InputError naming the first field that is missing or bad."""
        fields = Fields(values)
        fields.only("hidden_act", "silu", "silu")
        fields.only("attention_bias", True, True)
        fields.only("tie_word_embeddings", False, False)
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            q_heads=fields.count("num_attention_heads"),
            kv_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            windows=_windows(fields),
            experts=fields.count("num_local_experts"),
            experts_per_token=fields.count("num_experts_per_tok"),
            expert_size=fields.count("intermediate_size"),
            swiglu_alpha=fields.number("swiglu_alpha", 1.702),
            swiglu_limit=fields.number("swiglu_limit", 7.0),
            norm_eps=fields.number("rms_norm_eps"),
            rope=Rope.read(fields),
            max_positions=fields.count("max_position_embeddings"),
        )
        fields.refuse_unread(BOOKKEEPING)
        config._check()
        return config

    def _check(self) -> None:
        if self.q_heads % self.kv_heads:
            raise InputError(
                "num_attention_heads", self.q_heads, f"a multiple of num_key_value_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise InputError("head_dim", self.head_dim, "an even number: rotary pairs")
        if self.experts_per_token > self.experts:
            raise InputError(
                "num_experts_per_tok", self.experts_per_token, f"at most num_local_experts ({self.experts})"
            )


def _windows(fields: Fields) -> tuple[int | None, ...]:
    layers = fields.count("num_hidden_layers")
    types = fields.raw("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise InputError("layer_types", types, f"a list of num_hidden_layers ({layers}) names")
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise InputError("layer_types", kind, f"{SLIDING!r} or {FULL!r}")
    window = fields.raw("sliding_window", None)  # null is allowed where no layer uses it
    if SLIDING in types:
        window = fields.count("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)
