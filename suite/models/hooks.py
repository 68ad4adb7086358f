"""Loader hooks: what a loader asks an entry class once per runner, before it builds the model, and stamps on it.

An entry class that has shared experts answers two questions, and a draft answers exactly those that its target
answers. Where a draft lacked a question's answer that its target gave, it was built in another layout than its
checkpoint: no crash, right text, and an accept length of 2 instead of 5.6.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from suite.errors import InvariantError

HOOKS = ("shared_experts_fusion_disable_reason", "num_fusable_shared_experts")
DRAFT_SUFFIX = re.compile(r"(NextN|MTP|DSpark|DFlash|Standalone)$")
LEAST_PAIRS = 10


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """The stamp: how many shared experts lie among the routed ones, and why not all."""

    fused: int
    reason: str | None


def resolve_shared_experts(entry_class: Any, config: Any, quant: Any, *, disabled: bool = False) -> SharedExperts:
    """Ask an entry class. None are fused when the user disabled it, the class objects, or it lacks a hook."""
    if disabled:
        return SharedExperts(fused=0, reason="disabled by the user")
    for hook in HOOKS:
        if not hasattr(entry_class, hook):
            return SharedExperts(fused=0, reason=f"{entry_class.__name__} has no {hook}")
    if reason := entry_class.shared_experts_fusion_disable_reason(config, quant):
        return SharedExperts(fused=0, reason=reason)
    return SharedExperts(fused=entry_class.num_fusable_shared_experts(config), reason=None)


class SharedExpertsApart:
    """Hooks of the families here, whose shared experts are one MLP beside the routed ones."""

    @classmethod
    def shared_experts_fusion_disable_reason(cls, config: Any, quant: Any) -> str | None:
        """Why shared experts are not stored among the routed ones."""
        return "shared experts are one MLP of their own"

    @classmethod
    def num_fusable_shared_experts(cls, config: Any) -> int:
        """How many shared experts could be stored among the routed ones: those as wide as they are."""
        return 0 if config.routing is None else config.shared_size // config.expert_size


def draft_pairs(targets: Mapping[str, Any], drafts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Draft and target names that belong together: the draft's name is the target's and a suffix.

    A standalone draft is an entry class of its own, named as the target it is built as.
    """
    for draft in sorted(drafts):
        stem = DRAFT_SUFFIX.sub("", draft)
        for target in (stem, f"{stem}ForCausalLM"):
            if stem != draft and target in targets:
                yield draft, target
                break


def parity_faults(targets: Mapping[str, Any], drafts: Mapping[str, Any]) -> list[str]:
    """One line for every hook that a draft's class has and its target's lacks, or the other way round.

    targets, drafts: entry classes by architecture. InvariantError when 10 pairs or fewer can be checked: then the
    names have changed, and the check checks nothing.
    """
    pairs = list(draft_pairs(targets, drafts))
    if len(pairs) <= LEAST_PAIRS:
        raise InvariantError(f"hook parity: pairs {len(pairs)} > {LEAST_PAIRS} does not hold; drafts {sorted(drafts)}")
    return [
        f"{draft} {_has(drafts[draft], hook)} {hook}, its target {target} {_has(targets[target], hook)} it"
        for draft, target in pairs
        for hook in HOOKS
        if hasattr(drafts[draft], hook) != hasattr(targets[target], hook)
    ]


def _has(entry_class: Any, hook: str) -> str:
    return "has" if hasattr(entry_class, hook) else "lacks"
