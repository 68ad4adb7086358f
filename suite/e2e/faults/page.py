"""Writes the table of planted faults: `python -m suite.e2e.faults.page RUN FRESH GRADED > docs/faults.md`.

The first two files are rows of `python -m suite.e2e.faults --json`, the second one with --fresh; the third is what
`python -m suite.e2e.faults.detection.graded` prints.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

HEAD = """# Planted faults

`kvproof faults` plants one known mistake after the other into the real code, by substituting one named attribute
(its seam), runs a scenario on a CPU and shows which signals fire. The same scenario with nothing planted is the
fault's clean twin: one signal there, and the command fails. `--smoke` runs a few of every kind.
`kvproof run --plant FAULT` puts one whose seam an engine runs into the unified arm of a matrix; a row that passes then
says that this backend or workload does not reach the seam. `kvproof faults --db URL` keeps the rows.
This page is written by `python -m suite.e2e.faults.page` from the rows of two runs.

What the figures do not say:

* Faults, scenarios and detectors were worked on until every fault was caught. This is a regression set: it shows that
  a detector that once saw a fault still sees it. It is no estimate of the share of unknown faults that would be caught.
* Not every signal is one that a matrix run has. A matrix run has `judge` (the unified arm against the static one, to
  the bit, the accuracy floor, the share of moved pages), `engine.not_finite` and `runner.not_finite` (logits),
  `allocators`, `attention`, `batch` and `engine.invariant` (integrity equations and refused input, which end a row),
  `ids` (typed ids), `guards`, `gate` (its tests and verdicts) and `db` (constraints, and the checks of
  `kvproof db check`). The others exist in these scenarios only: `metadata` and `pool` hold every row that a batch may
  read or write against the allocator's books and look at cleared pages, `kernel` holds an output against dense fp64
  attention, `stamp`, `support`, `plan`, `time`, `accuracy` and the rest of `engine` and `db` know the right answer of
  their scenario. The table by kind counts both.
* A scenario is a small model or a few layers with churn between all steps. A matrix run has longer requests and another
  mix; that it has a detector does not promise that its workload exposes the fault.
* Clean twins are silent at seed 0, which all figures here are from. Over other seeds (`python -m suite.e2e.faults
  --twins N`) 8 of 28 comparisons of four layer scenarios raised an alarm; `kernel.inaccurate` is too tight there.
* The noise of the faults with a size is assumed (it stands in their table's names), not measured on a GPU.
"""
SCENARIO_ROOMS = frozenset(("metadata", "pool", "kernel", "stamp", "support", "plan", "time", "accuracy"))
SCENARIO_FINDINGS = frozenset((
    *("engine.drafts_change_answers", "engine.script_differs", "engine.accept_counts", "engine.no_accept_counts"),
    *("db.no_wait", "db.rows_differ", "db.values_differ", "gate.replicate_differs"),
))  # fmt: skip


def matrix_run_has(signal: str) -> bool:
    """Whether `signal`, a `room.finding`, is a detector of a matrix run and its gate; else it is a scenario's own."""
    room, _, finding = signal.partition(".")
    asked_of_the_db = room == "db" and finding.endswith("_accepted")
    return not (room in SCENARIO_ROOMS or signal in SCENARIO_FINDINGS or asked_of_the_db)


def read(path: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in Path(path).read_bytes().splitlines()]


def page(rows: list[dict[str, Any]], fresh: list[dict[str, Any]], graded: str) -> str:
    caught_fresh = {row["fault"]: row["caught"] for row in fresh}
    seconds = sum(row["seconds"] for row in rows)
    lines = [
        HEAD,
        "## By kind",
        "",
        "| kind | planted | caught | caught by a detector of a matrix run | caught on a fresh pool without churn |",
        "|---|---|---|---|---|",
    ]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for kind in [*kinds, "all"]:
        mine = [row for row in rows if kind in (row["kind"], "all")]
        counts = Counter(caught=sum(row["caught"] for row in mine))
        counts["matrix"] = sum(any(map(matrix_run_has, row["by"])) for row in mine)
        counts["fresh"] = sum(caught_fresh[row["fault"]] for row in mine)
        lines.append(f"| {kind} | {len(mine)} | {counts['caught']} | {counts['matrix']} | {counts['fresh']} |")
    naive = [row["fault"] for row in rows if row["caught"] and not caught_fresh[row["fault"]]]
    lines += ["", f"The planted runs took {seconds:.0f} s of a CPU core together, their clean twins not counted.", ""]
    own = [row["fault"] for row in rows if row["caught"] and not any(map(matrix_run_has, row["by"]))]
    lines += [f"Seen by a scenario's own detector only: {', '.join(f'`{name}`' for name in own) or 'none'}.", ""]
    lines += [f"Missed on a fresh pool: {', '.join(f'`{name}`' for name in naive) or 'none'}.", ""]
    for kind in kinds:
        lines += [f"## {kind}", "", "| fault | the mistake | seam | seen by |", "|---|---|---|---|"]
        for row in rows:
            if row["kind"] == kind:
                seen = ", ".join(f"`{name}`" for name in row["by"])
                seam = row["seam"].removeprefix("suite.")
                lines.append(f"| `{row['fault']}` | {row['text']} | `{seam}` | {seen} |")
        lines.append("")
    lines += ["## Faults with a size", "", "How often a test at 5 % sees them; size 0 is its false-alarm rate.", ""]
    return "\n".join([*lines, graded])


def main(arguments: list[str]) -> int:
    if len(arguments) != 3:
        print("usage: python -m suite.e2e.faults.page RUN FRESH GRADED", file=sys.stderr)
        return 4
    sys.stdout.write(page(read(arguments[0]), read(arguments[1]), Path(arguments[2]).read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
