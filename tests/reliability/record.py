"""Records: what a proof found, kept as JSON; `page` makes docs/reliability.md of them.

A proof is a program of this package, `python -m tests.reliability.NAME`, that ends with `save` when
it is told to (`--save`).  The suite runs the same functions with smaller numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]

Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """Rows of figures, or of words, under their headings."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Record:
    """What one proof found.

    Attributes
    ----------
    name : str
        The program: "soak" is `tests.reliability.soak`.
    claim : str
        What it proves, a sentence.
    command : str
        What runs it again.
    figures : mapping
        What was counted or measured, with units in the names, in the order of the page.
    tables : sequence of Table
    machine, commit : str
        Where, and of what; filled in by `save`.
    """

    name: str
    claim: str
    command: str
    figures: Mapping[str, Cell]
    tables: Sequence[Table] = ()
    machine: str = ""
    commit: str = ""


def save(record: Record) -> Path:
    """Keep a record, in place of an earlier one of the same proof."""
    described = {**asdict(record), "machine": machine(), "commit": commit()}
    path = RESULTS / f"{record.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n")
    return path


def text_of(record: Record) -> str:
    """For a terminal: the tables, aligned, and the figures."""
    lines = []
    for table in record.tables:
        rows = [[str(cell) for cell in row] for row in (table.head, *table.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [table.caption] if table.caption else []
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        lines.append("")
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in record.figures.items()), ""])


def conclude(record: Record, wrong: Sequence[str], *, is_kept: bool) -> int:
    """Print what a proof found and whether its claim holds, and keep it; the exit code."""
    sys.stdout.write(text_of(record))
    sys.stdout.writelines(f"WRONG {line}\n" for line in wrong)
    sys.stdout.write("DOES NOT HOLD\n" if wrong else "holds\n")
    if is_kept:
        save(record)
    return int(bool(wrong))


def load(path: Path) -> Record:
    """A record that was saved."""
    values = json.loads(path.read_text())
    tables = [Table(**table) for table in values.pop("tables")]
    return Record(**values, tables=tables)


def commit() -> str:
    """What is checked out, with "-dirty" if it is not what is committed, records apart."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + "-dirty" * bool(changed)
