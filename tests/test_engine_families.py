"""The trained checkpoints of every family in the engine: the same words in every pool, with graphs and without.

Their answers stand in stored rows and recurrent states, so a row or a state that is somebody else's costs an answer.
"""

import functools

import pytest
import torch

from suite.e2e.accuracy.lm import evaluate_tasks
from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.models.languages import question
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer

# a second attention backend that serves the family, its metadata executed by the oracle
FAMILIES = {
    "deepseek-mla-mini": "flashinfer_mla",
    "gpt-oss-mini": "flashinfer",
    "kimi-linear-mini": "triton",
    "qwen-hybrid-mini": "fa3",
    "qwen-mini": "triton",
}
NEW_TOKENS = 64


@functools.cache
def model(name: str):
    return load_model(resolve_model(name), dtype=torch.float32, device="cpu")


def engine(name: str, pool: str, **changes) -> Engine:
    fields = {
        "backend": "reference",
        "launcher": "reference",
        "pool": pool,
        "page_size": 8,
        "max_batch": 4,
        "max_context": 192,
        "chunk_tokens": 64,
        "dtype": torch.float32,
        "device": "cpu",
        "graph": False,
        "seed": 3,
        "poison": True,
    }
    return Engine(model(name), EngineConfig(**(fields | changes)))


def spoken(name: str, pool: str, new_tokens: int = NEW_TOKENS, **changes) -> list[list[int]]:
    work = [
        Request(prompt=question("copy", 7, index, 50 + 11 * index)[0], max_new_tokens=new_tokens) for index in range(3)
    ]
    built = engine(name, pool, **changes)
    built.run(work)
    assert built.churn.moved_share >= 0.5 or pool == "static"
    assert built.scheduler.retractions or "pool_pages" not in changes
    return [request.output for request in work]


@functools.cache
def plain(name: str) -> list[list[int]]:
    return spoken(name, "static")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_pool_says_the_same_with_graphs_and_without(name):
    assert spoken(name, "unified") == plain(name)
    assert spoken(name, "unified", graph=True, mixed=True, backend=FAMILIES[name]) == plain(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefix_cache_a_short_pool_and_drafts_change_no_word(name):
    want = [tokens[:16] for tokens in plain(name)]
    short = {"prefix_cache": True, "snapshot_tokens": 16, "pool_pages": 28}
    assert spoken(name, "unified", 16, **short) == want
    assert spoken(name, "unified_token_major", 16, speculation="ngram", draft_tokens=3, graph=True) == want


@pytest.mark.parametrize("name", FAMILIES)
def test_questions_are_answered(name):
    tokenizer = load_tokenizer(resolve_model(name))
    built = engine(name, "unified", graph=True, max_context=272)
    metrics, _ = evaluate_tasks(built, tokenizer, {"recall@256": 4}, seed=1)
    assert metrics["accuracy"].value >= 0.75


def test_padded_lanes_route_alike_in_every_pool():
    """Experts multiply the tokens of all lanes together: what padding reads shows in everybody's last bits."""
    lanes = {}
    for pool in ("static", "unified"):
        built, seen = engine("deepseek-mla-mini", pool, graph=True, speculation="ngram", draft_tokens=3), []
        own = built.runner.graphs.run
        built.runner.graphs.run = lambda batch, own=own, seen=seen: seen.append(own(batch)) or seen[-1]
        built.run([Request(prompt=question("copy", 7, index, 50)[0], max_new_tokens=8) for index in range(3)])
        lanes[pool] = torch.cat([done.hidden for done in seen])
    assert len(lanes["static"]) >= 32
    assert torch.equal(lanes["static"], lanes["unified"])
