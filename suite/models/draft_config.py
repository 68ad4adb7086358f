"""Configuration of block drafts: DFlash, and DSpark, which adds a Markov head and a confidence head to it.

A field may stand in three places; `dspark_NAME` wins over NAME in the object `dspark_config` or `dflash_config`,
which wins over NAME beside the backbone's own fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from suite.errors import InputError
from suite.models.config import BOOKKEEPING, FULL, SLIDING, Fields, Rope

DFLASH = ("DFlashDraftModel",)
DSPARK = ("DSparkDraftModel", "Qwen3DSparkModel")
HEADS = ("vanilla", "gated", "rnn")
PREFIX, OBJECTS = "dspark_", ("dspark_config", "dflash_config")
# the published files' own books, and what the backbone's family takes for granted
UNREAD = BOOKKEEPING | {"auto_map", "max_window_layers", "num_target_layers", "training_block_size"}

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A block draft.

    target_layers: whose residual streams it is fed, counted from 0. drafts: tokens proposed per pass (gamma).
    from_anchor: row i of the block predicts its next token, so the block is as wide as the drafts; else row i predicts
    its own and the anchor's row is dropped. windows: per layer; None is a full layer, and those are causal in
    the block only with `is_causal`. markov: the head's form and rank, None for independent tokens. confidence: whether
    there is a confidence head, `confidence_with_markov` whether it sees the previous token. temperatures: of the
    confidence, one per draft.
    """

    vocab_size: int
    hidden_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    windows: tuple[int | None, ...]
    is_causal: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    target_layers: tuple[int, ...]
    drafts: int
    from_anchor: bool
    mask_id: int
    markov: tuple[MarkovKind, int] | None
    confidence: bool
    confidence_with_markov: bool
    temperatures: tuple[float, ...] | None

    @property
    def width(self) -> int:
        """Tokens of one block pass."""
        return self.drafts + (not self.from_anchor)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], *, target_depth: int) -> "DraftConfig":
        """From the object in the draft's `config.json`. target_depth: layers of the target, where drafts are fed from.

        Raises InputError naming the first field that is missing or bad.
        """
        fields = Fields(gathered(values))
        (architecture,) = fields.raw("architectures")
        is_dspark = architecture in DSPARK or fields.raw("markov_rank", None) is not None
        fields.only("hidden_act", "silu", "silu")
        fields.only("attention_bias", False, False)
        fields.raw("use_sliding_window", None)  # layer_types says so layer by layer
        fields.raw("tie_word_embeddings", None)  # both are the target's
        from_anchor = fields.flag("sample_from_anchor", is_dspark)
        block = fields.count("block_size", 7 if is_dspark else 16)
        windows = _windows(fields)
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            q_heads=fields.count("num_attention_heads"),
            kv_heads=fields.count("num_key_value_heads"),
            head_dim=fields.count("head_dim"),
            mlp_size=fields.count("intermediate_size"),
            windows=windows,
            is_causal=fields.flag("is_causal", False),
            norm_eps=fields.number("rms_norm_eps"),
            rope=Rope.read(fields),
            max_positions=fields.count("max_position_embeddings"),
            target_layers=_target_layers(fields, len(windows), target_depth),
            drafts=block if is_dspark else block - 1,
            from_anchor=from_anchor,
            mask_id=fields.raw("mask_token_id"),
            markov=_markov(fields) if is_dspark else None,
            confidence=fields.flag("enable_confidence_head", False) if is_dspark else False,
            confidence_with_markov=fields.flag("confidence_head_with_markov", True) if is_dspark else False,
            temperatures=_temperatures(fields, block) if is_dspark else None,
        )
        fields.refuse_unread(UNREAD)
        config._check()
        return config

    def _check(self) -> None:
        if self.q_heads % self.kv_heads:
            expected = f"a multiple of num_key_value_heads ({self.kv_heads})"
            raise InputError("num_attention_heads", self.q_heads, expected)
        if self.drafts < 1:
            raise InputError("block_size", self.drafts + 1, "at least 2: the anchor and one draft")
        if type(self.mask_id) is not int or not 0 <= self.mask_id < self.vocab_size:
            raise InputError("mask_token_id", self.mask_id, f"a token below vocab_size ({self.vocab_size})")
        if all(window is not None for window in self.windows):
            raise InputError("layer_types", [SLIDING] * len(self.windows), f"at least one {FULL!r} layer")
        self.rope.rotated(self.head_dim)


def gathered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every field once, under its plain name, from the place that wins."""
    nested = [name for name in OBJECTS if values.get(name) is not None]
    if len(nested) > 1:
        raise InputError(" and ".join(nested), "both", "one of the two")
    for name in ("text_config", *nested):
        if not isinstance(values.get(name, {}), Mapping):
            raise InputError(name, values[name], "an object")
    plain = {name: value for name, value in values.items() if name not in ("text_config", *OBJECTS)}
    own = {name: value for name, value in plain.items() if not name.startswith(PREFIX)}
    prefixed = {name.removeprefix(PREFIX): value for name, value in plain.items() if name.startswith(PREFIX)}
    if "noise_token_id" in prefixed:
        prefixed["mask_token_id"] = prefixed.pop("noise_token_id")
    inner = dict(values[nested[0]]) if nested else {}
    return own | dict(values.get("text_config", {})) | inner | prefixed


def default_target_layers(picks: int, depth: int) -> tuple[int, ...]:
    """Which of `depth` layers feed a draft of `picks`: the middle one, or evenly from the second on."""
    if picks == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (picks - 1)) for index in range(picks))


def _target_layers(fields: Fields, picks: int, depth: int) -> tuple[int, ...]:
    layers = fields.raw("target_layer_ids", None)
    if layers is None:
        return default_target_layers(picks, depth)
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise InputError("target_layer_ids", layers, "a list of whole numbers")
    for layer in layers:
        if not 0 <= layer < depth:
            raise InputError("target_layer_ids", layer, f"0 to {depth - 1}: the target has {depth} layers")
    if len(set(layers)) != len(layers):
        raise InputError("target_layer_ids", layers, "each layer once")
    return tuple(layers)


def _windows(fields: Fields) -> tuple[int | None, ...]:
    layers = fields.count("num_hidden_layers")
    types = fields.raw("layer_types", None)
    fields.raw("sliding_window", None)
    if types is None:
        return (None,) * layers
    if not isinstance(types, list) or len(types) != layers:
        raise InputError("layer_types", types, f"a list of num_hidden_layers ({layers}) names")
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise InputError("layer_types", kind, f"{SLIDING!r} or {FULL!r}")
    return tuple(fields.count("sliding_window") if kind == SLIDING else None for kind in types)


def _markov(fields: Fields) -> tuple[MarkovKind, int] | None:
    kind = fields.raw("markov_head_type", "vanilla")
    if kind not in HEADS:
        raise InputError("markov_head_type", kind, f"one of {', '.join(HEADS)}")
    if fields.raw("markov_rank", 0) in (0, None):
        return None
    return kind, fields.count("markov_rank")


def _temperatures(fields: Fields, drafts: int) -> tuple[float, ...] | None:
    values = fields.raw("confidence_temperatures", None)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != drafts:
        raise InputError("confidence_temperatures", values, f"a list of block_size ({drafts}) numbers")
    for value in values:
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise InputError("confidence_temperatures", value, "a number above 0")
    return tuple(map(float, values))
