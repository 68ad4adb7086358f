"""Greedy tokens of the trained model, whatever is switched on: every pair of settings of every two switches.

`RUNS` is a 2-way covering array over `SWITCHES`; `cover` made it, and the test holds it to that.
"""

import functools
import itertools

import pytest
import torch

from suite.e2e.accuracy.documents import workload_text
from suite.e2e.engine.config import EngineConfig
from suite.e2e.engine.engine import Engine
from suite.e2e.engine.requests import Request
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer

SWITCHES: dict[str, tuple] = {
    "pool": ("static", "unified", "unified_token_major"),
    "batch": (1, 8),
    "chunk": (256, 24),
    "prefix_cache": (False, True),
    "graph": (False, True),
    "speculation": ("none", "scripted", "ngram", "model"),
    "retracted": (False, True),
    "poison": (False, True),
    "mixed": (False, True),
}
NEW_TOKENS, PROMPTS, PROMPT_TOKENS, PAGE_SIZE, DRAFTS = 64, 3, 56, 8, 3

# one row per run, in the order of SWITCHES; values are positions in their tuples
RUNS = (
    (0, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 1, 1, 1, 1, 1, 1, 1, 1),
    (0, 0, 1, 0, 1, 2, 0, 1, 0),
    (0, 0, 0, 1, 0, 3, 1, 0, 1),
    (1, 0, 0, 0, 1, 1, 0, 0, 1),
    (1, 1, 0, 0, 0, 2, 1, 1, 0),
    (1, 0, 1, 1, 0, 0, 0, 0, 0),
    (1, 1, 1, 0, 1, 3, 0, 0, 0),
    (2, 0, 0, 0, 0, 1, 0, 0, 0),
    (2, 1, 1, 1, 1, 0, 1, 1, 1),
    (2, 0, 0, 1, 0, 2, 0, 0, 1),
    (2, 0, 0, 0, 0, 3, 0, 1, 0),
)


def cover(sizes: list[int]) -> list[tuple[int, ...]]:
    """A greedy 2-way covering array: each row takes, switch by switch, the value that meets most pairs not yet met."""
    columns = range(len(sizes))
    left = {
        (a, x, b, y) for a, b in itertools.combinations(columns, 2) for x in range(sizes[a]) for y in range(sizes[b])
    }
    rows = []
    while left:
        a, x, b, y = min(left)
        row: dict[int, int] = {a: x, b: y}
        for column in columns:
            if column not in row:
                gains = [
                    sum(_pair(c, v, column, value) in left for c, v in row.items()) for value in range(sizes[column])
                ]
                row[column] = gains.index(max(gains))
        rows.append(tuple(row[column] for column in columns))
        left -= _pairs(rows[-1])
    return rows


def _pair(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
    return (a, x, b, y) if a < b else (b, y, a, x)


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


@functools.cache
def model():
    return load_model(resolve_model("gpt-oss-mini"), dtype=torch.float32, device="cpu")


@functools.cache
def prompts() -> list[list[int]]:
    """Copies whose continuation is determined, the first half shared."""
    text = workload_text(load_tokenizer(resolve_model("gpt-oss-mini")), 3)
    return [text(99, 24) + text(index, PROMPT_TOKENS - 24) for index in range(PROMPTS)]


def serve(settings: dict, truth=None) -> list[Request]:
    speculation = settings["speculation"]
    longest = -(-(PROMPT_TOKENS + NEW_TOKENS + DRAFTS) // PAGE_SIZE)
    config = EngineConfig(
        backend="reference",
        launcher="reference",
        pool=settings["pool"],
        page_size=PAGE_SIZE,
        max_batch=settings["batch"],
        max_context=PROMPT_TOKENS + NEW_TOKENS,
        chunk_tokens=settings["chunk"],
        dtype=torch.float32,
        device="cpu",
        graph=settings["graph"],
        seed=5,
        poison=settings["poison"],
        pool_pages=longest + 14 if settings["retracted"] else None,
        prefix_cache=settings["prefix_cache"],
        mixed=settings["mixed"],
        speculation=speculation,
        draft_tokens=0 if speculation == "none" else DRAFTS,
        script=(3, 1) if speculation == "scripted" else (),
    )
    engine = Engine(model(), config, draft=model(), truth=truth)
    work = [Request(prompt=prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts()]
    engine.run(work)
    if settings["retracted"] and settings["batch"] > 1:
        assert engine.scheduler.retractions > 0
    if settings["pool"] != "static":
        assert engine.churn.moved_share > 0.25  # one request alone has few steps in which to be moved
    if settings["prefix_cache"] and settings["batch"] == 1:
        assert work[-1].cached_tokens == 24
    return work


@functools.cache
def plain() -> list[list[int]]:
    return [request.output for request in serve({name: values[0] for name, values in SWITCHES.items()})]


def test_the_table_covers_every_pair():
    sizes = [len(values) for values in SWITCHES.values()]
    assert list(RUNS) == cover(sizes)
    met = set().union(*map(_pairs, RUNS))
    assert len(met) == sum(a * b for a, b in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("row", RUNS, ids=lambda row: "".join(map(str, row)))
def test_tokens_do_not_depend_on_the_switches(row):
    settings = {name: values[at] for (name, values), at in zip(SWITCHES.items(), row, strict=True)}
    truth = {tuple(prompt): output for prompt, output in zip(prompts(), plain(), strict=True)}
    assert [request.output for request in serve(settings, truth)] == plain()
