"""Seeded synthetic languages whose answers depend on exact KV addressing.

All share 256 words. A sentence ends with a question whose answer stands earlier
in the text, so one wrong KV row costs an answer:

recall   64 key-value pairs among filler; `? key` asks for its value.
needle   4 keys with 4 values each, all beyond the sliding window of the question; asks for the 4 values.
copy     a random segment of random period, repeated; the answer continues it for 16 words.
local    the same few keys bound anew in every block; asks for the latest value, which is inside the window.
sums     keys bound to numbers modulo 16 among filler; `? key key` asks for the sum of their numbers.
hop      keys bound to keys that are bound to values; `? key` asks for the key it leads to and that one's value.
template sentences of fixed words with slots for 4 keys and their values, in a fixed cycle: what a draft can foresee.

Everything is drawn through `RandomState.random_sample`, whose stream NumPy froze, so that a seed names the same
text on every machine.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from suite.errors import InputError, UnknownNameError

SPECIALS = (
    *("<pad>", "<unk>", "<bos>", ".", "?", "recall", "needle", "copy", "local"),
    *("sums", "hop", "template"),
)
RESERVED = tuple(f"<r{index}>" for index in range(16 - len(SPECIALS)))
WORDS_EACH = 80
WORDS = SPECIALS + RESERVED + tuple(f"{kind}{index:02d}" for kind in "kvf" for index in range(WORDS_EACH))
BOS, END, ASK = (WORDS.index(word) for word in ("<bos>", ".", "?"))
KEYS = 16
VALUES = KEYS + WORDS_EACH
FILLERS = VALUES + WORDS_EACH

WINDOW = 64  # the sliding window, in tokens, that needle places its answer beyond and local inside
MAX_PAIRS = 64  # recall: key-value pairs in a text of 512 tokens or more
NEEDLES, NEEDLE_VALUES = 4, 4
MAX_PERIOD = 200
MODULUS = 16  # sums: the numbers are the first value words
MAX_CHAINS = 32  # hop
SENTENCES, SENTENCE, TEMPLATE_KEYS = 8, 12, 4
SLOTS = (2, 6)  # where in a sentence a key stands, its value after it
LOCAL_KEYS, LOCAL_QUESTIONS = 14, 8  # 14 pairs and 8 questions are 60 tokens: inside the window

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """Token ids [rows, length], and which of them a model is asked to predict, bool [rows, length]."""

    ids: Ids
    graded: npt.NDArray[np.bool_]


def _permutations(rng: np.random.RandomState, rows: int, size: int) -> Ids:
    """[rows, size]: each row a permutation of range(size)."""
    return np.argsort(rng.random_sample((rows, size)), axis=1, kind="stable")


def _whole(rng: np.random.RandomState, shape: tuple[int, ...], below: int) -> Ids:
    """Whole numbers in [0, below)."""
    return (rng.random_sample(shape) * below).astype(np.int64)


def _opening(task: str, rows: int) -> Ids:
    return np.tile(np.array([BOS, WORDS.index(task)]), (rows, 1))


def _questions(asked: Ids, keys: Ids, values: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """`? key values .` for each asked column. asked: [rows, n]; keys: [rows, pairs]; values: [rows, pairs, width]."""
    rows, n = asked.shape
    width = values.shape[2]
    text = np.empty((rows, n, width + 3), dtype=np.int64)
    text[:, :, 0], text[:, :, -1] = ASK, END
    text[:, :, 1] = np.take_along_axis(keys, asked, axis=1)
    text[:, :, 2:-1] = np.take_along_axis(values, asked[:, :, None], axis=1)
    graded = np.zeros(text.shape, dtype=bool)
    graded[:, :, 2:] = True
    return text.reshape(rows, -1), graded.reshape(rows, -1)


def _scatter(rng: np.random.RandomState, items: Ids, length: int) -> Ids:
    """items [rows, n, width], in random order and at random places of `length` tokens of filler."""
    rows, n, width = items.shape
    body = FILLERS + _whole(rng, (rows, length), WORDS_EACH)
    order = _permutations(rng, rows, n + length - n * width)
    widths = np.where(order < n, width, 1)
    starts = np.cumsum(widths, axis=1) - widths
    row, slot = np.nonzero(order < n)
    places = starts[row, slot, None] + np.arange(width)
    body[row[:, None], places] = items[row, order[row, slot]]
    return body


def _bound_text(
    task: str, rng: np.random.RandomState, rows: int, length: int, questions: int, pairs: int, width: int, tail: int
) -> Text:
    """Pairs of a key and `width` values scattered in filler, the last `tail` tokens of it free of pairs; questions."""
    keys = KEYS + _permutations(rng, rows, WORDS_EACH)[:, :pairs]
    if width == 1:
        values = VALUES + _whole(rng, (rows, pairs, 1), WORDS_EACH)
    else:  # each value once, so that a value names its successor
        values = VALUES + _permutations(rng, rows, WORDS_EACH)[:, : pairs * width].reshape(rows, pairs, width)
    asked = _permutations(rng, rows, pairs)[:, :questions]
    asking, graded = _questions(asked, keys, values)
    room = length - 2 - asking.shape[1]
    _require_room(task, length, room - tail, pairs * (width + 1))
    body = _scatter(rng, np.concatenate((keys[:, :, None], values), axis=2), room - tail)
    rest = FILLERS + _whole(rng, (rows, tail), WORDS_EACH)
    ids = np.concatenate((_opening(task, rows), body, rest, asking), axis=1)
    return Text(ids, np.concatenate((np.zeros((rows, 2 + room), dtype=bool), graded), axis=1))


def recall(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """One pair for every 8 tokens, 64 at most."""
    return _bound_text("recall", rng, rows, length, questions, max(1, min(MAX_PAIRS, length // 8)), 1, 0)


def needle(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """Needles at any depth that is at least a window away from the first question, where the text is long enough."""
    tail = max(0, min(WINDOW, (length - 2 - questions * 7) - 2 * NEEDLES * (NEEDLE_VALUES + 1)))
    return _bound_text("needle", rng, rows, length, questions, NEEDLES, NEEDLE_VALUES, tail)


def copy(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """A segment of 4 to 200 distinct words, half the text at most, repeated to the end. `questions` has no meaning."""
    longest = min(MAX_PERIOD, (length - 2) // 2)
    _require_room("copy", length, longest, 4)
    periods = 4 + _whole(rng, (rows, 1), longest - 3)
    words = KEYS + _permutations(rng, rows, 3 * WORDS_EACH)
    place = np.arange(length - 2)[None]
    ids = np.concatenate((_opening("copy", rows), np.take_along_axis(words, place % periods, axis=1)), axis=1)
    return Text(ids, np.concatenate((np.zeros((rows, 2), dtype=bool), place >= periods), axis=1))


def local(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """Blocks of 14 fresh bindings of the same keys and 8 questions on them; the last block asks `questions`."""
    keys = KEYS + _permutations(rng, rows, WORDS_EACH)[:, :LOCAL_KEYS]
    last, full = 2 * LOCAL_KEYS + 4 * questions, 2 * LOCAL_KEYS + 4 * LOCAL_QUESTIONS
    _require_room("local", length, length - 2, last)
    blocks, filler = divmod(length - 2 - last, full)
    ids = [_opening("local", rows), FILLERS + _whole(rng, (rows, filler), WORDS_EACH)]
    graded = [np.zeros((rows, 2 + filler), dtype=bool)]
    for count in [LOCAL_QUESTIONS] * blocks + [questions]:
        bound = np.take_along_axis(keys, _permutations(rng, rows, LOCAL_KEYS), axis=1)
        values = VALUES + _whole(rng, (rows, LOCAL_KEYS, 1), WORDS_EACH)
        asked = _permutations(rng, rows, LOCAL_KEYS)[:, :count]
        asking, asking_graded = _questions(asked, bound, values)
        ids += [np.concatenate((bound[:, :, None], values), axis=2).reshape(rows, -1), asking]
        graded += [np.zeros((rows, 2 * LOCAL_KEYS), dtype=bool), asking_graded]
    return Text(np.concatenate(ids, axis=1), np.concatenate(graded, axis=1))


def sums(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """One number for every 8 tokens, 64 at most; no key is asked for twice."""
    pairs = max(2 * questions, min(MAX_PAIRS, length // 8))
    keys = KEYS + _permutations(rng, rows, WORDS_EACH)[:, :pairs]
    numbers = _whole(rng, (rows, pairs), MODULUS)
    asked = _permutations(rng, rows, pairs)[:, : 2 * questions]
    both = np.take_along_axis(numbers, asked, axis=1).reshape(rows, questions, 2).sum(2) % MODULUS
    text = np.empty((rows, questions, 5), dtype=np.int64)
    text[:, :, 0], text[:, :, -1] = ASK, END
    text[:, :, 1:3] = np.take_along_axis(keys, asked, axis=1).reshape(rows, questions, 2)
    text[:, :, 3] = VALUES + both
    items = np.stack((keys, VALUES + numbers), axis=2)
    return _asked_text("sums", rng, items, text, graded_from=3, length=length)


def hop(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """One chain of two bindings for every 16 tokens, 32 at most."""
    chains = max(questions, min(MAX_CHAINS, length // 16))
    keys = KEYS + _permutations(rng, rows, WORDS_EACH)[:, : 2 * chains].reshape(rows, chains, 2)
    values = VALUES + _whole(rng, (rows, chains), WORDS_EACH)
    asked = _permutations(rng, rows, chains)[:, :questions]
    text = np.empty((rows, questions, 5), dtype=np.int64)
    text[:, :, 0], text[:, :, -1] = ASK, END
    text[:, :, 1:3] = np.take_along_axis(keys, asked[:, :, None], axis=1)
    text[:, :, 3] = np.take_along_axis(values, asked, axis=1)
    items = np.concatenate((keys, np.stack((keys[:, :, 1], values), axis=2)), axis=1)
    return _asked_text("hop", rng, items, text, graded_from=2, length=length)


def _asked_text(
    task: str, rng: np.random.RandomState, items: Ids, questions: Ids, *, graded_from: int, length: int
) -> Text:
    """items [rows, n, 2] scattered in filler, then questions [rows, count, width], graded from a column on."""
    rows, room = len(items), length - 2 - questions[0].size
    _require_room(task, length, room, items[0].size)
    graded = np.zeros(questions.shape, dtype=bool)
    graded[:, :, graded_from:] = True
    ids = np.concatenate((_opening(task, rows), _scatter(rng, items, room), questions.reshape(rows, -1)), axis=1)
    return Text(ids, np.concatenate((np.zeros((rows, 2 + room), dtype=bool), graded.reshape(rows, -1)), axis=1))


def _sentences() -> Ids:
    """The fixed words of every sentence, [sentences, words]; the first names the sentence. Slots hold a key's index."""
    rng = np.random.RandomState(20)
    text = FILLERS + _whole(rng, (SENTENCES, SENTENCE), WORDS_EACH)
    text[:, 0] = FILLERS + _permutations(rng, 1, WORDS_EACH)[0, :SENTENCES]
    text[:, SLOTS] = _permutations(rng, SENTENCES, TEMPLATE_KEYS)[:, : len(SLOTS)]
    text[:, -1] = END
    return text


def template(rng: np.random.RandomState, rows: int, length: int, questions: int) -> Text:
    """4 bindings, then the cycle of sentences from a random one on. `questions` has no meaning."""
    keys = KEYS + _permutations(rng, rows, WORDS_EACH)[:, :TEMPLATE_KEYS]
    values = VALUES + _whole(rng, (rows, TEMPLATE_KEYS), WORDS_EACH)
    head = np.concatenate((_opening("template", rows), np.stack((keys, values), axis=2).reshape(rows, -1)), axis=1)
    _require_room("template", length, length - head.shape[1], SENTENCE)
    count = -(-(length - head.shape[1]) // SENTENCE)
    said = (_whole(rng, (rows, 1), SENTENCES) + np.arange(count)) % SENTENCES
    body = _sentences()[said]  # [rows, count, words]
    for slot in SLOTS:
        which = body[:, :, slot].copy()
        body[:, :, slot] = np.take_along_axis(keys, which, axis=1)
        body[:, :, slot + 1] = np.take_along_axis(values, which, axis=1)
    ids = np.concatenate((head, body.reshape(rows, -1)), axis=1)[:, :length]
    return Text(ids, np.broadcast_to(np.arange(length) > head.shape[1], ids.shape).copy())


@dataclass(frozen=True)
class Language:
    """`text(rng, rows, length, questions)` draws texts; an answer has `answer_tokens` words.

    `ended`: whether the answer is followed by the end word.
    """

    text: Callable[[np.random.RandomState, int, int, int], Text]
    answer_tokens: int
    ended: bool
    max_questions: int


LANGUAGES: dict[str, Language] = {
    "recall": Language(recall, 1, True, MAX_PAIRS),
    "needle": Language(needle, NEEDLE_VALUES, True, NEEDLES),
    "copy": Language(copy, 16, False, 1),
    "local": Language(local, 1, True, LOCAL_QUESTIONS),
    "sums": Language(sums, 1, True, MAX_PAIRS // 2),
    "hop": Language(hop, 2, True, MAX_CHAINS),
    "template": Language(template, 2 * SENTENCE, False, 1),
}


def language(name: str) -> Language:
    """The language of that name. Raises UnknownNameError."""
    if name not in LANGUAGES:
        raise UnknownNameError("language", name, LANGUAGES)
    return LANGUAGES[name]


def question(name: str, seed: int, index: int, length: int) -> tuple[list[int], list[int]]:
    """Question number `index` of a seed: the ids of the prompt, exactly `length`, and those of its answer.

    Depends on its arguments only, so the first n questions of a seed are the same whatever n is. Raises
    UnknownNameError for the language and InputError for a length that does not hold its text.
    """
    spoken = language(name)
    if length < 1:
        raise InputError("length", length, "a positive number of tokens")
    digest = hashlib.sha256(f"{name}/{seed}/{index}/{length}".encode()).digest()
    rng = np.random.RandomState(np.frombuffer(digest, dtype="<u4"))
    asked = 1 + int(_whole(rng, (1,), spoken.max_questions)[0]) if name == "local" else 1
    after = spoken.answer_tokens + spoken.ended
    try:
        ids = spoken.text(rng, 1, length + after, asked).ids[0].tolist()
    except InputError as error:
        raise InputError("length", length, f"{error.expected}, the {after} after the prompt included") from None
    return ids[:length], ids[length : length + spoken.answer_tokens]


def _require_room(name: str, length: int, room: int, need: int) -> None:
    if room < need:
        raise InputError("length", length, f"at least {length + need - room} tokens for the language {name}")
