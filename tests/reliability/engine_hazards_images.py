"""Cases of hazard table 1.10 for the engine: images, audio and projectors."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image as Pillow

from cllm import Audio, Completion, Embedder, Image, PromptTooLongError
from cllm.errors import InvalidArgumentError, ModelLoadError
from tests.reliability.engine_hazard_case import NAN, OPTIONS, Case, Scene, Topic, short
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

TOPIC = Topic(options=lambda: {"mmproj": make_projector.ensure("embedded")})
HEARS = Topic(options=lambda: {"mmproj": make_projector.ensure("embedded-audio")})
PLAIN = Topic()  # the engine of the case has no projector
SIZES, FILES = "1.10 sizes of images", "1.10 files of images"
SAMPLES, RECORDINGS = "1.10 sizes of recordings", "1.10 files of audio"
PROJECTOR, NUMBERS = "1.10 files that are no projector of the model", "1.10 numbers out of range"
ROWS = "1.10 rows out of range"
MADE = InvalidArgumentError  # raised where an `Image` is made, before any request
value: Any
source: Any


def pixels(height: int = 40, width: int = 48) -> np.ndarray[Any, Any]:
    return np.zeros((height, width, 3), np.uint8)


def file_of(kind: str, height: int = 40, width: int = 48) -> bytes:
    written = io.BytesIO()
    Pillow.fromarray(pixels(height, width)).save(written, kind)
    return written.getvalue()


def png_that_states(height: int, width: int) -> bytes:
    """Return a small PNG file whose header states this size."""
    data = bytearray(file_of("PNG"))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


async def ask(scene: Scene, source: Any, **sampling: Any) -> Completion:
    prompt: list[Any] = ["a", Image(source), "1+1="]
    return await scene.engine.generate(prompt, **{"max_tokens": 3, **sampling})


async def chat(scene: Scene, part: dict[str, Any], role: str = "user") -> Completion:
    return await scene.engine.chat([{"role": role, "content": [part]}], max_tokens=3)


async def ask_about_path(scene: Scene, make: Callable[[Path], object]) -> Completion:
    """Ask about a path in the directory of the case, after `make` has put something there."""
    path = scene.directory / "image.png"
    make(path)
    return await ask(scene, path)


# --- Sources and sizes -----------------------------------------------------------------------
for source in (
    None, 5, 1.5, NAN, [], {}, "", "a\0b", object, np.zeros((4, 4), np.uint8),
    np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 3), np.int8),
    np.zeros((0, 4, 3), np.uint8), np.full((2, 2, 3), None),
):  # fmt: skip
    what = f"{source.dtype} {source.shape}" if isinstance(source, np.ndarray) else short(source)
    TOPIC.refuse(
        f"an image of {what}", ask, "image is ", "must be ", error=MADE, row=SIZES, source=source
    )
for height, width in ((1, 16_385), (16_385, 1), (5_793, 5_793)):
    TOPIC.refuse(
        f"pixels of {width}×{height}", ask, f"{width}×{height} pixels", "at most 16384",
        error=MADE, row=SIZES, source=np.broadcast_to(np.uint8(0), (height, width, 3)),
    )  # fmt: skip
for height, width in ((50_000, 50_000), (2**31 - 1, 2**31 - 1), (1, 16_385), (5_793, 5_793)):
    TOPIC.refuse(
        f"a file that states {width}×{height}", ask, f"{width}×{height} pixels", "at most 16384",
        row=SIZES, source=png_that_states(height, width),
    )  # fmt: skip
for height, width in ((1, 1), (1, 4_000), (4_000, 1), (2_000, 2_000)):
    TOPIC.accept(
        f"an image of {width}×{height}", ask, row=SIZES, source=pixels(height, width),
        in_full_only=height == width == 2_000,
    )  # fmt: skip

# --- Files -----------------------------------------------------------------------------------
INTACT = "must be an intact PNG, JPEG, WebP, BMP or GIF file"
TOPIC.refuse(
    "no bytes of an image", ask, "0 bytes', must be 1 to", error=MADE, row=FILES, source=b""
)
TOPIC.refuse(
    "bytes of an image past the limit", ask, f"{(64 << 20) + 1} bytes', must be 1 to", error=MADE,
    row=FILES, source=bytes((64 << 20) + 1),
)  # fmt: skip
for kind, data in {
    "a PNG cut off": file_of("PNG")[:-30],
    "a JPEG cut off in its header": file_of("JPEG")[:40],
    "a GGUF file": b"GGUF" * 99,
    "a PDF file": b"%PDF-1.7\n" * 99,
    "an SVG file": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "EPS, which Pillow gives to another program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "one byte": b"\x89",
    "a TIFF file": file_of("TIFF"),
    "a PPM file": file_of("PPM"),
}.items():
    TOPIC.refuse(f"as an image: {kind}", ask, f"{len(data)} bytes", INTACT, row=FILES, source=data)
for what, make, says in (
    ("that does not exist", lambda path: None, "must be a file that can be read: No such file"),
    ("of a directory", Path.mkdir, "must be a file that can be read: not a regular file"),
    ("of an empty file", Path.touch, "0 bytes', must be 1 to"),
    ("of a pipe", os.mkfifo, "0 bytes', must be 1 to"),
    ("of /dev/zero", lambda path: path.symlink_to("/dev/zero"), "0 bytes', must be 1 to"),
    ("of itself", lambda path: path.symlink_to(path), "must be a file that can be read: Too many"),
):  # fmt: skip
    TOPIC.refuse(f"the path {what}", ask_about_path, says, row=FILES, make=make)
for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
    TOPIC.accept(f"a file of {kind}", ask, row=FILES, source=file_of(kind))

# --- Prompts ---------------------------------------------------------------------------------
NO_PLACE = "1.10 images where none can be"
IMAGE = Image(pixels())
PLAIN.refuse(
    "an image without a projector", ask, "48×40 pixels", "no projector (mmproj)", row=NO_PLACE,
    source=pixels(),
)  # fmt: skip
TOPIC.refuse(
    "an image of the system", chat, "only messages of users and results of tools have images", row=NO_PLACE,
    part={"type": "image", "image": IMAGE}, role="system",
)  # fmt: skip
for value in ("cat.png", None, b"", 5, pixels().tolist()[0]):
    TOPIC.refuse(
        f"a part with the image {short(value)}", chat, "a cllm.Image", row=NO_PLACE,
        part={"type": "image", "image": value},
    )  # fmt: skip


async def generate(scene: Scene, prompt: Any, **sampling: Any) -> Completion:
    return await scene.engine.generate(prompt, max_tokens=3, **sampling)


async def score(scene: Scene, prompt: Any) -> object:
    return await scene.engine.score(prompt, "2")


for value in (["a", IMAGE, 5], ["a", IMAGE, None], ["a", IMAGE, b"b"], ["a", IMAGE, ["b"]]):
    TOPIC.refuse(
        f"a prompt with an image and {short(value[-1])}", generate, "texts, images and audio",
        row=NO_PLACE, prompt=value,
    )  # fmt: skip
TOPIC.refuse(
    "an image and prompt_logprobs", generate, "prompt_logprobs", row=NO_PLACE, prompt=[IMAGE],
    prompt_logprobs=1,
)  # fmt: skip
TOPIC.refuse("a scored image", score, "prompt is ", row=NO_PLACE, prompt=[IMAGE])
TOPIC.refuse(
    "more images than the context holds", generate, f"> {OPTIONS['n_ctx']} maximum",
    error=PromptTooLongError, row=ROWS, prompt=[IMAGE] * 17,
)  # fmt: skip
TOPIC.accept("as many images as the context holds", generate, row=ROWS, prompt=[IMAGE] * 15)
TOPIC.accept("an image alone", generate, row=ROWS, prompt=[IMAGE])

# --- Audio -----------------------------------------------------------------------------------
RATE = 16_000


def wav_of(n_samples: int, rate: int = RATE, n_channels: int = 1) -> bytes:
    written = io.BytesIO()
    soundfile.write(written, np.zeros((n_samples, n_channels), np.float32), rate, format="WAV")
    return written.getvalue()


async def hear(scene: Scene, source: Any, **sampling: Any) -> Completion:
    audio = source if isinstance(source, Audio) else Audio(source)
    prompt: list[Any] = ["a", audio, "1+1="]
    return await scene.engine.generate(prompt, **{"max_tokens": 3, **sampling})


for source in (
    None, 5, [], "", object, np.zeros((2, 2, 2), np.float32), np.zeros(9, np.uint8),
    np.zeros(0, np.float32), np.zeros(1, np.float32), np.full(9, NAN, np.float32),
    np.full(9, np.inf), np.zeros((1 << 25) + 1, np.int16),
):  # fmt: skip
    what = f"{source.dtype} {source.shape}" if isinstance(source, np.ndarray) else short(source)
    if isinstance(source, np.ndarray) and source.size:
        what += f" {source.flat[0]}"
    HEARS.refuse(
        f"audio of {what}", hear, "audio is ", "must be ", error=MADE, row=SAMPLES, source=source
    )
for value in (0, -1, 999, 768_001, 1.5, "16000", True, None):
    HEARS.refuse(
        f"sample_rate {value!r}", lambda scene, rate: hear(scene, Audio(np.zeros(9), rate)),
        "sample_rate is ", error=MADE, row=SAMPLES, rate=value,
    )  # fmt: skip
HEARS.accept("two samples", hear, row=SAMPLES, source=np.zeros(2, np.float32))
HEARS.accept("a minute", hear, row=SAMPLES, source=np.zeros(60 * RATE, np.int16))
HEARS.refuse(
    "more audio than the context holds", hear, f"> {OPTIONS['n_ctx']} maximum",
    error=PromptTooLongError, row=SAMPLES, source=np.zeros(30 * 25 * RATE, np.int16),
)  # fmt: skip
SOUND = "must be an intact WAV, FLAC, MP3, Ogg or AIFF file"
for kind, data in {
    "a WAV cut off in its header": wav_of(99)[:30],
    "a PNG": file_of("PNG"),
    "a WebP, which begins like a WAV": file_of("WEBP"),
    "a JPEG, which begins like an MP3": file_of("JPEG"),
    "a GGUF file": b"GGUF" * 99,
    "one byte": b"R",
}.items():
    HEARS.refuse(
        f"as audio: {kind}", hear, f"{len(data)} bytes", SOUND, row=RECORDINGS, source=data
    )
for what, data, says in (
    ("one sample", wav_of(1), "2 to 33554432 samples"),
    ("65 channels", wav_of(9, n_channels=65), "1 to 64 channels"),
    ("one sample a second", wav_of(9, 1), "1000 to 768000 samples a second"),
):
    HEARS.refuse(f"a file of {what}", hear, says, row=RECORDINGS, source=data)
HEARS.refuse(
    "the path of a pipe as audio", lambda scene: hear_at(scene, os.mkfifo),
    "0 bytes', must be 1 to", row=RECORDINGS,
)  # fmt: skip
HEARS.accept("a file of 64 channels", hear, row=RECORDINGS, source=wav_of(99, n_channels=64))
for taken, given in ((HEARS, IMAGE), (TOPIC, Audio(np.zeros(9)))):
    kind = "images" if given is IMAGE else "audio"
    taken.refuse(
        f"{kind} for a projector of the other kind", generate, f"takes no {kind}", row=NO_PLACE,
        prompt=[given],
    )  # fmt: skip


async def hear_at(scene: Scene, make: Callable[[Path], object]) -> Completion:
    """Ask about a path in the directory of the case, after `make` has put something there."""
    path = scene.directory / "a.wav"
    make(path)
    return await hear(scene, path)


# --- Projectors ------------------------------------------------------------------------------


async def start(scene: Scene, model: str = "", **options: Any) -> Completion:
    args = (make_model.ensure(model, "F16"),) if model else ()
    return await scene.start(*args, **options)


async def start_with(scene: Scene, content: Callable[[], bytes]) -> Completion:
    return await scene.start(mmproj=scene.file("mmproj.gguf", content()))


def projector(name: str) -> bytes:
    return make_projector.ensure(name).read_bytes()


for what, content in {
    "garbage": lambda: b"garbage" * 99,
    "an empty file": bytes,
    "a magic alone": lambda: b"GGUF",
    "a model": lambda: make_model.ensure("tiny-llama", "F16").read_bytes(),
    "a projector cut off": lambda: projector("embedded")[:-999],
    "a projector of another model": lambda: projector("qwen2vl"),
}.items():
    PLAIN.refuse(
        f"as a projector: {what}", start_with, "mmproj.gguf", error=ModelLoadError, row=PROJECTOR,
        content=content,
    )  # fmt: skip
PLAIN.refuse(
    "a projector that does not exist", start, "none.gguf", error=ModelLoadError, row=PROJECTOR,
    mmproj="none.gguf",
)  # fmt: skip
for value in (5, b"a", True, [], "a\0b", ""):
    PLAIN.refuse(
        f"mmproj {value!r}", start, f"mmproj is {value!r}, must be", error=InvalidArgumentError,
        row=PROJECTOR, mmproj=value,
    )  # fmt: skip


async def embed(_: Scene) -> object:
    async with Embedder(mmproj=make_projector.ensure("embedded")) as embedder:
        return await embedder.embed("a")


PLAIN.refuse(
    "an embedder with a projector", embed, "mmproj is ", "must be None",
    error=InvalidArgumentError, row=PROJECTOR,
)  # fmt: skip


async def start_dynamic(scene: Scene, **options: Any) -> Completion:
    """Start an engine whose projector makes more rows for a larger image, and ask it about one."""
    model = make_model.ensure(PROJECTORS["qwen2vl"].text_model)
    options = {"mmproj": make_projector.ensure("qwen2vl"), **options}
    return await scene.start(model, **options)


for name in ("image_min_tokens", "image_max_tokens"):
    for value in (0, -1, 2**31, 1.5, "9", True):
        PLAIN.refuse(
            f"{name} {value!r}", start_dynamic, f"{name} is {value!r}, must be",
            error=InvalidArgumentError, row=NUMBERS, in_full_only=name == "image_min_tokens",
            **{name: value},
        )  # fmt: skip
PLAIN.refuse(
    "image_min_tokens over image_max_tokens", start_dynamic, "image_max_tokens is 8, must be 9",
    error=InvalidArgumentError, row=NUMBERS, image_min_tokens=9, image_max_tokens=8,
)  # fmt: skip
PLAIN.refuse(
    "media_cache_bytes -1", start_dynamic, "media_cache_bytes is -1, must be",
    error=InvalidArgumentError, row=NUMBERS, media_cache_bytes=-1,
)  # fmt: skip

CASES: list[Case] = [*TOPIC.cases, *HEARS.cases, *PLAIN.cases]
