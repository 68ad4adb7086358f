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
This page is written by `python -m suite.e2e.faults.page` from the rows of two runs.

What sees: `judge` (the unified arm against the static one, to the bit, and the share of moved pages), `engine` and
`allocators` (their integrity equations, logits that are not finite, accept counts), `gate` (its tests and verdicts),
`guards`, `ids` (typed ids), `scan`, `db` (constraints and the checks of `kvproof db check`) are the suite's own.
`metadata` and `pool` (every row that a batch may read or writes, against the allocator's books; cleared pages),
`kernel` (error against dense fp64 attention), `stamp`, `support`, `plan`, `time` and `accuracy` (against a known
answer) are the scenarios': the detection run has them, a matrix run does not.
"""


def read(path: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in Path(path).read_bytes().splitlines()]


def page(rows: list[dict[str, Any]], fresh: list[dict[str, Any]], graded: str) -> str:
    caught_fresh = {row["fault"]: row["caught"] for row in fresh}
    seconds = sum(row["seconds"] for row in rows)
    lines = [
        HEAD,
        "## By kind",
        "",
        "| kind | planted | caught | caught on a fresh pool without churn |",
        "|---|---|---|---|",
    ]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for kind in [*kinds, "all"]:
        mine = [row for row in rows if kind in (row["kind"], "all")]
        counts = Counter(caught=sum(row["caught"] for row in mine))
        counts["fresh"] = sum(caught_fresh[row["fault"]] for row in mine)
        lines.append(f"| {kind} | {len(mine)} | {counts['caught']} | {counts['fresh']} |")
    naive = [row["fault"] for row in rows if row["caught"] and not caught_fresh[row["fault"]]]
    lines += ["", f"The planted runs took {seconds:.0f} s of a CPU core together, their clean twins not counted.", ""]
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
