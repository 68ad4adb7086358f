"""Accuracy tasks: YAML, documents, JSONL."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.e2e.accuracy.documents import documents, read_jsonl, workload_prompts, write_jsonl
from suite.e2e.accuracy.task import TASKS, load_task, parse_task, task_names
from suite.errors import InputError, UnknownNameError
from suite.models.registry import resolve_model
from suite.models.tokenizer import load_tokenizer
from suite.records import content_hash


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("gpt-oss-mini"))


def test_both_output_types_are_there():
    kinds = {name: load_task(name).settings["output_type"] for name in task_names()}
    assert kinds["recall"] == kinds["needle"] == kinds["copy"] == kinds["local"] == "generate_until"
    assert kinds["recall_choice"] == "multiple_choice"


@pytest.mark.parametrize("name", task_names())
def test_prompts_are_exactly_512_tokens(name, tokenizer):
    for item in load_task(name).documents(seed=0, n=3):
        ids = tokenizer.encode(item["prompt"]).ids
        assert len(ids) == 512
        assert tokenizer.token_to_id("<unk>") not in ids
        assert tokenizer.decode(ids) == item["prompt"]


def test_length_after_the_name(tokenizer):
    task = load_task("recall@128")
    assert (task.name, task.settings["task"], task.length) == ("recall@128", "recall@128", 128)
    (item,) = task.documents(seed=0, n=1)
    assert len(tokenizer.encode(item["prompt"]).ids) == 128


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(task_names()), st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4))
def test_an_item_does_not_depend_on_how_many_are_asked(name, seed, few, more):
    task = load_task(f"{name}@160")
    asked = task.documents(seed=seed, n=few + more)
    assert task.documents(seed=seed, n=few) == asked[:few]
    assert len({content_hash(item) for item in asked}) == few + more


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_choices_are_four_values_of_the_text_with_the_right_one_among_them(seed):
    (item,) = load_task("recall_choice").documents(seed=seed, n=1)
    assert len(set(item["choices"])) == 4
    assert item["answer"] in item["choices"]
    assert set(item["choices"]) <= set(item["prompt"].split())


def test_right_choice_stands_at_every_place():
    items = load_task("recall_choice").documents(seed=0, n=60)
    assert {item["choices"].index(item["answer"]) for item in items} == {0, 1, 2, 3}


def test_jsonl_round_trip_and_hashes(tmp_path):
    items = documents("needle", seed=3, n=5, length=160)
    path = tmp_path / "needle.jsonl"
    write_jsonl(path, items)
    assert read_jsonl(path) == items
    assert [json.loads(line)["hash"] for line in path.read_text().splitlines()] == [
        content_hash(item) for item in items
    ]


def test_jsonl_that_was_edited_is_refused(tmp_path):
    path = tmp_path / "recall.jsonl"
    write_jsonl(path, documents("recall", seed=3, n=3, length=96))
    lines = path.read_text().splitlines()
    for bad, message in (
        (lines[1].replace('"answer": "v', '"answer": "f'), "the hash of this line's content"),
        ("{", "a JSON object"),
        ("{}", "an object with hash, prompt and answer"),
    ):
        path.write_text("\n".join([lines[0], bad, lines[2]]))
        with pytest.raises(InputError, match=rf"{path}:2: got .*{message}"):
            read_jsonl(path)


def test_unusable_paths(tmp_path):
    with pytest.raises(InputError, match=r"path: got .*absent.*, expected a writable file"):
        write_jsonl(tmp_path / "absent" / "x.jsonl", [])
    with pytest.raises(InputError, match=r"path: got .*, expected a readable JSONL file"):
        read_jsonl(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("name", ["recal", "", "recal@128", "../recall"])
def test_unknown_task(name):
    with pytest.raises(UnknownNameError, match="task: got"):
        load_task(name)


@pytest.mark.parametrize("name", ["recall@", "recall@0", "recall@-3", "recall@x", "recall@1.5"])
def test_bad_length_in_the_name(name):
    with pytest.raises(InputError, match=f"task: got '{name}', expected recall@LENGTH"):
        load_task(name)


@pytest.mark.parametrize("n", [0, -1])
def test_no_questions(n):
    with pytest.raises(InputError, match=f"items: got {n}, expected a positive number"):
        load_task("recall").documents(seed=0, n=n)


def test_more_choices_than_values():
    with pytest.raises(InputError, match=r"choices: got 90, expected at most \d+ values"):
        documents("recall", seed=0, n=1, length=512, choices=90)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("generator", None, "x: generator: got None"),
        ("generator.language", "recal", "language: got 'recal'"),
        ("generator.language", ..., "x: generator.language: got 'nothing'"),
        ("generator.length", -1, "x: generator.length: got -1"),
        ("generator.length", "512", "x: generator.length: got '512'"),
        ("generator.lenght", 512, "x: generator.lenght: got 512"),
        ("metric_list", ..., "x: metric_list: got 'nothing'"),
    ],
)
def test_bad_task_file(field, value, message):
    settings_ = yaml.safe_load((TASKS / "recall.yaml").read_text())
    *parents, name = field.split(".")
    into = settings_[parents[0]] if parents else settings_
    if value is ...:
        del into[name]
    else:
        into[name] = value
    with pytest.raises(InputError) as caught:
        parse_task(yaml.safe_dump(settings_), "x")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_task_file_that_is_no_mapping(text):
    with pytest.raises(InputError, match="x: got"):
        parse_task(text, "x")


@pytest.mark.parametrize("tokens", [1, 24, 100, 2048])
def test_workload_prompts(tokenizer, tokens):
    prompts = workload_prompts(tokenizer, 3, tokens, seed=5)
    assert [len(prompt) for prompt in prompts] == [tokens] * 3
    assert prompts == workload_prompts(tokenizer, 3, tokens, seed=5)
    if tokens > 2:
        assert len({tuple(prompt) for prompt in prompts}) == 3
    with pytest.raises(InputError, match="requests: got 0"):
        workload_prompts(tokenizer, 0, tokens, seed=5)
