"""A gate's policy in TOML: which cells, which endpoints with which margins, and what a row that did not pass means.

Everything that decides is written down: there is no default margin, an unknown key is an error with its
dotted field, and a policy that names no cell is refused.
"""

import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from suite.errors import InputError, UnknownNameError
from suite.records import LAUNCHERS, METRICS, POOL_MODES, Cell, Launcher, PoolMode, Record

Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
FailWhen = Literal["beyond_margin", "worse_than_zero"]
RowMeaning = Literal["fail", "no_data", "inconclusive", "ignore"]


class Exact(Record, tag_field="kind", tag="exact"):
    """Logits, outputs and tokens are bit-identical in every block: the bound is 0.0."""


class Accuracy(Record, tag_field="kind", tag="accuracy"):
    """The share of questions lost is within `margin`; of the tasks `tasks`, or of all when there are none."""

    margin: Share
    min_items: Count
    fail_when: FailWhen
    tasks: tuple[Name, ...] = ()
    alpha: Share | None = None


class Flips(Record, tag_field="kind", tag="flips"):
    """Alarm: answers flip more often than the static arm's replicate does, or than at the known rate `psi0`."""

    psi0: Literal["replicate"] | Annotated[float, msgspec.Meta(ge=0, lt=1)]
    alpha: Share | None = None


class Latency(Record, tag_field="kind", tag="latency"):
    """`metric` is worse by less than `margin`, tested at the first look that has enough blocks to say."""

    metric: Name
    margin: Share
    looks: tuple[Annotated[int, msgspec.Meta(ge=3, le=10_000)], ...]
    fail_when: FailWhen
    alpha: Share | None = None


class Accept(Record, tag_field="kind", tag="accept"):
    """Accept length is shorter by less than `margin`; at or under `floor` the draft is mis-addressed, whatever else."""

    margin: Share
    min_prompts: Count
    floor: Annotated[float, msgspec.Meta(ge=1)]
    fail_when: FailWhen
    alpha: Share | None = None


class Positions(Record, tag_field="kind", tag="positions"):
    """Alarm: drafts are accepted less often, position by position."""

    alpha: Share | None = None


class History(Record, tag_field="kind", tag="history"):
    """Alarm: nightly log ratios of `metric` stepped up within the last `recent` nights, or crept from a pinned release.

    Fewer than `min_nights` say nothing, and that is said.
    """

    metric: Name
    alpha: Share
    min_nights: Annotated[int, msgspec.Meta(ge=6, le=10_000)]
    window: Annotated[int, msgspec.Meta(ge=6, le=10_000)]
    recent: Count


Endpoint = Exact | Accuracy | Flips | Latency | Accept | Positions | History
CLAIMS = (Exact, Accuracy, Latency, Accept)  # must be shown to hold; the others can only raise an alarm


class Rows(Record):
    """What a candidate's row means that did not pass. A wrong row always fails."""

    refused: RowMeaning
    crashed: RowMeaning
    timed_out: RowMeaning
    skipped: RowMeaning


class CellRule(Record):
    """Cells whose fields are all among those of `select`, and the endpoints that judge them.

    The first rule that fits a cell judges it. Fewer than `min_cells` judged cells are no data.
    """

    select: dict[str, Any]
    endpoints: tuple[Name, ...]
    min_cells: Annotated[int, msgspec.Meta(ge=0)]

    def fits(self, fields: dict[str, Any]) -> bool:
        return all(fields.get(name) in values for name, values in self.select.items())


class Policy(Record):
    """How a gate decides.

    `smoke` says which planted faults must be caught before it does: `required` those planted into made-up rows, those
    that a matrix planted at the judged revision, and the engine's smoke set, run there and then; `data` all but the
    last, for machines without torch; `not_required` none.
    """

    name: Name
    alpha: Share
    fdr: Share
    power: Share
    baseline: PoolMode
    candidates: tuple[PoolMode, ...]
    launchers: tuple[Launcher, ...]
    smoke: Literal["required", "data", "not_required"]
    rows: Rows
    endpoints: dict[str, Endpoint]
    cells: tuple[CellRule, ...]
    devices: tuple[Name, ...] = ()

    def alpha_of(self, endpoint: Endpoint) -> float:
        own = getattr(endpoint, "alpha", None)
        return self.alpha if own is None else own


def load_policy(path: str | Path) -> Policy:
    """The policy at `path`; InputError naming the dotted field of the first thing wrong in it."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InputError("policy", str(path), f"a readable TOML file ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError("policy", str(path), f"valid TOML ({error})") from error
    return parse_policy(table)


def parse_policy(table: dict[str, Any]) -> Policy:
    """The policy of a parsed table."""
    for field, value in numbers_of("", table):
        if not math.isfinite(value):
            raise InputError(field, value, "a finite number")
    if not table.get("cells"):
        raise InputError(
            "cells", table.get("cells"), "at least one [[cells]] table: a policy that names no cell is none"
        )
    try:
        policy = msgspec.convert(table, Policy)
    except msgspec.ValidationError as error:
        raise wrong_field(table, str(error)) from error
    check_policy(policy)
    return msgspec.structs.replace(policy, cells=tuple(listed(rule) for rule in policy.cells))


def numbers_of(field: str, value: object) -> Iterator[tuple[str, float]]:
    """Every float of a parsed table with its dotted field."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from numbers_of(f"{field}.{key}" if field else str(key), entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from numbers_of(f"{field}[{index}]", entry)
    elif isinstance(value, float):
        yield field, value


def wrong_field(table: dict[str, Any], message: str) -> InputError:
    """msgspec's complaint as an error that names the dotted field and its value."""
    said, _, path = message.partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    if quoted := re.search(r"(unknown|missing required) field `(.+?)`", said):
        field = f"{field}.{quoted[2]}".removeprefix(".")
    field = with_names(table, field)
    return InputError(field or "policy", value_at(table, field), expected_text(said))


def expected_text(said: str) -> str:
    """What msgspec expected, in the words of every other error."""
    if "unknown field" in said:
        return "no key of that name here"
    if "missing required field" in said:
        return "a value"
    return said.removeprefix("Expected ").replace("Invalid ", "no ").replace("`", "")


def with_names(table: dict[str, Any], field: str) -> str:
    """`field` with msgspec's `[...]` (some key of a table) replaced by the first key that is wrong there."""
    while "[...]" in field:
        head, _, rest = field.partition("[...]")
        inside = value_at(table, head)
        names = list(inside) if isinstance(inside, dict) else []
        field = f"{head}.{next((n for n in names if blames(head, inside[n])), '?')}{rest}"
    return field


def blames(head: str, value: object) -> bool:
    """Whether `value`, an entry of the table `head`, is the one that cannot be converted."""
    kind: Any = Endpoint if head == "endpoints" else Any
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return True
    return False


def value_at(table: Any, field: str) -> Any:
    """The value at a dotted field; None when there is none."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field):
        try:
            table = table[int(index)] if index else table[name]
        except (KeyError, IndexError, TypeError):
            return None
    return table


def check_policy(policy: Policy) -> None:
    """What types cannot say: names that must exist, values that must fit together."""
    if not policy.candidates:
        raise InputError("candidates", [], "at least one pool mode")
    if policy.baseline in policy.candidates:
        raise InputError("candidates", policy.baseline, "pool modes other than the baseline")
    for field, given, known in (
        ("candidates", policy.candidates, POOL_MODES),
        ("launchers", policy.launchers, LAUNCHERS),
    ):
        if not given or len(set(given)) < len(given):
            raise InputError(field, list(given), f"distinct names of {', '.join(known)}, at least one")
    for name, endpoint in policy.endpoints.items():
        check_endpoint(f"endpoints.{name}", endpoint)
    for number, rule in enumerate(policy.cells):
        check_rule(f"cells[{number}]", rule, policy)


def check_endpoint(field: str, endpoint: Endpoint) -> None:
    metric = getattr(endpoint, "metric", None)
    if metric is not None:
        kind = METRICS.get(metric.partition(".")[0])
        if kind is None:
            raise UnknownNameError(f"{field}.metric", metric, METRICS)
        if kind.better not in ("lower", "higher"):
            raise InputError(f"{field}.metric", metric, "a metric of which lower or higher is better")
    if isinstance(endpoint, Latency) and (not endpoint.looks or list(endpoint.looks) != sorted(set(endpoint.looks))):
        raise InputError(f"{field}.looks", list(endpoint.looks), "rising numbers of blocks, at least one")
    if isinstance(endpoint, History) and not endpoint.min_nights <= endpoint.window:
        raise InputError(f"{field}.window", endpoint.window, f"at least min_nights, {endpoint.min_nights}")


def check_rule(field: str, rule: CellRule, policy: Policy) -> None:
    known = set(Cell.__struct_fields__)
    if not rule.select:
        raise InputError(f"{field}.select", {}, "at least one field of a cell with its values")
    for name, values in rule.select.items():
        if name not in known:
            raise UnknownNameError(f"{field}.select.{name}", name, known)
        if values == []:
            raise InputError(f"{field}.select.{name}", values, "at least one value")
    if not rule.endpoints:
        raise InputError(f"{field}.endpoints", [], "at least one endpoint")
    for name in rule.endpoints:
        if name not in policy.endpoints:
            raise UnknownNameError(f"{field}.endpoints", name, policy.endpoints)
    if not any(isinstance(policy.endpoints[name], CLAIMS) for name in rule.endpoints):
        raise InputError(
            f"{field}.endpoints", list(rule.endpoints), "one that can pass: exact, accuracy, latency, accept"
        )


def listed(rule: CellRule) -> CellRule:
    """`rule` with every selected value in a list."""
    select = {name: values if isinstance(values, list) else [values] for name, values in rule.select.items()}
    return msgspec.structs.replace(rule, select=select)
