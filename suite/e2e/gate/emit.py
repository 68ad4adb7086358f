"""One stored decision as JUnit for the CI, Markdown for the pull request, JSON for programs and a table for people."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from suite.e2e.gate.service import Stored
from suite.e2e.gate.verdicts import CellDecision, Evidence
from suite.errors import InputError, one_line

STYLE = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow", "QUIET": "dim"}
HEADER = ("cell", "arm", "endpoint", "verdict", "effect", "bounds", "margin", "n", "power", "why")


def as_json(kept: Stored) -> dict[str, Any]:
    """The whole decision as plain values; the outer verdict is the one that counts, after an override."""
    document = msgspec.to_builtins(kept.decision)
    outer = {name: getattr(kept, name) for name in ("verdict", "exit_code", "reason", "supersedes", "override_by")}
    return {"decision": kept.id, **document, **outer}


def junit(kept: Stored) -> str:
    """A JUnit report: a test case per endpoint of every cell, and one per cell for what its rows say."""
    decision = kept.decision
    suite = ET.Element("testsuite", name=f"kvproof gate {decision.policy}")
    for cell in decision.cells:
        name = f"{cell.arm} control" if cell.control else cell.arm
        case = ET.SubElement(suite, "testcase", classname=one_line(cell.cell), name=f"{name}: cell")
        if not cell.control:
            add_outcome(case, cell.verdict, cell.reason)
        for found in cell.evidence:
            case = ET.SubElement(suite, "testcase", classname=one_line(cell.cell), name=f"{name}: {found.endpoint}")
            if not cell.control:
                add_outcome(case, found.verdict, found.reason)
    for text in decision.left_out:
        case = ET.SubElement(suite, "testcase", classname="left out", name=one_line(text))
        ET.SubElement(case, "skipped", message=one_line(text))
    case = ET.SubElement(suite, "testcase", classname="gate", name="decision")
    add_outcome(case, kept.verdict, kept.reason)
    for kind, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(kind, str(len(list(suite.iter(tag)))))
    return xml_text(suite)


def junit_refusal(reason: str) -> str:
    """A JUnit report of a gate that did not decide: one error, so that no CI takes an absent report for a pass."""
    suite = ET.Element("testsuite", name="kvproof gate", tests="1", failures="0", errors="1", skipped="0")
    case = ET.SubElement(suite, "testcase", classname="gate", name="decision")
    ET.SubElement(case, "error", message=one_line(reason), type="refused")
    return xml_text(suite)


def add_outcome(case: ET.Element, verdict: str, reason: str) -> None:
    if verdict == "FAIL":
        ET.SubElement(case, "failure", message=one_line(reason), type=verdict)
    elif verdict == "INCONCLUSIVE":
        ET.SubElement(case, "error", message=one_line(reason), type=verdict)


def xml_text(suite: ET.Element) -> str:
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def markdown(kept: Stored) -> str:
    """A comment for a pull request: the verdict, what did not pass, and the rest folded away."""
    decision = kept.decision
    lines = [f"### kvproof gate `{decision.policy}`: {kept.verdict}", "", escaped(kept.reason), ""]
    rows = list(evidence_rows(decision.cells))
    loud = [row for row in rows if row[3] in ("FAIL", "INCONCLUSIVE")]
    if loud:
        lines += [*markdown_table(loud), ""]
    lines += ["<details><summary>All evidence</summary>", "", *markdown_table(rows), "", "</details>", ""]
    for title, texts in (("Left out", decision.left_out), ("Not named by the policy", decision.unjudged)):
        if texts:
            lines += [f"{title}: {'; '.join(escaped(text) for text in texts)}", ""]
    lines.append(
        f"Decision `{kept.id}` on run `{decision.run}`, policy `{decision.policy_sha[:12]}`, inputs"
        f" `{decision.inputs_sha[:12]}`, engine `{decision.engine_sha[:12]}`; {decision.smoke.planted} planted faults,"
        f" {len(decision.smoke.missed)} missed. Again: `kvproof gate --replay {kept.id}`"
    )
    return "\n".join(lines) + "\n"


def markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"]
    return lines + [f"| {' | '.join(escaped(value) for value in row)} |" for row in rows]


def escaped(text: str) -> str:
    """`text` as one cell of a Markdown table that renders as it reads, whatever characters are in it."""
    return "".join(f"&#{ord(c)};" if c in "&<>|`*_[]\\" else c for c in one_line(text))


def evidence_rows(cells: tuple[CellDecision, ...]) -> Iterator[tuple[str, ...]]:
    """One row per endpoint, and one for a cell whose rows speak for themselves."""
    for cell in cells:
        arm = f"{cell.arm} (control)" if cell.control else cell.arm
        if cell.verdict != "PASS" and not any(e.verdict == cell.verdict for e in cell.evidence):
            yield cell.cell, arm, "rows", cell.verdict, "", "", "", str(cell.blocks), "", cell.reason
        for found in cell.evidence:
            yield cell.cell, arm, found.endpoint, found.verdict, *numbers(found), found.reason


def numbers(found: Evidence) -> tuple[str, ...]:
    bounds = "" if found.lo is None or found.hi is None else f"{found.lo:+.4g} to {found.hi:+.4g}"
    effect, margin = (
        "" if value is None else f"{value:{form}}" for value, form in ((found.effect, "+.4g"), (found.margin, ".4g"))
    )
    return effect, bounds, margin, str(found.n), "" if found.power is None else f"{found.power:.2f}"


def print_table(kept: Stored) -> None:
    """The decision as a table on stdout, as wide as it needs to be when nobody's terminal cuts it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=400)
    table = Table(*HEADER)
    for row in evidence_rows(kept.decision.cells):
        table.add_row(*(f"[{STYLE[v]}]{v}[/]" if at == 3 else escape(one_line(v)) for at, v in enumerate(row)))
    console.print(f"run {kept.decision.run}, policy {kept.decision.policy}, decision {kept.id}", markup=False)
    console.print(table)
    for text in kept.decision.left_out:
        console.print(f"left out: {one_line(text)}", markup=False)
    for text in kept.decision.unjudged:
        console.print(f"not named by the policy: {one_line(text)}", markup=False)
    console.print(f"{kept.verdict}: {one_line(kept.reason)}", markup=False)


def write(path: Path, field: str, text: str) -> None:
    """`text` into `path`; InputError naming the option when that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(field, str(path), f"a file that can be written ({error.strerror})") from error
