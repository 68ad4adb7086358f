"""Speculation faults: a draft that reads, writes or counts wrong. The target's verify hides most of them from answers.

The draft model is the target itself, so with right addresses every draft is right and the accept length is at its
cap; a scripted draft has a known pattern, so that the counts can be told from the truth.
"""

from dataclasses import replace
from typing import Any

import torch

from suite.e2e.faults.detection.serving import serving
from suite.e2e.faults.fault import plants
from suite.kernels.batch import ForwardMode
from suite.kernels.ids import KVKind, require_virtual

LOGITS, NAN = "judge.logits_differ", "engine.not_finite"
FLOOR, LOSS, ANSWERS = "gate.accept_floor", "gate.accept_loss", "engine.drafts_change_answers"
COUNTS, ON_SCRIPT = "engine.accept_counts", "engine.script_differs"
TRANSLATOR = "suite.kernels.translator:KVIndexTranslator"
SCRIPTED = serving(speculation_of="scripted")
# without poison: a draft that reads rows nobody wrote would otherwise end its run at once
PRIVATE = serving(speculation_of="model", poison=False)
FUSED = serving(speculation_of="model", fused_draft=True, poison=False)


def is_fused(translator: Any) -> bool:
    return translator.pool is translator.allocator.pool.draft


def is_private(translator: Any) -> bool:
    return not translator.owns_ids


@plants("speculation", f"{TRANSLATOR}.read_map", FUSED, FLOOR, LOSS, source="B03", smoke=True)
def fused_draft_reads_untranslated(own: Any) -> Any:
    """the draft behind the target's rows reads them by virtual ids"""
    return lambda self, kind: (None, 1) if is_fused(self) else own(self, kind)


@plants("speculation", f"{TRANSLATOR}._translate", FUSED, FLOOR, LOSS, LOGITS, source="U21")
def fused_draft_writes_untranslated(own: Any) -> Any:
    """the draft behind the target's rows stores its own by virtual ids"""
    return lambda self, ids, kind, where: require_virtual(ids, where) if is_fused(self) else own(self, ids, kind, where)


@plants("speculation", f"{TRANSLATOR}.read_map", FUSED, FLOOR, LOSS, source="U7")
def fused_draft_forgets_its_host(own: Any) -> Any:
    """the draft steps by its own layers, not by those of the pages that it shares"""
    return lambda self, kind: (own(self, kind)[0], 2) if is_fused(self) else own(self, kind)


@plants("speculation", f"{TRANSLATOR}.read_map", PRIVATE, FLOOR, LOSS, "attention.crash", source="U20")
def private_draft_reads_the_targets_table(own: Any) -> Any:
    """a draft with a pool of its own reads it through the target's page map"""
    return lambda self, kind: (self.allocator.page_map(kind), 1) if is_private(self) else own(self, kind)


@plants("speculation", f"{TRANSLATOR}.read_map", FUSED, FLOOR, LOSS, source="B15")
def draft_window_reads_full_map(own: Any) -> Any:
    """the draft's window layers are laid out like full ones"""
    return lambda self, kind: own(self, KVKind.FULL) if is_fused(self) else own(self, kind)


@plants(
    "speculation",
    "suite.kernels.pools.unified:FusedPool.page_multiplier",
    FUSED,
    FLOOR,
    LOSS,
    LOGITS,
    "attention.crash",
)
def draft_layout_of_a_private_pool(own: Any) -> Any:
    """a fused draft takes its pages for pages of its own layers"""
    return lambda self, kind: self.geometry.blocks_per_page(kind)


@plants("speculation", f"{TRANSLATOR}.fill_read_stream", SCRIPTED, LOGITS, ANSWERS, source="U22", severity=3)
def verify_reads_no_drafts(own: Any) -> Any:
    """a verify's tables end where the prefix does: the drafts' own rows are read from the sink"""

    def short(self: Any, batch: Any, kind: KVKind, starts: Any, indptr: Any, out: torch.Tensor) -> None:
        own(self, batch, kind, starts, indptr, out)
        if batch.mode is ForwardMode.VERIFY:
            for end in indptr[1:].tolist():
                out[end - batch.query_lens_host[0] + 1 : end] = 0

    return short


@plants("speculation", "suite.e2e.engine.memory:RequestMemory.missing_pages", SCRIPTED, LOGITS, ANSWERS, source="B17")
def no_pages_for_drafts(own: Any) -> Any:
    """pages are taken for the newest token and none for the drafts behind it"""
    return lambda self, request, tokens: own(self, request, min(tokens, len(request.tokens)))


@plants("speculation", "suite.e2e.engine.memory:RequestMemory.place", SCRIPTED, LOGITS, ANSWERS, source="B17")
def drafts_stored_in_the_first_page(own: Any) -> Any:
    """drafts that cross a page end are stored from the request's first page on, which others may share"""

    def wrapped(self: Any, requests: Any, query_lens: Any) -> Any:
        ids, written = own(self, requests, query_lens)
        if query_lens[0] == 1 or len(set(query_lens)) > 1:
            return ids, written
        at = 0
        for request, length in zip(requests, query_lens, strict=True):
            for place in range(1, length):
                if (request.computed + place) % self.page_size == 0:
                    ids.tensor[at + place] = request.pages[0] * self.page_size
                    self.req_to_token[request.row, request.computed + place] = request.pages[0] * self.page_size
            at += length
        return ids, written

    return wrapped


@plants(
    "speculation",
    "suite.e2e.engine.scheduler:Scheduler.finish",
    SCRIPTED,
    "batch.bad_input",
    LOGITS,
    ANSWERS,
    source="B19",
)
def rejected_drafts_count_as_stored(own: Any) -> Any:
    """after a verify all its tokens count as stored, accepted or not"""
    return lambda self, step, stored=None: own(self, step, None)


@plants("speculation", "suite.e2e.engine.speculative:accept_by_match", SCRIPTED, ANSWERS, LOGITS)
def one_draft_too_many_accepted(own: Any) -> Any:
    """the first draft that the target would not have said is kept"""

    def generous(drafts: Any, targets: Any) -> list[int]:
        kept = own(drafts, targets)
        return [*kept[:-1], drafts[len(kept) - 1], *kept[-1:]] if len(kept) <= len(drafts) else kept

    return generous


@plants("speculation", "suite.e2e.engine.speculative:accept_by_match", SCRIPTED, ON_SCRIPT, LOSS)
def last_accepted_draft_thrown_away(own: Any) -> Any:
    """of several accepted drafts the last is computed again"""
    return lambda drafts, targets: own(drafts, targets)[:2]


@plants("speculation", "suite.e2e.engine.speculative:accept_by_match", SCRIPTED, ANSWERS, LOGITS)
def bonus_token_taken_from_the_draft(own: Any) -> Any:
    """the token behind the accepted drafts is the next draft, not the target's"""

    def drafted(drafts: Any, targets: Any) -> list[int]:
        kept = own(drafts, targets)
        return [*kept[:-1], drafts[len(kept) - 1]] if len(kept) <= len(drafts) else kept

    return drafted


@plants("speculation", "suite.e2e.engine.requests:DraftCounters.add", SCRIPTED, COUNTS, ON_SCRIPT, source="B20")
def bonus_token_not_counted(own: Any) -> Any:
    """the accept length leaves out the token that every pass adds"""

    def without(self: Any, proposed: int, accepted: int) -> None:
        own(self, proposed, accepted)
        self.accept_tokens -= 1
        self.lengths[-1] -= 1

    return without


@plants("speculation", "suite.e2e.engine.requests:DraftCounters.add", SCRIPTED, COUNTS, ON_SCRIPT, source="B20")
def bonus_token_counted_twice(own: Any) -> Any:
    """the bonus token counts as an accepted draft as well: the rate may exceed 1"""
    return lambda self, proposed, accepted: own(self, proposed, accepted + 1)


@plants("speculation", "suite.e2e.engine.requests:DraftCounters.add", SCRIPTED, "engine.no_accept_counts", source="B20")
def counters_never_grow(own: Any) -> Any:
    """the counters are there and nobody adds to them"""
    return lambda self, proposed, accepted: None


@plants("speculation", "suite.e2e.engine.drafts:ModelDrafter.follow", PRIVATE, FLOOR, LOSS, NAN)
def draft_not_fed_the_prompt(own: Any) -> Any:
    """the draft model is not told of prefills: it drafts without the prompt's rows"""
    return lambda self, step, features: None


@plants("speculation", "suite.e2e.engine.drafts:ModelDrafter.propose", PRIVATE, LOSS, FLOOR, severity=1)
def draft_positions_one_behind(own: Any) -> Any:
    """the draft's first token is the newest one again"""

    def behind(self: Any, step: Any) -> Any:
        right = own(self, step)
        return [
            replace(one, tokens=([request.tokens[-1], *one.tokens])[: len(one.tokens)])
            for request, one in zip(step.requests, right, strict=True)
        ]

    return behind
