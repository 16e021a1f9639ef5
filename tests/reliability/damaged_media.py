"""Damaged files of images and audio: `python -m tests.reliability.damaged_media [--only KIND] [--files N] [--save]`.

Each file is a part of a request to one engine with a projector.  The engine must answer the request, or
reject it with an `InvalidRequestError` that names the part, or as too long.  Meanwhile another request must
have its answer.
"""

from __future__ import annotations

import argparse
import functools
import io
import random
import resource
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image as Pillow

import cllm
from benchmarks.measure import rss_mib
from cllm import Audio, Engine, Image, InvalidRequestError
from tests.reliability.record import Cell, Record, Table, conclude
from tools import make_model, make_projector
from tools.make_projector import AUDIO, PROJECTORS

CLAIM = (
    "A damaged file of {} is an InvalidRequestError that names it, or the model answers it, or it does not fit "
    "the context (a flipped bit can make it larger). Its process takes a bounded amount of memory, and other "
    "requests have their answers."
)
N_AT_ONCE = 4
MAX_S = 120  # for a file and the other request
N_HEAD = 64  # bytes with the sizes; half of the flips go there
HUGE = 50_000  # pixels on a side
N_SILENT = (1 << 25) + 1  # samples of silence, which a file of some kilobytes may have
RATE = 16_000
MAX_CHILD_MIB = 1400  # 1 GiB of address space beside what Python and Pillow take before the limit
MAX_GROWTH_MIB = 400  # of the engine's process: the pixels of the images that are open
FLIPPED, CUT, LARGE, FOREIGN = "bits flipped", "cut off", "too large", "another type of file"


class File(NamedTuple):
    """A file, and the kind of its damage."""

    damage: str
    format: str
    data: bytes


@dataclass
class Findings:
    """Outcomes of the files, and what contradicts the claim."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    n_answers: int = 0  # of other requests
    child_mib: float = 0.0
    growth_mib: float = 0.0


@dataclass(frozen=True)
class Subject:
    """Kind of files that the program damages.

    Attributes
    ----------
    kind : str
        "image" or "audio".
    source : type
        `Image` or `Audio`.
    intact, large : callable
        Return a sound file of a format, and one that is too large.
    model, projector : str
        Names of the test models.
    """

    name: str
    kind: str
    words: str
    n_files: int
    formats: tuple[str, ...]
    source: Callable[[bytes], Image | Audio]
    intact: Callable[[str], bytes]
    large: Callable[[str, bytes], bytes]
    model: str
    projector: str


# --- Files -------------------------------------------------------------------------------------
def intact_image(kind: str) -> bytes:
    """Return a file of 48 × 40 pixels in this format."""
    pixels = np.random.RandomState(1).randint(0, 256, (40, 48, 3), np.uint8)
    written = io.BytesIO()
    Pillow.fromarray(pixels).save(written, kind)
    return written.getvalue()


def intact_audio(kind: str) -> bytes:
    """Return a file of 0.2 s in this format."""
    samples = np.random.RandomState(1).uniform(-0.5, 0.5, RATE // 5).astype(np.float32)
    return _audio_file(kind, samples)


def _audio_file(kind: str, samples: NDArray[np.float32]) -> bytes:
    written = io.BytesIO()
    soundfile.write(written, samples, RATE, format=kind)
    return written.getvalue()


@functools.cache
def _silence() -> bytes:
    return _audio_file("FLAC", np.zeros(N_SILENT, np.float32))


def large_audio(kind: str, data: bytes) -> bytes:
    """Return a file with 65,535 channels for WAV, otherwise one of 35 minutes."""
    if kind != "WAV":
        return _silence()
    copy = bytearray(data)
    copy[22:24] = struct.pack("<H", 0xFFFF)
    return bytes(copy)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Return the file with one to eight flipped bits, in every second one only within the head."""
    copy = bytearray(data)
    end = min(N_HEAD, len(copy)) if chance.random() < 0.5 else len(copy)
    for bit in chance.sample(range(8 * end), chance.randint(1, 8)):
        copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


def large_image(kind: str, data: bytes) -> bytes:
    """Return the file with a header that states 50,000 × 50,000 pixels, or 16,383 × 16,383 for WebP."""
    copy = bytearray(data)
    match kind:
        case "PNG":
            copy[16:24] = struct.pack(">II", HUGE, HUGE)
            copy[29:33] = struct.pack(">I", zlib.crc32(copy[12:29]))
        case "BMP":
            copy[18:26] = struct.pack("<ii", HUGE, HUGE)
        case "GIF":
            copy[6:10] = struct.pack("<HH", HUGE, HUGE)
            at = copy.index(b",", 13 + 3 * (2 << (copy[10] & 7)) * (copy[10] >> 7))
            copy[at + 5 : at + 9] = struct.pack("<HH", HUGE, HUGE)
        case "JPEG":
            at = copy.index(b"\xff\xc0")
            copy[at + 5 : at + 9] = struct.pack(">HH", HUGE, HUGE)
        case "WEBP":
            at = copy.index(b"\x9d\x01\x2a")
            copy[at + 3 : at + 7] = struct.pack("<HH", 0x3FFF, 0x3FFF)
    return bytes(copy)


FOREIGN_FILES = (
    b"", b"\0", b"GIF", b"II*\0" + bytes(64), b"8BPS" + bytes(64), b"%!PS-Adobe-3.0 EPSF-3.0\n" * 9,
    b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"GGUF" + bytes(64), b"PK\3\4" + bytes(64),
    b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64), b"P6 9 9 255\n" + bytes(243), bytes(range(256)) * 9,
)  # fmt: skip


SUBJECTS = {
    "image": Subject(
        "damaged_images", "image", "an image", 2000, ("PNG", "JPEG", "WEBP", "BMP", "GIF"), Image,
        intact_image, large_image, PROJECTORS["qwen2vl"].text_model, "qwen2vl",
    ),
    "audio": Subject(
        "damaged_audio", "audio", "audio", 1000, ("WAV", "FLAC", "OGG", "MP3", "AIFF"), Audio,
        intact_audio, large_audio, AUDIO["ultravox"].text_model, "ultravox",
    ),
}  # fmt: skip


def files(n: int, subject: Subject) -> Iterator[File]:
    """Yield `n` files, of which about 9 in 10 have flipped bits or are cut off."""
    chance, formats = random.Random(1), subject.formats
    sound = {kind: subject.intact(kind) for kind in formats}
    for i in range(n):
        kind = formats[i % len(formats)]
        data = sound[kind]
        match i // len(formats) % 20:
            case 0:
                yield File(LARGE, kind, subject.large(kind, data))
            case 1:
                yield File(FOREIGN, "none", FOREIGN_FILES[i % len(FOREIGN_FILES)])
            case place if place % 3 == 0:
                yield File(CUT, kind, data[: chance.randrange(1, len(data))])
            case _:
                yield File(FLIPPED, kind, flipped(data, chance))


def _largest_child_mib() -> float:
    """Largest resident memory of the processes that this one has started and that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


# --- The engine --------------------------------------------------------------------------------
async def _answer(engine: Engine) -> tuple[int, ...]:
    done = await engine.generate("count: ", temperature=0, max_tokens=4, ignore_eos=True)
    return done.token_ids


async def _try(engine: Engine, subject: Subject, file: File, found: Findings) -> None:
    try:
        prompt = ["look: ", subject.source(file.data)]
        await engine.generate(prompt, temperature=0, max_tokens=1)
        outcome = "answered"
    except cllm.PromptTooLongError as error:
        outcome = "rejected"
        if file.damage != FLIPPED:
            found.wrong.append(f"{file.damage}, {file.format}: {error}")
    except (InvalidRequestError, cllm.InvalidArgumentError) as error:
        outcome = "rejected"
        if error.field not in (subject.kind, "prompt[1]"):  # of `Image`, and of a request
            found.wrong.append(f"{file.damage}, {file.format}: {error}")
    except Exception as error:
        outcome = type(error).__name__
        found.wrong.append(f"{file.damage}, {file.format}: {error!r}")
    found.outcomes[file.damage, outcome] += 1
    if outcome == "answered" and file.damage in (LARGE, FOREIGN):
        found.wrong.append(f"{file.damage}, {file.format}: answered")


async def examine(subject: Subject, n_files: int) -> Findings:
    """Give `n_files` files to one engine, and return the findings."""
    found, before_mib = Findings(), _largest_child_mib()
    model = make_model.ensure(subject.model)
    projector = make_projector.ensure(subject.projector)
    queue = files(n_files, subject)
    async with Engine(
        model, mmproj=projector, n_ctx=8192, n_seq_max=8, deterministic=True, preflight=False,
        n_threads=1, n_threads_batch=1,
    ) as engine:  # fmt: skip
        expected = await _answer(engine)
        first = subject.formats[0]
        await _try(engine, subject, File("none", first, subject.intact(first)), Findings())
        before = rss_mib()

        async def work() -> None:
            for file in queue:
                with anyio.move_on_after(MAX_S) as scope:
                    await _try(engine, subject, file, found)
                    is_right = await _answer(engine) == expected
                    found.n_answers += is_right  # read after the call: others count meanwhile
                if scope.cancelled_caught:
                    found.wrong.append(f"{file.damage}, {file.format}: no answer within {MAX_S} s")

        async with anyio.create_task_group() as tasks:
            for _ in range(N_AT_ONCE):
                tasks.start_soon(work)
        found.growth_mib = rss_mib() - before
        found.wrong += await engine.audit()
    found.child_mib = _largest_child_mib()
    own_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    n_wrong = n_files - found.n_answers
    found.wrong += [f"{n_wrong} other requests without their answer"] * bool(n_wrong)
    for name, used, limit in (
        # An earlier child of this process may have been larger, and a child has the memory of this process
        # until it executes its program.
        ("a process that decodes", found.child_mib, max(MAX_CHILD_MIB, before_mib, own_mib)),
        ("growth of the engine's process", found.growth_mib, MAX_GROWTH_MIB),
    ):
        if used > limit:
            found.wrong.append(f"{name}: {used:.0f} MiB, at most {limit:.0f}")
    return found


def record(subject: Subject, found: Findings) -> Record:
    """Return the record: figures, and a table of outcomes."""
    damages = (FLIPPED, CUT, LARGE, FOREIGN)
    rows: list[list[Cell]] = [
        [damage, found.outcomes[damage, "rejected"], found.outcomes[damage, "answered"]]
        for damage in damages
    ]
    return Record(
        subject.name,
        CLAIM.format(subject.words),
        f"python -m tests.reliability.damaged_media --only {subject.kind} --save",
        {
            "files": found.outcomes.total(),
            "answers of other requests": found.n_answers,
            "other errors, or other answers": len(found.wrong),
            "largest process that decodes, MiB": round(found.child_mib),
            "growth of the engine's process, MiB": round(found.growth_mib),
        },
        [Table(("damage", "rejected", "answered"), rows, f"Files: {', '.join(subject.formats)}.")],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all files; 1 if something is not as claimed."""
    parser = argparse.ArgumentParser(description=CLAIM.format("an image or audio"))
    parser.add_argument("--only", choices=SUBJECTS, help="images or audio alone")
    parser.add_argument("--files", type=int, help="number of files of each kind")
    parser.add_argument("--save", action="store_true", help="keep a record")
    given = parser.parse_args(arguments)
    codes = []
    for subject in [SUBJECTS[given.only]] if given.only else SUBJECTS.values():
        found = anyio.run(examine, subject, given.files or subject.n_files)
        codes.append(conclude(record(subject, found), found.wrong, is_kept=given.save))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
