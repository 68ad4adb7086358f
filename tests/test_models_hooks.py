"""Loader hooks: asked once per runner, and a draft's class answers exactly what its target's answers."""

from types import SimpleNamespace

import pytest
import torch

from suite.errors import InvariantError
from suite.models import hooks
from suite.models.drafts import DRAFT_ENTRIES
from suite.models.hooks import HOOKS, SharedExperts, draft_pairs, parity_faults, resolve_shared_experts
from suite.models.loader import build
from suite.models.registry import ENTRIES
from suite.models.train.minis import MINIS


def registered():
    """Our own entry classes: a target served as a standalone draft is built by the target's own."""
    targets = {name: entry.model_class() for name, entry in ENTRIES.items()}
    drafts = {name: entry.model_class() for name, entry in DRAFT_ENTRIES.items()}
    return targets, drafts | {f"{name}Standalone": model for name, model in targets.items()}


def answering(*names):
    """A class that has these hooks."""
    return type("Entry", (), {name: classmethod(lambda cls, config, quant=None: None) for name in names})


def test_every_draft_entry_class_answers_what_its_target_answers():
    targets, drafts = registered()
    assert parity_faults(targets, drafts) == []
    pairs = dict(draft_pairs(targets, drafts))
    assert len(pairs) > 10
    assert pairs["DeepseekV3ForCausalLMNextN"] == "DeepseekV3ForCausalLM"
    assert pairs["Qwen3NextForCausalLMMTP"] == "Qwen3NextForCausalLM"
    assert pairs["Qwen3_5ForCausalLMMTP"] == "Qwen3_5ForCausalLM"


@pytest.mark.parametrize("hook", HOOKS)
def test_a_draft_without_its_targets_hook_is_named(hook):
    targets, drafts = registered()
    others = [name for name in HOOKS if name != hook]
    drafts["DeepseekV3ForCausalLMDSpark"] = answering(*others)
    assert parity_faults(targets, drafts) == [
        f"DeepseekV3ForCausalLMDSpark lacks {hook}, its target DeepseekV3ForCausalLM has it"
    ]
    drafts["DeepseekV3ForCausalLMDSpark"] = answering(*HOOKS)
    drafts["LlamaForCausalLMDFlash"] = answering(hook)
    assert parity_faults(targets, drafts) == [
        f"LlamaForCausalLMDFlash has {hook}, its target LlamaForCausalLM lacks it"
    ]


@pytest.mark.parametrize("suffix", ["NextN", "MTP", "DSpark", "DFlash", "Standalone"])
def test_suffixes_name_the_target(suffix):
    targets = {"ModelForCausalLM": object}
    drafts = {f"ModelForCausalLM{suffix}": object, f"Model{suffix}": object, f"Other{suffix}": object, "Eagle": object}
    assert dict(draft_pairs(targets, drafts)) == {
        f"ModelForCausalLM{suffix}": "ModelForCausalLM",
        f"Model{suffix}": "ModelForCausalLM",
    }


def test_a_check_of_ten_pairs_is_a_broken_check():
    targets = {f"M{index}ForCausalLM": object for index in range(11)}
    drafts = {f"{name}MTP": object for name in targets}
    assert parity_faults(targets, drafts) == []
    drafts.pop("M0ForCausalLMMTP")
    with pytest.raises(InvariantError, match="pairs 10 > 10 does not hold"):
        parity_faults(targets, drafts)


class Fusing:
    """A class that objects to fp8 and could fuse two."""

    asked = 0

    @classmethod
    def shared_experts_fusion_disable_reason(cls, config, quant):
        cls.asked += 1
        return "fp8" if quant == "fp8" else None

    @classmethod
    def num_fusable_shared_experts(cls, config):
        return config.shared


def test_what_the_stamp_says():
    config = SimpleNamespace(shared=2)
    assert resolve_shared_experts(Fusing, config, None) == SharedExperts(fused=2, reason=None)
    assert resolve_shared_experts(Fusing, config, "fp8") == SharedExperts(fused=0, reason="fp8")
    assert resolve_shared_experts(Fusing, config, None, disabled=True).reason == "disabled by the user"
    for hook in HOOKS:
        lacking = answering(*(name for name in HOOKS if name != hook))
        stamp = resolve_shared_experts(lacking, config, None)
        assert (stamp.fused, stamp.reason) == (0, f"Entry has no {hook}")


def test_the_loader_asks_once_and_stamps_the_runner(monkeypatch):
    asked = []
    ask = hooks.SharedExpertsApart.shared_experts_fusion_disable_reason.__func__

    def remember(cls, config, quant):
        asked.append((cls.__name__, quant))
        return ask(cls, config, quant)

    monkeypatch.setattr(hooks.SharedExpertsApart, "shared_experts_fusion_disable_reason", classmethod(remember))
    values = MINIS["deepseek-mla-mini"].config | {"quantization_config": {"quant_method": "fp8"}}
    model = build(values, torch.float32, "meta")
    assert asked == [("DeepseekMla", {"quant_method": "fp8"})]
    assert model.shared_experts == SharedExperts(fused=0, reason="shared experts are one MLP of their own")
    assert type(model).num_fusable_shared_experts(model.config) == 1
    assert build(MINIS["gpt-oss-mini"].config, torch.float32, "meta").shared_experts.fused == 0
