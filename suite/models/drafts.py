"""Finds the draft of a target and loads it beside it.

In this order: the folder that the user names; the target's own folder, when its config.json has the fields of a
bundled DSpark draft; a folder `dspark` or `dflash` inside it, as the algorithm is called. A target that carries
prediction layers of its own brings a NEXTN draft, which is asked for by name. Nothing is guessed: what is not found is
an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from suite.errors import InputError, UnknownNameError
from suite.models.draft_config import DFLASH, DSPARK, gathered
from suite.models.hooks import resolve_shared_experts
from suite.models.registry import Entry

Algorithm = Literal["DSPARK", "DFLASH", "NEXTN"]
ALGORITHMS: tuple[Algorithm, ...] = ("DSPARK", "DFLASH", "NEXTN")
BUNDLED = tuple(f"dspark_{name}" for name in ("block_size", "markov_rank", "noise_token_id", "target_layer_ids"))

_BLOCK = Entry("suite.models.dspark:BlockDraft", "suite.models.draft_config:DraftConfig")
_DEEPSEEK = Entry("suite.models.mtp:DeepseekMtp", "suite.models.mla_config:DeepseekConfig")
_QWEN = Entry("suite.models.mtp:QwenMtp", "suite.models.hybrid_config:QwenHybridConfig")
DRAFT_ENTRIES: dict[str, Entry] = {
    **dict.fromkeys((*DFLASH, *DSPARK), _BLOCK),
    "DeepseekV3ForCausalLMNextN": _DEEPSEEK,
    "Qwen3NextForCausalLMMTP": _QWEN,
    "Qwen3_5ForCausalLMMTP": _QWEN,
}
# whose checkpoint holds prediction layers, and which draft they are
NEXTN_OF: dict[str, str] = {
    "DeepseekV3ForCausalLM": "DeepseekV3ForCausalLMNextN",
    "Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
}


@dataclass(frozen=True)
class Found:
    """Where a draft lies and which entry class it is. bundled: its config.json is the target's."""

    folder: Path
    architecture: str
    bundled: bool

    @property
    def entry(self) -> Entry:
        return DRAFT_ENTRIES[self.architecture]


def find_draft(target: Path, algorithm: Algorithm, draft: Path | None = None) -> Found:
    """The draft of the target in folder `target`; `draft`: the folder that the user named, None when none.

    Raises UnknownNameError for an algorithm or an architecture that has no draft, InputError when there is none.
    """
    from suite.models.loader import read_config  # names are known without torch

    if algorithm not in ALGORITHMS:
        raise UnknownNameError("algorithm", algorithm, ALGORITHMS)
    values = read_config(target)
    if algorithm == "NEXTN":
        folder = draft or target
        return Found(folder, _nextn(read_config(folder)), folder == target)
    if draft is not None:
        return Found(draft, _block(read_config(draft), algorithm), False)
    if any(name in values for name in BUNDLED):
        return Found(target, _block(values, algorithm), True)
    inside = target / algorithm.lower()
    if (inside / "config.json").is_file():
        return Found(inside, _block(read_config(inside), algorithm), False)
    expected = f"a draft's folder, {BUNDLED[0]} in {target / 'config.json'}, or a folder {inside}"
    raise InputError("draft", None, expected)


def load_draft(found: Found, target: Any, *, dtype: Any, device: Any, load: str = "weights") -> Any:
    """The draft that `found` names, with its weights, borrowing embedding and output projection from `target`.

    load: as for a model. Raises InputError for a config that does not fit the target's, CheckpointError for the first
    tensor that does not.
    """
    from suite.models.dummy import fill_dummy
    from suite.models.loader import LOADS, fill, read_config

    if load not in LOADS:
        raise UnknownNameError("load", load, LOADS)
    values = read_config(found.folder)
    config_class, model_class = found.entry.config_class(), found.entry.model_class()
    if found.entry is _BLOCK:
        config = config_class.from_hf(values, target_depth=len(target.model.layers))
    else:
        config = config_class.from_hf(values)
    draft = model_class(config, dtype=dtype, device=device).requires_grad_(False)
    draft.shared_experts = resolve_shared_experts(model_class, config, values.get("quantization_config"))
    draft.borrow(target)
    return fill_dummy(draft).eval() if load == "dummy" else fill(draft, found.folder, values)


def _block(values: Mapping[str, Any], algorithm: Algorithm) -> str:
    """The architecture of a block draft, which must be of the algorithm asked for."""
    name = _architecture(values)
    known = DSPARK if algorithm == "DSPARK" else DFLASH
    with_head = name in DFLASH and algorithm == "DSPARK" and "markov_rank" in gathered(values)
    if name not in known and not with_head:
        raise UnknownNameError("architectures", name, known)
    return name


def _nextn(values: Mapping[str, Any]) -> str:
    name = _architecture(values)
    if name in NEXTN_OF.values():
        return name
    if name not in NEXTN_OF:
        raise UnknownNameError("architectures", name, NEXTN_OF)
    return NEXTN_OF[name]


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InputError("architectures", names, "a list of one name")
    return names[0]
