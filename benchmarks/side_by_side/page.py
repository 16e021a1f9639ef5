"""The page of results: the targets, and a section with tables and a picture for each measurement."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import machine
from benchmarks.side_by_side import plots
from benchmarks.side_by_side.peers import ROOT, Peers
from benchmarks.side_by_side.records import LIMITS, XLLAMACPP, Record, Spread
from benchmarks.side_by_side.tables import Table, tables
from benchmarks.side_by_side.targets import TARGETS, Target, Verdict, judge
from cllm.bindings import find_library

SECTIONS = {
    "a": "Decode throughput, every token read",
    "b": "Over HTTP: clients in a closed loop, 64 + 32 tokens",
    "c": "Requests with a shared head",
    "d": "A long prompt joins streams",
    "e": "Requests that need several times the KV cache",
    "f": "One request after another",
    "g": "Overhead: a model of two layers",
    "h": "An event loop half busy with callbacks of 2 ms",
    "i": "Memory, import, cold start",
    "n": "Next to other programs: endless loops in the same session",
    "r": "Real chats: four turns, a shared system prompt, SmolLM2",
    "v": "Vectors: a text of 16 to 256 tokens each, all-MiniLM-L6-v2",
    "w": "The first chat after a server is ready, SmolLM2",
}
UNITS = {"_per_s": " tokens/s", "_ms": " ms", "_mib": " MiB", "_us": " µs", "_s": " s"}
SIGNS = {">=": "≥", "<=": "≤"}
PAGE, NOTES = "README.md", "notes.md"


@dataclass(frozen=True)
class Environment:
    """Place and conditions of a measurement.

    Attributes
    ----------
    record : mapping
        Record of the library that `build_llama.sh` wrote.
    missing : mapping
        Reason why a peer was not measured, by peer; "" if it was.
    """

    date: str
    options: str
    machine: str
    commit: str
    record: Mapping[str, Any]
    missing: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.date}, cllm {self.commit}, {self.machine}"


def environment(date: str, options: str, peers: Peers) -> Environment:
    """Return the environment of this process: checkout, library and machine."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=9",
        "--exclude=*",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    commit = done.stdout.strip() or "unknown"
    return Environment(date, options, machine(), commit, find_library()[1], peers.missing)


def write(records: Sequence[Record], where: Environment, directory: Path) -> Path:
    """Write the page and its pictures; the page includes the notes on targets in `notes.md` of `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    notes_path = directory / NOTES
    notes = notes_of(notes_path.read_text()) if notes_path.is_file() else {}
    pictures = {
        measurement: name
        for measurement in SECTIONS
        if plots.draw(tables(records, measurement), directory / (name := f"{measurement}.png"))
    }
    path = directory / PAGE
    path.write_text(page(records, where, notes, pictures))
    return path


def notes_of(text: str) -> dict[str, str]:
    """Return the notes below the headings `## KEY, KEY`, by the key of a target."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return {
        key.strip(): paragraph.strip()
        for heading, paragraph in zip(parts[1::2], parts[2::2], strict=True)
        for key in heading.split(",")
    }


def page(
    records: Sequence[Record],
    where: Environment,
    notes: Mapping[str, str],
    pictures: Mapping[str, str],
) -> str:
    """Return the page as Markdown.

    Parameters
    ----------
    notes : mapping
        Reason why a target is not reached, by the key of the target.
    pictures : mapping
        File name of the picture, by measurement.
    """
    verdicts = [judge(target, records) for target in TARGETS]
    blocks = [
        "# Side by side",
        "Peers took turns on one machine.  A figure is the median of the turns, with the smallest "
        "and the largest in brackets; a ratio is taken within a turn, and then the median of those.",
        "*llama.cpp alone* is the same figure for a program that only computes what the requests need, with "
        "all of them in step.  *bare Python server* is the same figure for a server that does the least that one "
        "in Python does: an event loop, a thread that decodes, and the most likely token.",
        _about(where),
        "## Targets",
        _summary(verdicts),
        _target_table(verdicts),
        *_explanations(verdicts, notes),
    ]
    for measurement, title in SECTIONS.items():
        if found := tables(records, measurement):
            blocks.append(f"## {measurement}. {title}")
            blocks += _section(found)
            blocks += _circumstances([r for r in records if r.measurement == measurement], where)
            if measurement in pictures:
                blocks.append(f"![{title}]({pictures[measurement]})")
    return "\n\n".join(blocks) + "\n"


def number(value: float) -> str:
    """Format a number with 0 to 3 decimals: fewer for a larger number, and 0 for a whole number."""
    size = abs(value)
    limits = (100, 0), (10, 1), (0.1, 2), (0, 3)
    digits = 0 if value == int(value) else next(d for limit, d in limits if size >= limit)
    return f"{value:,.{digits}f}"


def shown(values: Spread | None, text: Callable[[float], str] = number) -> str:
    """Return `median [smallest–largest]`, or only the median if all turns are equal."""
    if values is None:
        return "–"
    if values.smallest == values.largest:
        return text(values.median)
    return f"{text(values.median)} [{text(values.smallest)}–{text(values.largest)}]"


def judged(verdict: Verdict) -> str:
    """Return the measured value, with enough digits to show on which side of the bound it is."""
    if verdict.measured is None:
        return "–"
    median, target = verdict.measured.median, verdict.target
    digits = 3 if target.bound < 10 else 1
    while target.holds(round(median, digits)) != verdict.is_reached:
        digits += 1
    return shown(verdict.measured, lambda value: f"{value:,.{digits}f}")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are also aligned as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _about(where: Environment) -> str:
    record = where.record
    lines = [
        f"- {where}",
        f"- options: {where.options}",
        f"- llama.cpp {record.get('commit', 'unknown')}, {record.get('compiler', 'unknown')}, "
        f"AMX {record.get('amx', 'unknown')}, `{' '.join(record.get('flags', []))}`",
    ]
    if not where.missing.get(XLLAMACPP):
        lines.append(f"- {XLLAMACPP} runs the llama.cpp of its wheel, which has no AVX-512")
    lines += [f"- not measured: {peer} ({why})" for peer, why in where.missing.items() if why]
    return "\n".join(lines)


def _circumstances(records: Sequence[Record], where: Environment) -> list[str]:
    """Return the other places where this was measured, and how busy the machine was."""
    elsewhere = dict.fromkeys(r.where for r in records if r.where not in ("", str(where)))
    lines = [f"Measured elsewhere: {place}." for place in elsewhere]
    if known := [r.busy for r in records if r.busy]:
        lines.append(
            f"A loop beside each took {median(known):.2f} times as long as at its fastest, "
            f"{max(known):.2f} at most."
        )
    return lines


def _summary(verdicts: Sequence[Verdict]) -> str:
    counts = [
        (w, sum(_word(v) == w for v in verdicts))
        for w in ("reached", "not reached", "not measured")
    ]
    return f"Of {len(verdicts)}: " + ", ".join(f"{n} {word}" for word, n in counts) + "."


def _word(verdict: Verdict) -> str:
    return {True: "reached", False: "not reached", None: "not measured"}[verdict.is_reached]


def _bound(target: Target) -> str:
    unit = next((u for end, u in UNITS.items() if target.metric.endswith(end)), "")
    relation = f"{SIGNS[target.relation]} {number(target.bound)}"
    return f"{relation} × {target.against}" if target.against else relation + unit


def _target_table(verdicts: Sequence[Verdict]) -> str:
    rows = [
        [
            verdict.target.key,
            verdict.target.text,
            _bound(verdict.target),
            judged(verdict),
            *(shown(limit) if (limit := verdict.limits.get(p)) else "" for p in LIMITS),
            str(verdict.measured.n_turns) if verdict.measured else "",
            _word(verdict),
        ]
        for verdict in verdicts
    ]
    return markdown(["", "what", "bound", "measured", *LIMITS, "turns", ""], rows)


def _explanations(verdicts: Sequence[Verdict], notes: Mapping[str, str]) -> list[str]:
    short = [v.target.key for v in verdicts if v.is_reached is False]
    if not short:
        return []
    by_note: dict[str, list[str]] = {}
    for key in short:
        by_note.setdefault(notes.get(key, "Not explained."), []).append(key)
    return [
        "### Not reached",
        *(f"**{', '.join(keys)}**: {note}" for note, keys in by_note.items()),
    ]


def _section(found: Sequence[Table]) -> list[str]:
    blocks = []
    for model, of_model in itertools.groupby(found, lambda table: table.model):
        blocks.append(f"Model: {model}.")
        for _, alike in itertools.groupby(of_model, lambda table: (table.peers, table.cases)):
            members = list(alike)
            if len(members[0].peers) == 1:
                blocks.append(_of_one_peer(members))
            else:
                blocks += [_side_by_side(table) for table in members]
    return blocks


def _of_one_peer(tables: Sequence[Table]) -> str:
    cases, (peer,) = tables[0].cases, tables[0].peers
    rows = [[case, *(shown(table.spread(case, peer)) for table in tables)] for case in cases]
    return markdown([peer, *(table.title for table in tables)], rows)


def _side_by_side(table: Table) -> str:
    rows = [
        [
            case,
            *(shown(table.spread(case, peer)) for peer in table.peers),
            *(shown(table.ratio(case, rival)) for rival in table.rivals),
        ]
        for case in table.cases
    ]
    return markdown([table.title, *table.peers, *(f"÷ {rival}" for rival in table.rivals)], rows)
