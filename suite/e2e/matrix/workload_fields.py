"""The optional fields of an engine's workload: what each may be, and which go together."""

from suite.e2e.matrix.fields import MAX_INTEGER, Check, Table, boolean, integer, number, one_of, text
from suite.errors import InputError
from suite.models.languages import LANGUAGES
from suite.records import BLOCK_DRAFTS, SPECULATIONS

WITH_SCRIPT = ("scripted", "simulated")
ENDLESS = tuple(name for name, spoken in LANGUAGES.items() if not spoken.ended)  # texts that go on as long as asked


def script(field: str, value: object) -> tuple[int, ...]:
    """How many drafts of each pass are right, over and over."""
    if not isinstance(value, list) or not value:
        raise InputError(field, value, "a list of numbers of right drafts, not empty")
    return tuple(integer(0)(field, right) for right in value)


ENGINE_FIELDS: dict[str, Check] = {
    "arrivals_per_step": number(0, 1e6, above=True),
    "shared_tokens": integer(0),
    "branches": integer(1),
    "turns": integer(1),
    "turn_tokens": integer(1),
    "long_requests": integer(0),
    "long_tokens": integer(0),
    "sized_for": one_of(lambda: ("short", "long")),
    "pool_share": number(0, 1, above=True),
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "prefix_cache": boolean,
    "mixed": boolean,
    "speculation": one_of(lambda: SPECULATIONS),
    "draft_tokens": integer(0),
    "script": script,
    "draft": text,
    "fused_draft": boolean,
    "language": one_of(lambda: ENDLESS),
    "min_accept_length": number(1, MAX_INTEGER),
}


def check_engine_workload(field: str, fields: Table) -> None:
    """InputError naming the first field that does not go with the others."""

    def require(name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise InputError(f"{field}.{name}", fields.get(name), expected)

    speculation, drafts = fields.get("speculation", "none"), fields.get("draft_tokens", 0)
    shared, prompt = fields.get("shared_tokens", 0), fields["prompt_tokens"]
    require("shared_tokens", shared < prompt, f"below {prompt}, the prompt's tokens")
    require("branches", shared > 0 or fields.get("branches", 1) == 1, "1 where nothing is shared")
    long, longer = fields.get("long_requests", 0), fields.get("long_tokens", 0)
    require("long_tokens", bool(long) == bool(longer), "a length where there are long requests, and only there")
    require("sized_for", bool(long) == ("sized_for" in fields), "short or long for a mix shift, and only for one")
    room = fields["chunk_tokens"] > fields["batch"]
    require("mixed", not fields.get("mixed") or room, f"chunk_tokens above the batch of {fields['batch']}")
    require("draft_tokens", bool(drafts) == (speculation != "none"), f"1 or more with speculation, got {speculation}")
    scripted = speculation in WITH_SCRIPT
    require(
        "script", bool(fields.get("script")) == scripted, f"numbers for {' and '.join(WITH_SCRIPT)}, and only there"
    )
    require("script", max(fields.get("script", [0])) <= drafts, f"at most {drafts}, the draft tokens")
    require("draft", speculation != "model" or "draft" in fields, "a checkpoint for speculation model")
    has_draft = speculation in ("model", *BLOCK_DRAFTS)
    require("draft", has_draft or "draft" not in fields, f"nothing for speculation {speculation}")
    require("fused_draft", has_draft or not fields.get("fused_draft"), "false without a draft model")
    counts = speculation not in ("none", "simulated")
    require("min_accept_length", counts or "min_accept_length" not in fields, "nothing without drafts that are judged")
    require("tasks", speculation != "simulated" or not fields.get("tasks"), "none: simulated drafts answer nothing")
