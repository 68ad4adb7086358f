"""The questions of the accuracy tasks, as text: pure functions of language, seed, number and length.

A document is `{"prompt", "answer"}`, or with `"choices"` for a task that is scored
by log-likelihood. Its hash covers all of it, so an item keeps its name across
runs and machines.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from suite.errors import InputError
from suite.models.languages import VALUES, WORDS, WORDS_EACH, question
from suite.records import content_hash

Document = dict[str, Any]
SHORTEST_TEXT = 32  # words of a workload's text before it is cut: the copy language has nothing shorter


def documents(language: str, *, seed: int, n: int, length: int, choices: int = 0) -> list[Document]:
    """The first `n` questions of `seed`, each prompt exactly `length` words. Item i is the same for every n.

    choices: how many values to choose among, the right one included; 0 for none. Raises InputError.
    """
    if n < 1:
        raise InputError("items", n, "a positive number of questions")
    return [_document(language, seed, index, length, choices) for index in range(n)]


def _document(language: str, seed: int, index: int, length: int, choices: int) -> Document:
    prompt, answer = question(language, seed, index, length)
    document: Document = {"prompt": spell(prompt), "answer": spell(answer)}
    if choices:
        others = sorted({word for word in prompt if VALUES <= word < VALUES + WORDS_EACH} - set(answer))
        if len(answer) != 1 or len(others) < choices - 1:
            raise InputError("choices", choices, f"at most {len(others) + 1} values in a text of {length} words")
        drawn = random.Random(f"{language}/{seed}/{index}/{length}")
        # random() alone has a stream that Python promises to keep
        offered = [answer[0], *sorted(others, key=lambda _: drawn.random())[: choices - 1]]
        document["choices"] = [spell([word]) for word in sorted(offered, key=lambda _: drawn.random())]
    return document


def spell(ids: list[int]) -> str:
    """The words of `ids`, separated by spaces."""
    return " ".join(WORDS[index] for index in ids)


def workload_text(tokenizer: Any, seed: int, language: str = "copy") -> Callable[[int, int], list[int]]:
    """Text `number` of exactly so many ids, from a language whose long continuations are determined."""

    def text(number: int, tokens: int) -> list[int]:
        ids = tokenizer.encode(spell(question(language, seed, number, max(tokens, SHORTEST_TEXT))[0])).ids
        if len(ids) < tokens:
            raise InputError("prompt_tokens", len(ids), f"{tokens}: the tokenizer drops words")
        return ids[:tokens]  # a tokenizer that splits words gives more than one id for each

    return text


def workload_prompts(tokenizer: Any, n: int, prompt_tokens: int, seed: int) -> list[list[int]]:
    """`n` prompts of exactly `prompt_tokens` ids."""
    if n < 1:
        raise InputError("requests", n, "a positive number of prompts")
    text = workload_text(tokenizer, seed)
    return [text(index, prompt_tokens) for index in range(n)]


def write_jsonl(path: Path | str, items: list[Document]) -> None:
    """One document a line, each with its hash. Raises InputError where the path cannot be written."""
    text = "".join(json.dumps({"hash": content_hash(item), **item}, sort_keys=True) + "\n" for item in items)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError("path", str(path), f"a writable file ({error.strerror})") from None


def read_jsonl(path: Path | str) -> list[Document]:
    """What `write_jsonl` wrote. Raises InputError for the first line that is not a document or not the hashed one."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("path", str(path), f"a readable JSONL file ({error})") from None
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, where: str) -> Document:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise InputError(where, line[:80], f"a JSON object ({error})") from None
    if not isinstance(item, dict) or not {"hash", "prompt", "answer"} <= item.keys():
        raise InputError(where, line[:80], "an object with hash, prompt and answer")
    stored = item.pop("hash")
    if stored != content_hash(item):
        raise InputError(where, stored, f"{content_hash(item)}, the hash of this line's content")
    return item
