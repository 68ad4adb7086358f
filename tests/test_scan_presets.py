"""Every rule of both presets: a snippet that breaks it, and the same done by an owner or in a way that is allowed."""

import ast

import pytest

from suite.scan.checks import check_file
from suite.scan.rules import load_rules

READER, ENGINE = "suite/kernels/attention/new.py", "suite/e2e/engine/new.py"
# rule -> what breaks it, where, and where the same line is fine
KVPROOF = {
    "read-translation": ("self.translator.index_table_for_batch(batch)", ENGINE, READER),
    "write-translation": ("translator.write_loc(ids)", READER, "suite/kernels/batch.py"),
    "export": ("translator.export_ids(ids, kind)", ENGINE, "suite/kernels/translator.py"),
    "page-map": ("self.allocator.page_map(kind)", READER, "suite/kernels/allocators/new.py"),
    "translation-kernel": (
        *("from suite.kernels.ops.read_table import read_table", READER, "suite/kernels/translator.py"),
    ),
    "kernel-ids": ("from suite.kernels.ids import KernelIds\nKernelIds(x, kind)", ENGINE, READER),
    "virtual-ids": ("from suite.kernels import ids\nids.VirtualIds(x)", READER, "suite/e2e/engine/scheduler.py"),
    "allocator-state": ("for span in self.allocator.spans: pass", ENGINE, "suite/e2e/engine/churn.py"),
    "pool-bytes": ("pool.zero_pages(kind, pages)", ENGINE, "suite/kernels/pools/new.py"),
    "capability-probe": ("isinstance(self.allocator, UnifiedAllocator)", ENGINE, "tests/new.py"),
    "vendor-library": ("import flashinfer.decode", ENGINE, READER),
    "torch-in-records": ("import torch", "db/new.py", ENGINE),
    "database": ("import sqlalchemy as sa", ENGINE, "db/new.py"),
    "arrow-into-db": ("from db.store import Store", ENGINE, "suite/e2e/gate/new.py"),
    "arrow-into-kernels": ("from suite.kernels import batch", "suite/e2e/gate/new.py", ENGINE),
    "arrow-into-models": ("from suite.models.config import GptOssConfig", READER, ENGINE),
    "arrow-into-engine": ("from suite.e2e.engine.engine import Engine", "suite/models/new.py", ENGINE),
}
BACKEND, MODEL = "python/sglang/srt/layers/attention/new_backend.py", "python/sglang/srt/models/new.py"
SGLANG = {
    "read-translation": ("translator.copy_page_table(out, kind)", MODEL, BACKEND),
    "write-translation": ("allocator.translate_loc_from_full_to_swa(x)", MODEL, "srt/mem_cache/allocator/swa.py"),
    "page-map": ("self.allocator.full_v2p", BACKEND, "sglang/kernels/ops/kvcache/new.py"),
    "virtual-write-loc": ("batch.out_cache_loc_virtual", MODEL, "python/sglang/srt/model_executor/runner/new.py"),
    "translator-door": (
        *("from a import KVIndexTranslator\nKVIndexTranslator(pool)", BACKEND),
        "python/sglang/srt/model_executor/model_runner.py",
    ),
    "capability-probe": ("hasattr(self.token_to_kv_pool, 'full')", BACKEND, "sglang/srt/mem_cache/new.py"),
    "translation-kernel": (
        *("from sglang.kernels.ops.memory.virtual_slot import bind", MODEL, "python/sglang/srt/mem_cache/new.py"),
    ),
}
CASES = [
    (preset, rule, *case)
    for preset, rules in (("kvproof", KVPROOF), ("sglang", SGLANG))
    for rule, case in rules.items()
]


def rules_hit(preset: str, source: str, path: str) -> set[str]:
    return {hit.rule for hit in check_file(ast.parse(source), path, load_rules(preset))}


def test_every_rule_has_a_case():
    assert set(KVPROOF) == {rule.id for rule in load_rules("kvproof").rules}
    assert set(SGLANG) == {rule.id for rule in load_rules("sglang").rules}


@pytest.mark.parametrize(("preset", "rule", "source", "stranger", "owner"), CASES)
def test_a_rule_is_broken_by_a_stranger_and_kept_by_an_owner(preset, rule, source, stranger, owner):
    assert rule in rules_hit(preset, source, stranger)
    assert rule not in rules_hit(preset, source, owner)
    quoted = "".join(f"# {line}\n" for line in source.splitlines()) + f"TEXT = {source!r}\n"
    assert rules_hit(preset, quoted, stranger) == set()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("getattr(self.translator, 'fill_' + 'read_table')(batch, kind, out)", "read-translation"),
        ("f = getattr(t, f'write_{\"loc\"}')\nf(ids)", "write-translation"),
        ("from suite.kernels.ops.write_loc import write_loc as shift\nshift(x, m, 1, 4)", "write-translation"),
        ("import importlib\nimportlib.import_module('suite.kernels.ops.' + 'read_stream')", "translation-kernel"),
        ("moving = self.allocator\nif hasattr(moving, 'compact'): pass", "capability-probe"),
        ("def f(a: PageAllocator):\n    return type(a) is UnifiedAllocator", "capability-probe"),
        ("match self.allocator:\n    case UnifiedAllocator(): pass", "capability-probe"),
        ("from suite.kernels.ids import KernelIds as K\nK(v.tensor, kind)", "kernel-ids"),
    ],
)
def test_roundabout_ways_in_this_project_are_seen(source, rule):
    assert rule in rules_hit("kvproof", source, ENGINE)


def test_owners_of_the_sglang_preset_are_found_in_a_checkout_and_in_an_installation():
    source = "self.token_to_kv_pool.full_v2p"
    for place in ("python/sglang/", "sglang/", ""):
        assert rules_hit("sglang", source, f"{place}srt/mem_cache/allocator/swa.py") == set()
        assert rules_hit("sglang", source, f"{place}srt/models/llama.py") == {"page-map"}
    assert load_rules("sglang").excludes("python/sglang/multimodal_gen/x/y.py")
