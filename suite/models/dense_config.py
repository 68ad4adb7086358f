"""Configurations of the dense decoders: Qwen3 and Llama."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.errors import InputError
from suite.models.config import BOOKKEEPING, FULL, Fields, Rope

UNREAD = BOOKKEEPING | {"max_window_layers", "pretraining_tp"}


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Full attention and a gated MLP in every layer. qk_norm: queries and keys are normed per head (Qwen3)."""

    vocab_size: int
    hidden_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DenseConfig":
        """From the object in `config.json`. Raises InputError naming the first field that is missing or bad."""
        fields = Fields(values)
        is_qwen = fields.raw("model_type") == "qwen3"
        if not is_qwen:
            fields.only("model_type", "llama")
            fields.only("mlp_bias", False, False)
        fields.only("hidden_act", "silu", "silu")
        fields.only("attention_bias", False, False)
        fields.only("use_sliding_window", False, False)
        fields.raw("sliding_window", None)  # without meaning, then
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        stated = fields.raw("head_dim", None) is not None
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            layers=fields.count("num_hidden_layers"),
            q_heads=heads,
            kv_heads=heads if fields.raw("num_key_value_heads", None) is None else fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim") if stated else hidden // heads,
            mlp_size=fields.count("intermediate_size"),
            qk_norm=is_qwen,
            norm_eps=fields.number("rms_norm_eps"),
            rope=Rope.read(fields),
            max_positions=fields.count("max_position_embeddings"),
            tied=fields.flag("tie_word_embeddings", False),
        )
        _check_layer_types(fields, config.layers)
        fields.refuse_unread(UNREAD)
        config._check()
        return config

    def _check(self) -> None:
        if self.q_heads % self.kv_heads:
            expected = f"a multiple of num_key_value_heads ({self.kv_heads})"
            raise InputError("num_attention_heads", self.q_heads, expected)
        self.rope.rotated(self.head_dim)


def _check_layer_types(fields: Fields, layers: int) -> None:
    types = fields.raw("layer_types", None)
    if types is not None and types != [FULL] * layers:
        raise InputError("layer_types", types, f"num_hidden_layers ({layers}) times {FULL!r}")
