"""The synthetic languages: every answer stands in its prompt, where the language promises."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import InputError, UnknownNameError
from suite.models.languages import ASK, BOS, END, FILLERS, KEYS, LANGUAGES, VALUES, WINDOW, WORDS, question

ASKING = ("recall", "needle", "local")
lengths = st.integers(96, 700)
seeds = st.integers(0, 10_000)


def is_key(word: int) -> bool:
    return KEYS <= word < VALUES


def is_value(word: int) -> bool:
    return VALUES <= word < FILLERS


def bindings(prompt: list[int], key: int) -> list[int]:
    """Places of the bindings of `key`: where it stands, but not as a question."""
    return [at for at, word in enumerate(prompt[:-2]) if word == key and prompt[at - 1] != ASK]


def test_vocabulary():
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(word.split() == [word] for word in WORDS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(LANGUAGES)), seeds, lengths)
def test_prompt_has_exactly_the_length_and_the_seed_fixes_it(name, seed, length):
    prompt, answer = question(name, seed, 3, length)
    assert len(prompt) == length
    assert len(answer) == LANGUAGES[name].answer_tokens
    assert prompt[:2] == [BOS, WORDS.index(name)]
    assert (prompt, answer) == question(name, seed, 3, length)
    assert (prompt, answer) != question(name, seed + 1, 3, length)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ASKING), seeds, lengths)
def test_answer_is_the_latest_binding_of_the_asked_key(name, seed, length):
    prompt, answer = question(name, seed, 0, length)
    ask, key = prompt[-2:]
    assert ask == ASK
    assert is_key(key)
    places = bindings(prompt, key)
    assert len(places) == 1 or name == "local"
    assert prompt[places[-1] + 1 : places[-1] + 1 + len(answer)] == answer
    assert all(map(is_value, answer))


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(160, 700))
def test_needle_is_beyond_the_window_at_any_depth(seed, length):
    prompt, answer = question("needle", seed, 0, length)
    last_value = bindings(prompt, prompt[-1])[0] + len(answer)
    # the key at length-1 sees the last WINDOW positions, itself included
    assert last_value <= length - 1 - WINDOW


def test_needle_depths_cover_the_text():
    depths = []
    for index in range(100):
        prompt, _ = question("needle", 0, index, 512)
        depths.append(bindings(prompt, prompt[-1])[0])
    assert min(depths) < 50
    assert max(depths) > 512 - WINDOW - 60


@settings(max_examples=40, deadline=None)
@given(seeds, lengths)
def test_local_answer_is_inside_the_window(seed, length):
    prompt, _ = question("local", seed, 0, length)
    assert bindings(prompt, prompt[-1])[-1] > length - 1 - WINDOW


def test_local_keys_are_bound_before_too():
    """Else a full layer could answer without knowing which binding is the latest."""
    prompt, answer = question("local", 0, 0, 512)
    places = bindings(prompt, prompt[-1])
    assert len(places) >= 8
    assert {prompt[at + 1] for at in places} > set(answer)


def test_recall_has_64_pairs_at_512():
    prompt, _ = question("recall", 0, 0, 512)
    assert sum(map(is_key, prompt[:-2])) == 64 == sum(map(is_value, prompt[:-2]))


def test_copy_continues_a_random_period():
    periods = set()
    for index in range(50):
        prompt, answer = question("copy", 0, index, 512)
        whole = (prompt + answer)[2:]
        (period,) = [p for p in range(4, 201) if whole[p:] == whole[:-p]][:1]
        assert len(set(whole[:period])) == period  # each word once, so a word names its successor
        periods.add(period)
    assert len(periods) > 30
    assert max(periods) > 2 * WINDOW


def test_graded_words_of_a_training_text_are_the_answers():
    rng = np.random.RandomState(0)
    text = LANGUAGES["recall"].text(rng, 4, 128, 8)
    assert text.ids.shape == text.graded.shape == (4, 128)
    assert text.graded.sum() == 4 * 8 * 2
    for row, graded in zip(text.ids, text.graded, strict=True):
        words = row[graded]
        assert all(map(is_value, words[::2]))
        assert set(words[1::2]) == {END}


def test_texts_are_the_same_on_every_machine():
    """Frozen: rows in old databases are joined to new ones by the hash of these texts."""
    older, newer = ("copy", "local", "needle", "recall"), ("hop", "sums", "template")
    for names, frozen in ((older, "640c71ab4bf4cb86"), (newer, "7cba84807eaf3fad")):
        texts = [question(name, 7, index, 200) for name in names for index in range(3)]
        assert hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16] == frozen


def test_bad_input():
    with pytest.raises(UnknownNameError, match=r"language: got 'recal'.*did you mean 'recall'"):
        question("recal", 0, 0, 512)
    for length in (0, -5):
        with pytest.raises(InputError, match=f"length: got {length}, expected a positive"):
            question("recall", 0, 0, length)
    for name, length in (("needle", 20), ("local", 20)):
        with pytest.raises(
            InputError, match=rf"length: got {length}, expected at least \d+ tokens for the language {name}"
        ):
            question(name, 0, 0, length)


@settings(max_examples=40, deadline=None)
@given(seeds, lengths)
def test_sums_asks_for_the_sum_of_two_bound_numbers(seed, length):
    prompt, answer = question("sums", seed, 0, length)
    ask, *keys = prompt[-3:]
    assert ask == ASK
    assert len(set(keys)) == 2
    numbers = []
    for key in keys:
        (place,) = [at for at, word in enumerate(prompt[:-3]) if word == key]
        numbers.append(prompt[place + 1] - VALUES)
    assert all(0 <= number < 16 for number in numbers)
    assert answer == [VALUES + sum(numbers) % 16]


@settings(max_examples=40, deadline=None)
@given(seeds, lengths)
def test_hop_leads_to_a_key_and_that_to_its_value(seed, length):
    prompt, answer = question("hop", seed, 0, length)
    assert prompt[-2] == ASK
    follows = {}
    for at, word in enumerate(prompt[2:-2], 2):
        if is_key(word) and not (
            is_key(prompt[at - 1]) and prompt[at - 1] in follows and follows[prompt[at - 1]] == word
        ):
            follows[word] = prompt[at + 1]
    middle = follows[prompt[-1]]
    assert is_key(middle)
    assert answer == [middle, follows[middle]]
    assert is_value(answer[1])


@settings(max_examples=40, deadline=None)
@given(seeds, lengths)
def test_template_repeats_its_cycle_and_its_bindings(seed, length):
    prompt, answer = question("template", seed, 0, length)
    bound = dict(zip(prompt[2:10:2], prompt[3:10:2], strict=True))
    assert len(bound) == 4
    text = prompt + answer
    for at, word in enumerate(text[10:-1], 10):
        if is_key(word):
            assert text[at + 1] == bound[word]
    body = text[10:]
    cycle = 8 * 12
    assert all(body[at] == body[at - cycle] for at in range(cycle, len(body)))


def test_template_texts_differ_in_bindings_and_in_where_the_cycle_starts():
    heads = {tuple(question("template", 0, index, 96)[0][2:10]) for index in range(20)}
    starts = {question("template", 0, index, 96)[0][10] for index in range(60)}
    assert len(heads) == 20
    assert len(starts) == 8


def test_older_languages_kept_their_words():
    assert WORDS[:9] == ("<pad>", "<unk>", "<bos>", ".", "?", "recall", "needle", "copy", "local")
    assert (WORDS[KEYS], WORDS[VALUES]) == ("k00", "v00")
