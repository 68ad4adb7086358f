"""lm-eval on our engine: the adapter, and one call that asks the tasks and returns metrics and per-item outcomes."""

import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from tokenizers import Tokenizer

from suite.e2e.accuracy.task import Task, load_task
from suite.errors import InputError
from suite.records import ItemOutcome, Metric

__all__ = ["EngineLM", "Server", "evaluate_tasks"]


class Server(Protocol):
    """What serves the model: ids in, ids out, greedy."""

    def generate(
        self, prompts: list[list[int]], max_new_tokens: list[int], stop: list[tuple[int, ...]]
    ) -> list[list[int]]:
        """New ids for each prompt; ends at a stop id, which is left out, or at its max_new_tokens."""
        ...

    def score(self, prompts: list[list[int]], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """For each pair, sum of log p(continuation | prompt) in nat, and whether greedy decoding would say it."""
        ...


class EngineLM(LM):
    """lm-eval's three questions put to a `Server`."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.server, self.tokenizer = server, tokenizer

    def generate_until(self, requests: list[Instance]) -> list[str]:
        prompts, lengths, stops = [], [], []
        for context, settings in (request.args for request in requests):
            prompts.append(self._ids(context))
            lengths.append(settings["max_gen_toks"])
            stops.append(tuple(self._stop_id(word) for word in settings["until"]))
        return [self.tokenizer.decode(ids) for ids in self.server.generate(prompts, lengths, stops)]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        prompts, continuations = [], []
        for context, continuation in (request.args for request in requests):
            prompt, whole = self._ids(context), self._ids(context + continuation)
            if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
                raise InputError("continuation", continuation, "words that the tokenizer splits from the prompt")
            prompts.append(prompt)
            continuations.append(whole[len(prompt) :])
        return self.server.score(prompts, continuations)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise InputError("output_type", "loglikelihood_rolling", "generate_until, loglikelihood or multiple_choice")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def _stop_id(self, word: str) -> int:
        ids = self._ids(word)
        if len(ids) != 1:
            raise InputError("generation_kwargs.until", word, "a word of one token")
        return ids[0]


def evaluate_tasks(
    server: Server, tokenizer: Tokenizer, tasks: Mapping[str, int], seed: int
) -> tuple[dict[str, Metric], tuple[ItemOutcome, ...]]:
    """Ask `tasks` (name to number of items) and grade the answers.

    Metrics: `accuracy.<task>` each; `accuracy` over all items; `mean_loglikelihood` of the right answer over the
    items that were scored by log-likelihood and whose scores are finite (its `n`), where there are any. An item
    with a score that is not finite is not correct. Raises UnknownNameError and InputError before anything is asked.
    """
    if not tasks:
        return {}, ()
    asked = {name: load_task(name) for name in tasks}
    ready = {name: _lm_eval_task(task, task.documents(seed=seed, n=tasks[name])) for name, task in asked.items()}
    results = evaluate(EngineLM(server, tokenizer), ready, bootstrap_iters=0, log_samples=True)
    samples = {name: results["samples"][name] for name in tasks}
    items = tuple(_outcome(asked[name], sample) for name in tasks for sample in samples[name])
    metrics = {f"accuracy.{name}": _accuracy([item for item in items if item.task == name]) for name in tasks}
    metrics["accuracy"] = _accuracy(items)
    scored = [_right_loglikelihood(s) for name in tasks if asked[name].choices for s in samples[name] if _finite(s)]
    if scored:
        mean = sum(scored) / len(scored)
        metrics["mean_loglikelihood"] = Metric.of("mean_loglikelihood", mean, len(scored))
    return metrics, items


def _lm_eval_task(task: Task, items: list[dict[str, Any]]) -> ConfigurableTask:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every callable it is given
    dataset = {"test": datasets.Dataset.from_list(items)}
    return ConfigurableTask(config={**task.settings, "custom_dataset": lambda **_: dataset})


def _outcome(task: Task, sample: dict[str, Any]) -> ItemOutcome:
    correct = bool(sample[task.metric])
    if not task.choices:
        answer = sample["filtered_resps"][0]
    elif _finite(sample):
        likelihoods = [likelihood for likelihood, _ in sample["filtered_resps"]]
        answer = sample["doc"]["choices"][likelihoods.index(max(likelihoods))]
    else:  # lm-eval takes the first NaN for the best choice
        answer, correct = "not finite", False
    return ItemOutcome(
        task=task.name,
        doc_hash=sample["doc_hash"],
        prompt_hash=sample["prompt_hash"],
        target_hash=sample["target_hash"],
        correct=correct,
        answer=answer,
    )


def _finite(sample: dict[str, Any]) -> bool:
    return all(math.isfinite(likelihood) for likelihood, _ in sample["filtered_resps"])


def _right_loglikelihood(sample: dict[str, Any]) -> float:
    return sample["filtered_resps"][sample["doc"]["choices"].index(sample["target"])][0]


def _accuracy(items: Any) -> Metric:
    return Metric.of("accuracy", sum(item.correct for item in items) / len(items), len(items))
