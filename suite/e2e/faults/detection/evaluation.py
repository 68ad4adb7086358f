"""Evaluation faults: the model is asked something else, its answers are cut, dropped, or not its own.

A scripted server knows every answer and gives a known share of them right, with more words behind the stop word, so
the true score is known. It goes through the real lm-eval adapter, and remembers the ids that it was asked.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from suite.e2e.accuracy.lm import evaluate_tasks
from suite.e2e.accuracy.task import load_task
from suite.e2e.faults.detection.signals import passed, signal_of
from suite.e2e.faults.fault import Setting, Signal, plants
from suite.e2e.faults.seams import unplanted
from suite.e2e.matrix.guards import void_reason
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer
from suite.records import Arm, ItemOutcome, content_hash

TASK, ITEMS, WRONG_EVERY = "recall@64", 12, 4
CHOICE = "recall_choice@64"
SCORE, ITEMS_DIFFER, PROMPTS = "accuracy.known_score_off", "accuracy.items_differ", "guards.prompts_differ"
ADAPTER, TASKS = "suite.e2e.accuracy.lm:EngineLM", "suite.e2e.accuracy.task:Task"


class ScriptedServer:
    """Answers `right` of the questions it is taught; every fourth wrong unless `right` is all or none."""

    def __init__(self, tokenizer: Any, documents: list[dict[str, Any]], share: float) -> None:
        self.asked: list[list[int]] = []
        ids = [(tokenizer.encode(d["prompt"]).ids, tokenizer.encode(d["answer"]).ids) for d in documents]
        stop = tokenizer.encode(".").ids
        self.known = {}
        for number, (prompt, answer) in enumerate(ids):
            right = share > 0 and number % WRONG_EVERY != 0
            self.known[tuple(prompt)] = (answer if right else ids[number - 1][0][:1]) + stop + prompt[:6]

    def generate(self, prompts: Any, max_new_tokens: Any, stop: Any) -> list[list[int]]:
        self.asked += prompts
        answers = []
        for prompt, limit, ends in zip(prompts, max_new_tokens, stop, strict=True):
            answer = self.known.get(tuple(prompt), [])[:limit]
            cut = next((at for at, token in enumerate(answer) if token in ends), len(answer))
            answers.append(answer[:cut])
        return answers

    def score(self, prompts: Any, continuations: Any) -> list[tuple[float, bool]]:
        self.asked += prompts
        return [(float("nan"), False) for _ in prompts]  # a pool that reads NaN rows scores like this


@lru_cache(maxsize=8)
def tokenizer_and_documents(seed: int) -> tuple[Any, list[dict[str, Any]]]:
    return load_tokenizer(resolve_model("gpt-oss-mini")), load_task(TASK).documents(seed=seed, n=ITEMS)


def ask(seed: int, share: float) -> tuple[ScriptedServer, float, tuple[ItemOutcome, ...]]:
    with unplanted():
        tokenizer, documents = tokenizer_and_documents(seed)
        server = ScriptedServer(tokenizer, documents, share)
    metrics, items = evaluate_tasks(server, tokenizer, {TASK: ITEMS}, seed)
    return server, metrics["accuracy"].value, items


def asked(setting: Setting) -> Iterator[Signal]:
    """A good server, a hopeless one, and another seed; held against what the good one is asked with nothing planted."""
    with unplanted():
        reference, score, known = ask(setting.seed, 0.75)
    server, got, items = ask(setting.seed, 0.75)
    if got != score:
        yield Signal(name=SCORE, text=f"accuracy {got:.3f} of a server that answers {score:.3f}")
    hopeless = ask(setting.seed, 0.0)[1]
    if hopeless != 0.0:
        yield Signal(name=SCORE, text=f"accuracy {hopeless:.3f} of a server that answers nothing")
    if (mine := names(items)) != (theirs := names(known)):
        text = f"{len(mine - theirs)} items that the other arm was not asked, {len(theirs - mine)} that only it was"
        yield Signal(name=ITEMS_DIFFER, text=text)
    arms = [
        (Arm(pool="static"), passed(prompt_hash=content_hash(reference.asked))),
        (Arm(pool="unified"), passed(prompt_hash=content_hash(server.asked))),
    ]
    with unplanted():
        if reason := void_reason(arms):
            code, _, text = reason.partition(": ")
            yield Signal(name=f"guards.{code}", text=text)
    if names(ask(setting.seed + 1, 0.75)[2]) & names(items):
        yield Signal(name="accuracy.seed_ignored", text="two seeds ask the same questions")
    yield from unscored(setting)


def unscored(setting: Setting) -> Iterator[Signal]:
    """A server whose every score is NaN gets nothing right."""
    tokenizer, documents = tokenizer_and_documents(setting.seed)
    try:
        metrics, _ = evaluate_tasks(ScriptedServer(tokenizer, documents, 0.0), tokenizer, {CHOICE: 8}, setting.seed)
    except Exception as error:
        yield signal_of(error)
        return
    if metrics["accuracy"].value != 0.0:
        text = f"accuracy {metrics['accuracy'].value:.3f} of a server whose scores are all NaN"
        yield Signal(name=SCORE, text=text)


def names(items: tuple[ItemOutcome, ...]) -> set[tuple[str, str]]:
    return {(item.prompt_hash, item.target_hash) for item in items}


@plants("evaluation", f"{ADAPTER}._ids", asked, PROMPTS, SCORE, source="B41", smoke=True)
def text_begins_with_two_bos(own: Any) -> Any:
    """every prompt gets a beginning-of-text token that its template has set already"""
    return lambda self, text: [0, *own(self, text)] if " " in text else own(self, text)


@plants("evaluation", f"{ADAPTER}._ids", asked, PROMPTS, SCORE, severity=1)
def prompts_lose_their_last_token(own: Any) -> Any:
    """prompts are cut by one token"""
    return lambda self, text: own(self, text)[:-1] if " " in text else own(self, text)


@plants("evaluation", f"{ADAPTER}._stop_id", asked, SCORE, source="B40")
def stop_words_ignored(own: Any) -> Any:
    """answers go on behind their stop word, which is graded with them"""
    return lambda self, word: -1


@plants("evaluation", f"{ADAPTER}.generate_until", asked, SCORE, source="B40")
def stop_word_fires_inside_answers(own: Any) -> Any:
    """answers are cut at the first word that is also a stop word"""
    return lambda self, requests: [answer.split(" ")[0][:-1] for answer in own(self, requests)]


@plants("evaluation", f"{ADAPTER}.generate_until", asked, SCORE, source="B39")
def answers_from_a_stale_cache(own: Any) -> Any:
    """answers are kept by question, and given again to another model"""
    known: dict[str, list[str]] = {}

    def cached(self: Any, requests: Any) -> list[str]:
        key = repr([request.args[0] for request in requests])
        return known.setdefault(key, own(self, requests))

    return cached


@plants("evaluation", f"{TASKS}.documents", asked, ITEMS_DIFFER, PROMPTS, source="B43")
def arms_draw_with_seeds_of_their_own(own: Any) -> Any:
    """this arm's questions are drawn with another seed"""
    return lambda self, *, seed, n: own(self, seed=seed + 7, n=n)


@plants("evaluation", f"{TASKS}.documents", asked, "accuracy.seed_ignored", ITEMS_DIFFER, source="B43")
def seed_ignored(own: Any) -> Any:
    """questions do not depend on the seed"""
    return lambda self, *, seed, n: own(self, seed=3, n=n)


@plants("evaluation", f"{TASKS}.documents", asked, ITEMS_DIFFER, PROMPTS, severity=1)
def hardest_item_dropped(own: Any) -> Any:
    """one item is left out"""
    return lambda self, *, seed, n: own(self, seed=seed, n=n)[1:]


@plants("evaluation", "suite.e2e.accuracy.lm:_finite", asked, SCORE, "accuracy.crash", source="B14")
def nan_scores_count_as_best(own: Any) -> Any:
    """the first choice wins where its score is NaN"""
    return lambda sample: True
