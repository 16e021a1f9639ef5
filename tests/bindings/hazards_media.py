"""Cases of hazard table 1.10: images with which libmtmd aborts, reads past a buffer, or misreads rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cllm.bindings import Context, EmbeddingBatch, MediaChunk, Model, Projector
from cllm.errors import ClosedError, InUseError, LlamaCallError, ModelLoadError, PositionError
from tests.bindings.hazard_case import INT_MAX, SMALL, Scene, Topic
from tools import make_model, make_projector

TOPIC = Topic()
refuse = TOPIC.refuse
PIXELS = np.zeros((64, 64, 3), np.uint8)


def projector(name: str = "gemma3", **parameters: Any) -> Projector:
    text_model = make_projector.PROJECTORS[name].text_model
    model = Model(make_model.ensure(text_model, "F16"))
    return Projector(model, make_projector.ensure(name), use_gpu=False, **parameters)


def audio_projector() -> Projector:
    model = Model(make_model.ensure("tiny-llama", "F16"))
    return Projector(model, make_projector.ensure("ultravox"), use_gpu=False)


def chunk(name: str = "gemma3", pixels: Any = PIXELS) -> tuple[Projector, MediaChunk]:
    """Return a projector and the first chunk of an image."""
    made = projector(name)
    return made, next(part for part in made.split(pixels) if isinstance(part, MediaChunk))


def decode(
    scene: Scene, name: str = "gemma3", *, p0: int = 0, n_embd: int = 64, **parameters: Any
) -> object:
    """Decode the rows of an image; `parameters` are those of the context."""
    scene.context  # noqa: B018
    made, image = chunk(name)
    context = Context(made._parent, **{**SMALL, **parameters})  # type: ignore[arg-type]
    rows = np.zeros((image.n_tokens, n_embd), np.float32)
    batch = EmbeddingBatch(0, rows, image.positions(p0), is_causal=image.is_causal)
    return context.decode(batch)


refuse(
    "rows that attend to each other over n_ubatch", decode, "(n_ubatch) is 16, must be 1 to 8",
    n_ubatch=8,
)  # fmt: skip
refuse(
    "rows of an image over n_batch", decode, "rows is 64, must be 1 to 32", name="llava", n_batch=32
)
refuse("rows of an image of another width", decode, "n_embd of rows is 32, must be 64", n_embd=32)
refuse("an image past the context", decode, "position is 271, must be", p0=256)
refuse("an image that leaves a gap", decode, "p0 is 5, must be 0", p0=5, error=PositionError)
refuse(
    "a projector of another model",
    lambda s: Projector(Model(make_model.ensure("qwen3-wide", "F16")), make_projector.ensure("gemma3")),
    "mismatch between text model (n_embd = 1024) and mmproj", error=ModelLoadError,
)  # fmt: skip
refuse(
    "a model as projector", lambda s: Projector(s.model, s.path), "Failed to load CLIP",
    error=ModelLoadError,
)  # fmt: skip
refuse(
    "a projector that is garbage",
    lambda s: Projector(s.model, s.file("garbage.gguf", b"GGUF" + b"\xff" * 200)),
    "cannot load", error=ModelLoadError,
)  # fmt: skip
refuse(
    "a projector as model", lambda s: Model(make_projector.ensure("gemma3")), "CLIP cannot be used",
    error=ModelLoadError,
)  # fmt: skip
refuse(
    "a vocabulary without the tokens around a tile",
    lambda s: Projector(
        Model(make_model.ensure("tiny-llama", "F16")), make_projector.ensure("idefics3")
    ),
    "vocabulary lacks a token", error=ModelLoadError,
)  # fmt: skip
for shape in ((0, 8, 3), (8, 0, 3)):
    refuse(
        f"pixels of shape {shape}", lambda s, shape: chunk(pixels=np.zeros(shape, np.uint8)),
        "is 0, must be 1 to 16384", shape=shape,
    )  # fmt: skip
refuse(
    "an image of 2**31 pixels a side",
    lambda s: chunk(pixels=(INT_MAX, INT_MAX)),
    "height is 2147483647",
)
refuse(
    "an image of more than 64 Mi pixels",
    lambda s: chunk(pixels=(16384, 16384)),
    "pixels is 268435456",
)
refuse(
    "an image that is all width", lambda s: chunk("idefics3", np.zeros((1, 16384, 3), np.uint8)),
    "resize target",
    error=LlamaCallError,
)  # fmt: skip


for n_samples in (0, 1, -1, 1 << 32, INT_MAX):
    refuse(
        f"a recording of {n_samples} samples",
        lambda s, n_samples: audio_projector().split_audio(n_samples),
        f"samples is {n_samples}, must be 2 to", n_samples=n_samples,
    )  # fmt: skip
refuse(
    "a recording of one sample", lambda s: audio_projector().split_audio(np.zeros(1, np.float32)),
    "samples is 1, must be 2 to",
)  # fmt: skip
refuse(
    "a recording for a projector of images", lambda s: projector().split_audio(16_000),
    "does not support audio", error=LlamaCallError,
)  # fmt: skip
refuse(
    "an image for a projector of audio", lambda s: audio_projector().split(PIXELS),
    "does not support vision", error=LlamaCallError,
)  # fmt: skip


def encode_tokens() -> object:
    tokens: Any = [1, 2]
    return projector().encode(tokens)


def encode_counted(scene: Scene) -> object:
    made, image = chunk(pixels=(64, 64))
    return made.encode(image)


def use_closed(scene: Scene) -> object:
    made, image = chunk()
    image.close()
    return made.encode(image)


def close_with_chunk(scene: Scene) -> None:
    made, image = chunk()
    made.close()
    image.close()


refuse(
    "a projector for a model without weights",
    lambda s: Projector(Model(s.path, vocab_only=True), make_projector.ensure("gemma3")),
    "it has no weights", error=ModelLoadError,
)  # fmt: skip
refuse("an encode of tokens", lambda s: encode_tokens(), "must be a chunk of this projector")
refuse("an encode without pixels", encode_counted, "placeholder", error=LlamaCallError)
refuse("an encode of a closed chunk", use_closed, "MediaChunk is closed", error=ClosedError)
refuse("closing a projector with an open chunk", close_with_chunk, "MediaChunk", error=InUseError)
for field, value in (
    ("n_threads", 0), ("image_max_tokens", 0), ("image_min_tokens", -1),
    ("image_min_tokens", 1 << 23), ("image_max_tokens", (1 << 24) + 16),
):  # fmt: skip
    refuse(
        f"a projector with {field}={value}", lambda s, given: projector(**given),
        f"{field} is {value}, must be 1 to", given={field: value},
    )  # fmt: skip

CASES = TOPIC.cases
