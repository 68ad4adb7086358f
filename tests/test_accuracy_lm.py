"""lm-eval over the serving protocol: what is asked, how it is graded, what comes back. No network is touched."""

import math
import socket

import pytest
import torch

from suite.e2e.accuracy.documents import documents
from suite.e2e.accuracy.lm import EngineLM, evaluate_tasks
from suite.e2e.accuracy.task import load_task
from suite.errors import InputError, UnknownNameError
from suite.models.loader import load_model
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer
from tests.models_checkpoints import DenseServer

TASKS = {"recall@96": 3, "needle@128": 2, "copy@96": 2, "local@96": 2, "recall_choice@96": 3}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("an accuracy task opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("gpt-oss-mini"))


@pytest.fixture
def server():
    return DenseServer(load_model(resolve_model("gpt-oss-mini"), dtype=torch.float32, device="cpu"))


class Answering:
    """A server that always gives the same answer, or the same scores."""

    def __init__(self, ids: list[int], scores=()) -> None:
        self.ids, self.scores = ids, scores

    def generate(self, prompts, max_new_tokens, stop):
        return [self.ids for _ in prompts]

    def score(self, prompts, continuations):
        return [(self.scores[index % len(self.scores)], False) for index in range(len(prompts))]


def test_the_trained_model_answers_every_task(server, tokenizer):
    metrics, items = evaluate_tasks(server, tokenizer, TASKS, seed=1)
    assert set(metrics) == {"accuracy", "mean_loglikelihood", *(f"accuracy.{name}" for name in TASKS)}
    for name, count in TASKS.items():
        assert (metrics[f"accuracy.{name}"].value, metrics[f"accuracy.{name}"].n) == (1.0, count)
    assert (metrics["accuracy"].unit, metrics["accuracy"].n) == ("share", 12)
    assert -0.1 < metrics["mean_loglikelihood"].value <= 0
    assert [item.task for item in items] == [name for name, count in TASKS.items() for _ in range(count)]
    assert all(item.correct for item in items)
    assert [item.answer for item in items[:3]] == [
        item["answer"] for item in load_task("recall@96").documents(seed=1, n=3)
    ]


def test_the_server_is_asked_the_documents_as_they_are(server, tokenizer):
    evaluate_tasks(server, tokenizer, {"recall@96": 2, "copy@96": 1, "recall_choice@96": 1}, seed=2)
    first, second, copied = server.generated
    for (prompt, most, stop), item in zip((first, second), load_task("recall@96").documents(seed=2, n=2), strict=True):
        assert tokenizer.decode(prompt) == item["prompt"]
        assert len(prompt) == 96
        assert (most, stop) == (4, (tokenizer.token_to_id("."),))
    assert copied[1:] == (16, ())
    (item,) = load_task("recall_choice@96").documents(seed=2, n=1)
    assert [tokenizer.decode(continuation) for _, continuation in server.scored] == item["choices"]
    assert {tokenizer.decode(prompt) for prompt, _ in server.scored} == {item["prompt"]}


def test_wrong_answers_are_graded_wrong(tokenizer):
    wrong = Answering(tokenizer.encode("f00").ids, scores=(-1.0, -2.0, -3.0, -4.0))
    metrics, items = evaluate_tasks(wrong, tokenizer, {"recall@96": 4, "recall_choice@96": 8}, seed=0)
    assert metrics["accuracy.recall@96"].value == 0
    assert [item.answer for item in items[:4]] == ["f00"] * 4
    right = [item["choices"].index(item["answer"]) for item in load_task("recall_choice@96").documents(seed=0, n=8)]
    assert [item.correct for item in items[4:]] == [place == 0 for place in right]
    assert metrics["mean_loglikelihood"].value == pytest.approx(-1 - sum(right) / 8)
    assert metrics["accuracy"].value == pytest.approx(sum(place == 0 for place in right) / 12)


@pytest.mark.parametrize("said", ["", "v00 v00", "<unk>"])
def test_an_answer_must_match_in_full(tokenizer, said):
    (item,) = documents("recall", seed=0, n=1, length=96)
    server = Answering(tokenizer.encode(f"{item['answer']} {said}" if " " in said else said).ids)
    metrics, _ = evaluate_tasks(server, tokenizer, {"recall@96": 1}, seed=0)
    assert metrics["accuracy"].value == 0


def test_hashes_name_items_across_runs(tokenizer):
    server = Answering(tokenizer.encode("v00").ids)
    _, few = evaluate_tasks(server, tokenizer, {"recall@96": 2}, seed=4)
    _, many = evaluate_tasks(server, tokenizer, {"needle@96": 1, "recall@96": 3}, seed=4)
    assert [item.doc_hash for item in few] == [item.doc_hash for item in many[1:3]]
    assert len({item.doc_hash for item in many}) == len({item.prompt_hash for item in many}) == 4
    _, other = evaluate_tasks(server, tokenizer, {"recall@96": 2}, seed=5)
    assert not {item.doc_hash for item in few} & {item.doc_hash for item in other}


def test_no_tasks_no_metrics(tokenizer):
    assert evaluate_tasks(Answering([]), tokenizer, {}, seed=0) == ({}, ())


def test_bad_input_is_refused_before_anything_is_asked(tokenizer):
    class Untouchable:
        pass

    with pytest.raises(UnknownNameError, match="did you mean 'recall'"):
        evaluate_tasks(Untouchable(), tokenizer, {"needle": 1, "recal": 1}, seed=0)
    with pytest.raises(InputError, match="items: got 0"):
        evaluate_tasks(Untouchable(), tokenizer, {"needle": 1, "recall": 0}, seed=0)
    with pytest.raises(InputError, match="length: got 9, expected at least"):
        evaluate_tasks(Untouchable(), tokenizer, {"local@9": 1}, seed=0)


def test_requests_the_protocol_cannot_serve(tokenizer):
    class Request:
        def __init__(self, *args):
            self.args = args

    lm = EngineLM(Answering([]), tokenizer)
    with pytest.raises(InputError, match=r"until: got 'v00 v01', expected a word of one token"):
        lm.generate_until([Request("<bos>", {"until": ["v00 v01"], "max_gen_toks": 1})])
    with pytest.raises(InputError, match="words that the tokenizer splits from the prompt"):
        lm.loglikelihood([Request("<bos> v00", "1 v02")])
    with pytest.raises(InputError, match="output_type: got 'loglikelihood_rolling'"):
        lm.loglikelihood_rolling([Request("<bos>")])


def test_scores_that_are_not_numbers_are_not_right(tokenizer):
    """A poisoned pool answers NaN, which argmax takes for the best choice."""
    metrics, items = evaluate_tasks(Answering([], scores=(math.nan,)), tokenizer, {"recall_choice@96": 8}, seed=0)
    assert metrics["accuracy"].value == 0
    assert "mean_loglikelihood" not in metrics
    assert {(item.correct, item.answer) for item in items} == {(False, "not finite")}
    half = Answering([], scores=(-1.0, -2.0, -3.0, -4.0) + (math.nan,) * 4)
    metrics, _ = evaluate_tasks(half, tokenizer, {"recall_choice@96": 8}, seed=0)
    assert metrics["mean_loglikelihood"].n == 4
