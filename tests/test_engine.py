"""Greedy tokens and logits do not depend on how the engine got there; a wrong row does change them."""

import random

import pytest
import torch

from suite.e2e.engine.memory import RequestMemory
from suite.e2e.engine.requests import Request
from suite.e2e.engine.runner import NonFiniteLogitsError
from suite.e2e.engine.scheduler import Scheduler
from suite.e2e.faults.planting import planting
from suite.errors import InputError, RefusedError, UnknownNameError
from suite.kernels.ids import KVKind
from suite.kernels.pools.unified import UnifiedPool
from suite.kernels.translator import KVIndexTranslator
from tests import tiny

NEW_TOKENS = 12
FAULTS = (
    "move_copies_nothing",
    "read_forgets_multiplier",
    "read_skips_translation",
    "read_translates_twice",
    "window_reads_full_map",
    "window_write_uses_full_ids",
    "write_skips_translation",
)


def requests(count: int = 6) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            prompt=[rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(3, 60))],
            max_new_tokens=NEW_TOKENS,
            keep_logits=True,
        )
        for _ in range(count)
    ]


def served(pool: str, *, plants: tuple[str, ...] = (), **changes) -> tuple[list[list[int]], torch.Tensor, object]:
    work = requests()
    with planting(plants):
        engine = tiny.engine(pool, **changes)
        engine.run(work)
    return [r.output for r in work], torch.stack([row for r in work for row in r.logits]), engine


@pytest.fixture(scope="module")
def static():
    return served("static")


def test_outputs_are_whole_and_varied(static):
    tokens, logits, _ = static
    assert all(len(output) == NEW_TOKENS for output in tokens)
    assert len({tuple(output) for output in tokens}) == len(tokens)
    assert logits.shape == (6 * NEW_TOKENS, tiny.VOCAB)


@pytest.mark.parametrize("change", [{}, {"graph": False}, {"poison": True}, {"seed": 11}])
@pytest.mark.parametrize("pool", ["unified", "unified_token_major"])
def test_unified_is_bit_identical_with_most_pages_moved(static, pool, change):
    tokens, logits, engine = served(pool, **change)
    assert torch.equal(logits, static[1])
    assert tokens == static[0]
    assert engine.churn.moved_share >= 0.5
    assert engine.allocator.live_pages(KVKind.FULL) == 0


@pytest.mark.parametrize(
    "change",
    [{"max_batch": 1}, {"chunk_tokens": 100}, {"chunk_tokens": 1}, {"page_size": 1}, {"page_size": 16}],
)
@pytest.mark.parametrize("pool", ["static", "unified", "unified_token_major"])
def test_greedy_tokens_do_not_depend_on_the_schedule(static, pool, change):
    assert served(pool, **change)[0] == static[0]


def test_fa3_metadata_gives_the_same_answers(static):
    for pool in ("static", "unified", "unified_token_major"):
        tokens, logits, _ = served(pool, backend="fa3")
        assert tokens == static[0]
        assert torch.equal(logits, static[1])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("backend", "graph"), [("reference", True), ("fa3", True), ("fa3", False)])
def test_every_planted_fault_is_seen(static, fault, backend, graph):
    _, logits, _ = served("unified", plants=(fault,), backend=backend, graph=graph)
    assert (logits - static[1]).abs().max() > 1.0


@pytest.mark.parametrize("kind", list(KVKind))
def test_a_wrong_multiplier_is_seen(static, monkeypatch, kind):
    """One full layer and two window layers: multipliers 2 and 4. A smaller one stays in range and mixes layers."""
    own = KVIndexTranslator.read_map
    other = {KVKind.FULL: 1, KVKind.WINDOW: 2}

    def wrong(self, asked):
        page_map, multiplier = own(self, asked)
        return page_map, other[kind] if asked is kind else multiplier

    monkeypatch.setattr(KVIndexTranslator, "read_map", wrong)
    assert (served("unified")[1] - static[1]).abs().max() > 1.0


def test_pages_that_are_not_cleared_are_seen_by_poison(monkeypatch):
    """Zeroing only matters where a kernel multiplies masked rows by 0; the poison itself must reach the pool."""
    monkeypatch.setattr(UnifiedPool, "zero_pages", lambda *_: None)
    engine = tiny.engine("unified", poison=True)
    page = engine.allocator.alloc(1)[0]
    at = int(engine.allocator.page_map(KVKind.FULL)[page]) * engine.allocator.pool.page_multiplier(KVKind.FULL)
    assert engine.allocator.pool.k_view(1)[at * 4].isnan().all()


def test_what_was_planted_leaves_nothing_behind(static):
    served("unified", plants=("read_skips_translation",))
    assert torch.equal(served("unified")[1], static[1])
    with pytest.raises(UnknownNameError, match="did you mean 'read_skips_translation'"):
        served("unified", plants=("read_skips_translatoin",))


def test_score_equals_the_generated_logits(static):
    work = requests()
    engine = tiny.engine("unified")
    scores = engine.score([r.prompt for r in work], static[0])
    rows = static[1].log_softmax(-1).view(len(work), NEW_TOKENS, -1)
    for (total, greedy), output, row in zip(scores, static[0], rows, strict=True):
        want = sum(float(row[i, token]) for i, token in enumerate(output))
        assert greedy
        assert total == pytest.approx(want, rel=1e-5)
    changed = [[(token + 1) % tiny.VOCAB for token in output] for output in static[0]]
    assert not any(greedy for _, greedy in engine.score([r.prompt for r in work], changed))


def test_generate_stops_without_keeping_the_stop_token(static):
    prompt, output = requests()[0].prompt, static[0][0]
    stop = output[4]
    got = tiny.engine("unified").generate([prompt], [NEW_TOKENS], [(stop,)])
    assert got == [output[: output.index(stop)]]


def test_window_pages_leave_and_full_pages_stay():
    engine = tiny.engine("unified", max_batch=1)
    seen = []
    original = engine._run_step

    def watch(step):
        seen.append((step.seq_lens[0], engine.allocator.bytes_in_use()))
        original(step)

    engine._run_step = watch
    engine.churn.ballast = 0
    engine.run([Request(prompt=list(range(40)), max_new_tokens=20)])
    longest, in_use = seen[-1]
    full, window = engine.allocator.pool.geometry.pools
    assert in_use[KVKind.FULL] == -(-longest // 4) * full.page_bytes("unified")
    assert in_use[KVKind.WINDOW] <= (tiny.WINDOW // 4 + 1) * window.page_bytes("unified")


def test_nan_in_a_read_row_stops_the_run():
    engine = tiny.engine("unified", poison=True)
    with planting(["read_skips_translation"]), pytest.raises(NonFiniteLogitsError, match="rows are not finite"):
        engine.run(requests())


def test_identity_map_is_reported_as_unmoved():
    engine = tiny.engine("unified")
    engine.run(requests(2), churn=False)
    assert engine.churn.moved_share == 0.0  # nothing was observed: the run is void


def test_bad_requests_are_refused():
    engine = tiny.engine("unified")
    with pytest.raises(InputError, match="prompt: got"):
        Request(prompt=[], max_new_tokens=1)
    with pytest.raises(InputError, match="max_new_tokens: got -1"):
        Request(prompt=[1], max_new_tokens=-1)
    with pytest.raises(InputError, match=r"prompt_tokens \+ max_new_tokens: got 1\d\d, expected at most 96"):
        engine.run([Request(prompt=[1] * 90, max_new_tokens=50)])
    with pytest.raises(InputError, match="max_context: got 5000, expected at most 4096"):
        tiny.engine("unified", max_context=5000)
    with pytest.raises(InputError, match="page_size: got 0"):
        tiny.engine("unified", page_size=0)


def test_a_backend_that_cannot_serve_refuses_before_allocation():
    with pytest.raises(RefusedError, match="fa3"):
        tiny.engine("unified", backend="fa3", page_size=3)
    with pytest.raises(UnknownNameError, match="did you mean 'triton'"):
        tiny.engine("unified", backend="tritn")


@pytest.mark.parametrize("pool", ["static", "unified"])
def test_a_request_that_no_empty_pool_could_hold_is_refused_and_does_not_wait_forever(pool):
    allocator = tiny.allocator(pool, tiny.geometry())
    room = allocator.most_pages() * allocator.page_size
    table = torch.zeros(2, 4 * room, dtype=torch.int32)
    scheduler = Scheduler(RequestMemory(allocator, table, chunk_tokens=4 * room), max_batch=1, chunk_tokens=4 * room)
    with pytest.raises(InputError, match=rf"got {room + 1}, expected at most {room}, what the pool holds"):
        scheduler.add(Request(prompt=[1] * room, max_new_tokens=2))
    scheduler.add(Request(prompt=[1] * room, max_new_tokens=1))
    assert sum(scheduler.next_step().query_lens) == room
