"""docs/backends.md, from the table: `python -m suite.kernels.attention.support_page > docs/backends.md`.

The page says nothing of its own, so it cannot drift: a test compares the two.
"""

import sys
from collections.abc import Iterable, Sequence

from suite.kernels.attention.facts import Pages, Support
from suite.kernels.attention.support import GUARDS, SUPPORT, unified_allow_list
from suite.records import POOL_MODES

HEADER = (
    "backend",
    "families",
    "index layout",
    "page sizes",
    "hardware of the native launcher",
    "package",
    "sinks",
    "values narrower than keys",
    "pool modes",
    "verify",
)


def page() -> str:
    """The whole page, Markdown."""
    unified = ", ".join(f"`{mode}`" for mode in POOL_MODES if mode != "static")
    lists = {
        "MLA": unified_allow_list("MLA"),
        "MHA and sliding windows, uniform rows": unified_allow_list("MHA") & unified_allow_list("SWA"),
        "MHA and sliding windows, values narrower than keys": unified_allow_list("MHA", unequal_rows=True),
    }
    parts = [
        "# Attention backends",
        "Written by `python -m suite.kernels.attention.support_page` from the table in\n"
        "`suite/kernels/attention/support.py`; change the table, not this page. `kvproof doctor` lists the\n"
        "backends of this version and says which of them run on your machine.",
        markdown_table(HEADER, (line_cells(line) for line in SUPPORT.values())),
        "## Who may read a unified pool",
        f"Pool modes {unified}. Values narrower than keys need `unified_token_major`. On an MLA model, `flashinfer`\n"
        "is `flashinfer_mla`.",
        markdown_table(("what", "backends"), ((what, ", ".join(sorted(names))) for what, names in lists.items())),
        "## Verify",
        "As many new tokens for every request, eager or in a graph; no backend is refused one. *Rows*: one call takes\n"
        "them all. *Lanes*: each becomes a request of its own, with its own row of the page table: exact, and every\n"
        "key is read once per new token. cutedsl_mla and tokenspeed_mla verify by trtllm_mla's kernels.",
        "## Refused at launch",
        "Before anything is allocated, as `backend: needs X, got Y`:",
        "\n".join(f"- {rule}" for rule in GUARDS),
    ]
    return "\n\n".join(parts) + "\n"


def line_cells(line: Support) -> list[str]:
    package = "-" if line.package is None else f"`{line.package[1]}`"
    modes = "all" if line.pool_modes == POOL_MODES else ", ".join(line.pool_modes)
    yes = [("yes" if fact else "no") for fact in (line.sinks, line.unequal_rows)]
    hardware = line.hardware
    for family in line.families:
        if line.hardware_for(family) != hardware and not line.oracle:
            hardware += f" ({family}: {line.hardware_for(family)})"
    return [
        f"`{line.name}`",
        ", ".join(line.families),
        line.layout,
        page_sizes(line),
        hardware,
        package,
        *yes,
        modes,
        line.verify,
    ]


def page_sizes(line: Support) -> str:
    """Page sizes of one backend, with the GPUs that they hold for where these differ."""
    texts = {each.hardware: sizes_text(each.pages) for each in line.kernels}
    if len(set(texts.values())) == 1:
        text = next(iter(texts.values()))
    else:
        text = "; ".join(f"{sizes} on {hardware}" for hardware, sizes in texts.items())
    return text if line.snaps_to is None else f"{text}, others snap to it"


def sizes_text(pages: Pages) -> str:
    if pages.sizes:
        return "/".join(map(str, pages.sizes))
    return "powers of two" if pages.powers_of_two else "any"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
