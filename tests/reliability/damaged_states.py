"""Damaged states of sequences: `python -m tests.reliability.damaged_states [--flips N] [--save]`.

llama.cpp's own bytes have no checksum, so `Context.state_seq_get_data` puts one before them.  The engine
keeps a preempted sequence as such a copy.  The program tries two ways.  A damaged copy must be refused.
llama.cpp may accept the same damage under a forged checksum.  It must then end no process, change no
other sequence, and leave no cells that `seq_pos_max` does not report.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model
from cllm.errors import InvalidArgumentError, LlamaCallError
from tests.reliability.record import Cell, Record, Table, conclude
from tools import make_model
from tools.make_model import FileType

NAME = "damaged_states"
CLAIM = (
    "A damaged copy of a sequence is never restored: its checksum refuses it, its seq_id stays "
    "empty, and the logits that follow are those of before, to the bit."
)
N_FLIPS, N_CUTS = 2000, 500
OPTIONS: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 4, "n_threads": 1, "n_threads_batch": 1,
}  # fmt: skip
HOLDER, TARGET, N_TOKENS, NEXT = 0, 1, 40, 44
TOLERANCE = 1e-3
N_HEAD = 1000  # bytes that hold cells, positions, types and sizes; half of the flips go there
N_CHECKED = 12  # bytes before llama.cpp's own
DAMAGED, FORGED = "damaged", "damaged and forged"
LAYOUTS = {"unified": True, "per sequence": False}
MODEL: tuple[str, FileType] = ("tiny-llama", "Q4_0")


@dataclass
class Counts:
    """Counts of the copies of one way and layout.

    Attributes
    ----------
    left : int
        Refused copies after which `seq_pos_max` reported positions in the sequence.
    stuck : int
        Copies whose positions only clearing the whole cache could remove.
    changed : int
        Copies after which the next logits of another sequence changed.
    poisoned : int
        Copies after which a sound copy was refused in the empty sequence, or gave other logits.
    """

    way: str
    layout: str
    flipped: int = 0
    flipped_refused: int = 0
    cut: int = 0
    cut_refused: int = 0
    left: int = 0
    stuck: int = 0
    changed: int = 0
    poisoned: int = 0
    sound_restored: bool = False


@dataclass
class Findings:
    """Findings of one layout: the counts of both ways, and the results of copies made elsewhere."""

    counts: list[Counts] = field(default_factory=list)
    foreign: dict[str, str] = field(default_factory=dict)


# --- The child ---------------------------------------------------------------------------------
class Scene:
    """A context in which one sequence holds tokens and another is empty."""

    def __init__(self, model: Model, **options: Any) -> None:
        self.context = Context(model, **{**OPTIONS, **options})
        self._batch = Batch(64)
        self.begin_again()

    def _decode(self, seq_id: int, tokens: Sequence[int], p0: int) -> NDArray[np.float32]:
        self._batch.clear()
        self._batch.add(seq_id, tokens, p0, n_outputs=1)
        return np.array(self.context.decode(self._batch).rows)

    def next_logits(self, seq_id: int = HOLDER) -> NDArray[np.float32]:
        """Decode one more token, remove it again, and return its logits."""
        rows = self._decode(seq_id, [NEXT], N_TOKENS)
        self.context.seq_rm(seq_id, N_TOKENS)
        return rows

    def is_sound(self, data: bytes, expected: NDArray[np.float32]) -> bool:
        """Return True if a sound copy can be restored and gives the expected logits; remove it again."""
        if not self.restore(data):
            return False
        rows = self.next_logits(TARGET)
        self.context.seq_rm(TARGET)
        # The copy is in other cells, so sums have another order: the logits are not equal to the bit.
        return bool(np.abs(rows - expected).max() < TOLERANCE)

    def begin_again(self) -> None:
        """Clear the cache, and decode the tokens of the holder again."""
        self.context.memory_clear()
        self._decode(HOLDER, range(97, 97 + N_TOKENS), 0)

    def restore(self, data: bytes) -> bool:
        """Restore a copy into the empty sequence; return False if it was refused."""
        try:
            self.context.state_seq_set_data(data, TARGET, n_positions=N_TOKENS)
        except (InvalidArgumentError, LlamaCallError):
            return False
        return True


def flipped(data: bytes, n: int) -> Iterator[bytes]:
    """Yield `n` copies with one to eight flipped bits, in every second one only within the head."""
    chance = random.Random(1)
    for i in range(n):
        copy = bytearray(data)
        end = N_HEAD if i % 2 else len(copy)
        for bit in chance.sample(range(8 * end), chance.randint(1, 8)):
            copy[bit // 8] ^= 1 << bit % 8
        yield bytes(copy)


def cut(data: bytes, n: int) -> Iterator[bytes]:
    """Yield `n` beginnings of a copy, half of them within the head."""
    for i in range(n):
        end = N_HEAD if i % 2 else len(data)
        yield data[: max(1, i * end // n)]


def forged(data: bytes) -> bytes:
    """Return the damaged copy with a checksum that is valid for it."""
    cells = data[N_CHECKED:]
    return data[: N_CHECKED - 4] + zlib.crc32(cells).to_bytes(4, "little") + cells


def _try(scene: Scene, copies: Iterator[bytes], of: Counts) -> int:
    """Restore each copy, count its effects in `of`, and return the number of refused copies."""
    context, expected, n_refused = scene.context, scene.next_logits(), 0
    sound = context.state_seq_get_data(HOLDER)
    for copy in copies:
        is_restored = scene.restore(forged(copy) if of.way == FORGED else copy)
        n_refused += not is_restored
        if context.seq_pos_max(TARGET) is not None:
            of.left += not is_restored
            context.seq_rm(TARGET)
            if context.seq_pos_max(TARGET) is not None:
                of.stuck += 1
                scene.begin_again()
        of.changed += scene.next_logits().tobytes() != expected.tobytes()
        if not scene.is_sound(sound, expected):
            of.poisoned += 1
            scene.begin_again()
    return n_refused


def examine_here(layout: str, n_flips: int, n_cuts: int) -> Findings:
    """Try everything in one layout."""
    found = Findings()
    with Model(make_model.ensure(*MODEL)) as model:
        for way in (DAMAGED, FORGED):
            scene = Scene(model, kv_unified=LAYOUTS[layout])
            data = scene.context.state_seq_get_data(HOLDER)
            counts = Counts(way, layout, flipped=n_flips, cut=n_cuts)
            counts.flipped_refused = _try(scene, flipped(data, n_flips), counts)
            counts.cut_refused = _try(scene, cut(data, n_cuts), counts)
            counts.sound_restored = scene.restore(data)
            found.counts.append(counts)
            scene.context.close()
        found.foreign = _foreign(model, data, LAYOUTS[layout])
    return found


def _foreign(model: Model, data: bytes, kv_unified: bool) -> dict[str, str]:
    """Return "refused", "accepted" or "left something" for a sound copy in other contexts and models."""
    settings: dict[str, dict[str, Any]] = {
        "another type of the cache": {"type_k": "q8_0"},
        "without flash attention": {"flash_attn": False},
        "the other layout": {"kv_unified": not kv_unified},
        "another n_ctx": {"n_ctx": 1024},
        "another rope_freq_base": {"rope_freq_base": 5000.0},
    }
    models: dict[str, tuple[str, FileType]] = {
        "another architecture": ("tiny-swa", "Q4_0"),
        "a hybrid model": ("tiny-hybrid", "Q4_0"),
        "another model of the same shape": ("tiny-qwen3", "Q4_0"),
    }
    found = {}
    for name, options in settings.items():
        found[name] = _where(model, data, {"kv_unified": kv_unified, **options})
    for name, of in models.items():
        with Model(make_model.ensure(*of)) as other:
            found[name] = _where(other, data, {"kv_unified": kv_unified})
    return found


def _where(model: Model, data: bytes, options: dict[str, Any]) -> str:
    scene = Scene(model, **options)
    with scene.context as context:
        if scene.restore(data):
            return "accepted"
        return "refused" if context.seq_pos_max(TARGET) is None else "left something"


# --- The parent --------------------------------------------------------------------------------
def examine(layout: str, *, n_flips: int = N_FLIPS, n_cuts: int = N_CUTS) -> Findings | int:
    """Return the findings of a child process, or its exit code if that is not 0."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.reliability.damaged_states",
            "--child", layout, "--flips", str(n_flips), "--cuts", str(n_cuts),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
        cwd=Path(__file__).parents[2], timeout=240,
    )  # fmt: skip
    if done.returncode != 0:
        return done.returncode
    values = json.loads(done.stdout.splitlines()[-1])
    return Findings([Counts(**counts) for counts in values["counts"]], values["foreign"])


# llama.cpp refuses copies with another shape of cells.  It cannot detect the other differences.
REFUSED_BY_SHAPE = (
    "another type of the cache", "without flash attention", "the other layout",
    "another architecture", "a hybrid model",
)  # fmt: skip


def contradictions(layout: str, found: Findings | int) -> list[str]:
    """Return the contradictions to the claim in one layout."""
    if isinstance(found, int):
        return [f"{layout}: the process ended with {found}"]
    said = []
    for c in found.counts:
        name = f"{c.way}, {c.layout}"
        if c.way == DAMAGED and c.flipped_refused != c.flipped:
            said.append(f"{name}: restored damaged copies")
        if c.cut_refused != c.cut:
            said.append(f"{name}: accepted beginnings of copies")
        for what in ("left", "stuck", "changed", "poisoned"):
            if (n := getattr(c, what)) and not (c.way == FORGED and what in ("left", "stuck")):
                said.append(f"{name}: {what}: {n}")
        if not c.sound_restored:
            said.append(f"{name}: a sound copy was not restored")
    accepted = [name for name in REFUSED_BY_SHAPE if found.foreign[name] != "refused"]
    return said + [f"{layout}: {name}: {found.foreign[name]}" for name in accepted]


def record(by_layout: dict[str, Findings]) -> Record:
    """Return the record: figures, a table of damaged copies, and one of copies from elsewhere."""
    counts = [c for found in by_layout.values() for c in found.counts]
    damaged = [c for c in counts if c.way == DAMAGED]
    forgeries = [c for c in counts if c.way == FORGED]
    rows: list[list[Cell]] = [
        [
            f"{c.way}, {c.layout}", c.flipped, c.flipped_refused, c.cut, c.cut_refused, c.left,
            c.stuck, c.changed, c.poisoned,
        ]
        for c in counts
    ]  # fmt: skip
    head = [
        "way, layout", "flipped", "refused", "cut", "refused", "left behind", "not removed",
        "logits changed", "hidden cells",
    ]  # fmt: skip
    names = next(iter(by_layout.values())).foreign
    foreign: list[list[Cell]] = [
        [name, *(found.foreign[name] for found in by_layout.values())] for name in names
    ]
    return Record(
        NAME,
        CLAIM,
        f"python -m tests.reliability.{NAME} --save",
        {
            "damaged copies": sum(c.flipped + c.cut for c in damaged),
            "restored": sum(c.flipped + c.cut - c.flipped_refused - c.cut_refused for c in damaged),
            "left behind": sum(c.left for c in damaged),
            "forged copies": sum(c.flipped + c.cut for c in forgeries),
            "forged copies that llama.cpp accepted": sum(
                c.flipped + c.cut - c.flipped_refused - c.cut_refused for c in forgeries
            ),
            "cells that a forged copy left, until `memory_clear`": sum(c.left for c in forgeries),
            "logits of others that are not the same bits afterwards": sum(
                c.changed for c in counts
            ),
            "logits of a sound copy that differ by more than 0.001": sum(
                c.poisoned for c in counts
            ),
        },
        [
            Table(head, rows, "Copies with 1-8 bits flipped, and beginnings of copies."),
            Table(["a sound copy", *by_layout], foreign, "Copies from elsewhere."),
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Try both layouts; 1 if something is not as claimed."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--flips", type=int, default=N_FLIPS)
    parser.add_argument("--cuts", type=int, default=N_CUTS)
    parser.add_argument("--save", action="store_true", help="keep a record")
    parser.add_argument("--child", choices=LAYOUTS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        found = examine_here(given.child, given.flips, given.cuts)
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        return 0
    sizes = {"n_flips": given.flips, "n_cuts": given.cuts}
    by_layout = {layout: examine(layout, **sizes) for layout in LAYOUTS}
    said = [line for layout, found in by_layout.items() for line in contradictions(layout, found)]
    sound = {layout: found for layout, found in by_layout.items() if isinstance(found, Findings)}
    return conclude(record(sound), said, is_kept=given.save and len(sound) == len(by_layout))


if __name__ == "__main__":
    sys.exit(main())
