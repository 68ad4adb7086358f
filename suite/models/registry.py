"""Which models there are: entry classes by the `architectures` of a config.json, shipped checkpoints by name.

Names are known without importing torch; the class behind one is imported when it
is asked for.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.errors import InputError, UnknownNameError

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class Entry:
    """Where a family's classes live: `module:name`, imported late."""

    model: str
    config: str

    def model_class(self) -> Any:
        return _import(self.model)

    def config_class(self) -> Any:
        return _import(self.config)


_DENSE = Entry("suite.models.qwen3:DenseDecoder", "suite.models.dense_config:DenseConfig")
_LIGHTNING = Entry(
    "suite.models.lightning_hybrid:LightningHybrid", "suite.models.lightning_hybrid:LightningHybridConfig"
)
_QWEN_HYBRID = Entry("suite.models.qwen_hybrid:QwenHybrid", "suite.models.hybrid_config:QwenHybridConfig")

ENTRIES: dict[str, Entry] = {
    "BailingMoeLinearForCausalLM": _LIGHTNING,
    "DeepseekV2ForCausalLM": Entry("suite.models.deepseek_mla:DeepseekMla", "suite.models.mla_config:DeepseekConfig"),
    "DeepseekV3ForCausalLM": Entry("suite.models.deepseek_mla:DeepseekMla", "suite.models.mla_config:DeepseekConfig"),
    "GptOssForCausalLM": Entry("suite.models.gpt_oss:GptOss", "suite.models.config:GptOssConfig"),
    "KimiLinearForCausalLM": Entry("suite.models.kimi_linear:KimiLinear", "suite.models.kimi_config:KimiLinearConfig"),
    "LlamaForCausalLM": _DENSE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3NextForCausalLM": _QWEN_HYBRID,
    "Qwen3_5ForCausalLM": _QWEN_HYBRID,
    "Qwen3_5ForConditionalGeneration": _QWEN_HYBRID,
    "Qwen3_5MoeForCausalLM": _QWEN_HYBRID,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_HYBRID,
}


def entry_of(values: Mapping[str, Any]) -> Entry:
    """The entry that the `architectures` field of a config.json names. Raises InputError."""
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise InputError("architectures", architectures, f"a list of one of {', '.join(sorted(ENTRIES))}")
    (name,) = architectures
    if name not in ENTRIES:
        raise UnknownNameError("architectures", name, ENTRIES)
    return ENTRIES[name]


def shipped_models() -> tuple[str, ...]:
    """Names of the checkpoints that come with kvproof."""
    return tuple(sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of a shipped checkpoint, or the folder given. Raises UnknownNameError."""
    if str(name_or_path) in shipped_models():
        return CHECKPOINTS / name_or_path
    folder = Path(name_or_path)
    if not str(name_or_path) or not os.path.isdir(folder):
        raise UnknownNameError("model", str(name_or_path), shipped_models(), also=" or a checkpoint folder")
    return folder


def _import(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
