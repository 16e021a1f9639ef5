"""Records: results of the proofs as JSON files, from which `page` makes docs/reliability.md.

A proof is a program of this package, `python -m tests.reliability.NAME`.  It ends with `conclude`, which
saves the record with `--save`.  The suite runs the same functions with smaller numbers.
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
    """Results of one proof.

    Attributes
    ----------
    name : str
        Name of the program: "soak" is `tests.reliability.soak`.
    claim : str
        Statement that the program checks.
    command : str
        Command that runs the program again.
    figures : mapping
        Counts and measurements by name, with the unit in the name, in the order of the page.
    tables : sequence of Table
    machine, commit : str
        Machine and commit of the run; set by `save`.
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
    """Return the record as text for a terminal: aligned tables, then the figures."""
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
    """Print a record and whether its claim holds; save it if `is_kept`; return the exit code, 0 or 1."""
    sys.stdout.write(text_of(record))
    sys.stdout.writelines(f"WRONG {line}\n" for line in wrong)
    sys.stdout.write("DOES NOT HOLD\n" if wrong else "holds\n")
    if is_kept:
        save(record)
    return int(bool(wrong))


def load(path: Path) -> Record:
    """Read a saved record."""
    values = json.loads(path.read_text())
    tables = [Table(**table) for table in values.pop("tables")]
    return Record(**values, tables=tables)


def commit() -> str:
    """Return the short id of the commit, with "-dirty" if files other than records have changed."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + "-dirty" * bool(changed)
