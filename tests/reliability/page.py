"""docs/reliability.md from the records of the proofs: `python -m tests.reliability.page`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.reliability.record import RESULTS, ROOT, Cell, Record, Table, load

PAGE = ROOT / "docs" / "reliability.md"

# The proofs in the order of the page, and what each is called there.
PROOFS = {
    "fault_matrix": "Native calls that fail",
    "fault_process": "Native calls that fail in the process of an engine",
    "tier_faults": "Copies and files of the KV cache that fail",
    "hazards": "What libllama aborts on",
    "api_fuzz": "Any arguments, for the engine",
    "bindings_fuzz": "Any arguments, for the bindings",
    "damaged_models": "Damaged model files",
    "damaged_states": "Damaged states",
    "lifecycle": "Beginnings and ends",
    "kills": "Crashes",
    "soak": "Soak",
    "sanitizers": "Sanitizers",
    "leaks": "Leaks",
}
MAX_ROWS = 12  # of a table; the rows of a longer one stand in its record
INTRODUCTION = """\
# Reliability

libllama is not a library that returns errors: it aborts, hangs and lies (an exception of C++ that reaches Python ends the process). This page
says what of that reaches a program that embeds cllm. Every section is what one program found and wrote; the command in it runs it
again, and its last line says where and on which commit. `make test-full` runs the same programs with smaller numbers, but for the two that need a
libllama with sanitizers; `.ci/run` runs as many in full as it has time for.

What no guard in the process can hold is the end of the process itself: memory that runs out inside a decode, a GPU that is gone, a mapped
file that is cut short. With `process=True`, as in `cllm serve`, that process is not yours, and another one goes on; see [server.md](server.md).
"""


def page(records: Iterable[Record]) -> str:
    """The whole page, with a record of every proof."""
    by_name = {record.name: record for record in records}
    sections = (section(title, by_name[name]) for name, title in PROOFS.items())
    return "\n".join([INTRODUCTION, *sections])


def section(title: str, record: Record) -> str:
    """What one proof found."""
    lines = [f"## {title}", "", record.claim, "", "```", record.command, "```", ""]
    lines += _table(Table(("", ""), [(name, value) for name, value in record.figures.items()]))
    for table in record.tables:
        if len(table.rows) > MAX_ROWS:
            path = (RESULTS / f"{record.name}.json").relative_to(ROOT)
            lines += [f"{len(table.rows)} rows, by {table.head[0]}: [{path.name}](../{path}).", ""]
            continue
        lines += [table.caption, ""] if table.caption else []
        lines += _table(table)
    lines += [f"*{record.machine}; {record.commit}.*", ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    def row(cells: Sequence[Cell]) -> str:
        return f"| {' | '.join(_shown(cell) for cell in cells)} |"

    return [row(table.head), row(["---"] * len(table.head)), *map(row, table.rows), ""]


def _shown(cell: Cell) -> str:
    """A figure as people write it; what is code in a word stays so."""
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|")


def saved() -> list[Record]:
    """All records there are."""
    return [load(path) for path in sorted(RESULTS.glob("*.json"))]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(saved()))
    print(Path(PAGE).relative_to(ROOT))


if __name__ == "__main__":
    main()
