"""LlamaMediaEncoder: encodes and decodes take turns, and no image leaves a request waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cllm import (
    ClosedError,
    EngineConfig,
    GenerationError,
    InvalidRequestError,
    PromptTooLongError,
)
from cllm.bindings import Model
from cllm.bindings.projector import ChunkShape, RowPositions
from cllm.engine.core.commands import MediaEncoded, MediaMeasured
from cllm.engine.llama import media_encoder
from cllm.engine.llama.media_encoder import FIRST_AIM, LlamaMediaEncoder
from cllm.engine.media import MIN_ROWS, MediaInput
from cllm.engine.thread.backend import Work
from cllm.errors import EncodeCancelledError, LlamaCallError

WAIT_S = 30.0  # nothing takes so long; a hang fails by name
N_ROWS = 8


class ScriptedChunk:
    """A chunk of an image that was never cut."""

    rows_at = RowPositions(np.arange(N_ROWS, dtype=np.int32), np.ones(N_ROWS, np.int32))

    def close(self) -> None:
        """There is nothing to close."""


class ScriptedProjector:
    """A projector whose slices end when the test says so."""

    has_vision = True

    def __init__(self) -> None:
        self.began: SimpleQueue[int] = SimpleQueue()  # a number for each slice
        self.ends: SimpleQueue[bool | Exception] = SimpleQueue()  # True: the last slice of a chunk
        self.measures: SimpleQueue[int] = SimpleQueue()  # a number of samples for each that begins
        self.layouts: SimpleQueue[int | Exception] = SimpleQueue()  # rows of the next
        self.measured: list[int] = []
        self.said: list[str] = []
        self.n_chunks = 1
        self.n_rows = N_ROWS
        self.n_slices = 0

    def __enter__(self) -> ScriptedProjector:
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("closed")

    def layout(self, height: int, width: int) -> list[ChunkShape | list[int]]:
        return [[1], ChunkShape(self.n_rows, self.n_rows, True)]

    def layout_audio(self, n_samples: int) -> list[ChunkShape | list[int]]:
        self.measured.append(n_samples)
        self.measures.put(n_samples)
        end = self.layouts.get(timeout=WAIT_S)
        if isinstance(end, Exception):
            raise end
        return [[1], ChunkShape(end, end, True)]

    def split(self, pixels: object) -> list[object]:
        return [[1], *(ScriptedChunk() for _ in range(self.n_chunks))]

    def encode(self, chunk: object, between: Callable[[], bool]) -> Any:
        while True:
            self.n_slices += 1
            self.said.append(f"slice {self.n_slices}")
            self.began.put(self.n_slices)
            end = self.ends.get(timeout=WAIT_S)
            if isinstance(end, Exception):
                raise end
            if end:
                return np.zeros((N_ROWS, 4), np.float32)
            self.said.append("end of a slice")
            if not between():
                raise EncodeCancelledError("scripted")


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for another thread; a hang fails."""
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0)


class Scene:
    """An encoder over a scripted projector, and what it posts."""

    def __init__(self, **options: Any) -> None:
        self.projector = projector = ScriptedProjector()

        class Encoder(LlamaMediaEncoder):
            def _open(self) -> Any:
                return projector

        class CpuModel:
            is_on_gpu = False

        self.encoder = Encoder(cast(Model, CpuModel()), "mmproj.gguf", EngineConfig(**options))
        self.posted: SimpleQueue[MediaEncoded | MediaMeasured] = SimpleQueue()
        self.images: list[bytes] = []
        self.encoder.start(self.posted.put, self.images.append)

    def encode(self, name: bytes, *ordinals: int) -> None:
        self.encoder.encode(MediaInput(name, b"\0" * 12, (2, 2), len(ordinals)), ordinals)

    def heard(self) -> MediaEncoded | MediaMeasured:
        return self.posted.get(timeout=WAIT_S)

    def encoded(self) -> MediaEncoded:
        """The next chunk or error."""
        while not isinstance(heard := self.heard(), MediaEncoded):
            pass
        return heard


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.projector.ends.put(True)
    made.encoder.close()
    assert made.projector.said[-1] == "closed"


def test_a_decode_waits_for_the_end_of_a_slice_and_no_slice_begins_while_it_runs(
    scene: Scene,
) -> None:
    projector, said = scene.projector, scene.projector.said
    decodes, may_end = threading.Event(), threading.Event()

    def decode() -> None:
        scene.encoder.pause("tokens")
        said.append("decode")
        decodes.set()
        assert may_end.wait(WAIT_S)
        said.append("end of a decode")
        scene.encoder.resume()

    scene.encode(b"a", 0)
    projector.began.get(timeout=WAIT_S)
    thread = threading.Thread(target=decode)
    thread.start()
    wait_until(lambda: scene.encoder._is_decoding)  # it waits for the slice
    projector.ends.put(False)
    assert decodes.wait(WAIT_S)
    may_end.set()
    thread.join(WAIT_S)
    projector.began.get(timeout=WAIT_S)
    projector.ends.put(True)
    assert scene.encoded().error is None
    assert said == ["slice 1", "end of a slice", "decode", "end of a decode", "slice 2"]


def test_a_decode_without_an_image_waits_for_nothing(scene: Scene) -> None:
    for _ in range(3):
        scene.encoder.pause("tokens")
        scene.encoder.resume()


def test_a_cancelled_image_ends_within_a_slice_and_the_next_one_is_encoded(scene: Scene) -> None:
    scene.encode(b"a", 0)
    scene.encode(b"b", 0)
    scene.projector.began.get(timeout=WAIT_S)
    scene.encoder.cancel(b"a")
    scene.projector.ends.put(False)
    scene.projector.began.get(timeout=WAIT_S)
    scene.projector.ends.put(True)
    assert scene.encoded().digest == b"b"


def test_an_image_that_is_cancelled_and_wanted_again_is_encoded(scene: Scene) -> None:
    scene.encode(b"a", 0)
    scene.projector.began.get(timeout=WAIT_S)
    scene.encoder.cancel(b"a")
    scene.encode(b"a", 0)
    for _ in range(2):  # the first encode may go on, or have been cancelled
        scene.projector.ends.put(True)
    assert scene.encoded().digest == b"a"


def test_a_failure_is_reported_for_every_chunk_that_is_left_and_is_not_remembered(
    scene: Scene,
) -> None:
    scene.projector.n_chunks = 3
    scene.encode(b"a", 0, 1, 2)
    scene.projector.ends.put(True)
    scene.projector.ends.put(LlamaCallError("mtmd_batch_encode", 1, "scripted"))
    heard = [scene.encoded() for _ in range(3)]
    assert [(one.ordinal, one.error is None) for one in heard] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    scene.encode(b"a", 1)
    scene.projector.ends.put(True)
    assert scene.encoded().error is None


def test_an_encode_that_ends_without_being_cancelled_is_a_failure(scene: Scene) -> None:
    """A request would wait for the image without end."""
    scene.encode(b"a", 0)
    scene.projector.ends.put(EncodeCancelledError("a signal"))
    assert isinstance(scene.encoded().error, EncodeCancelledError)


def test_the_image_under_way_is_noted_and_then_none(scene: Scene) -> None:
    for name in (b"a", b"b"):
        scene.encode(name, 0)
        scene.projector.ends.put(True)
        assert scene.encoded().digest == name
    scene.encoder.close()
    assert scene.images == [b"a", b"", b"b", b""]


def test_images_are_answered_with_an_error_after_the_thread_has_ended(scene: Scene) -> None:
    notes = iter([None, RuntimeError("scripted")])

    def fail_at_the_second(_: bytes) -> None:
        if (error := next(notes)) is not None:
            raise error

    scene.encoder.start(scene.posted.put, fail_at_the_second)
    scene.encode(b"a", 0)
    scene.projector.began.get(timeout=WAIT_S)
    scene.encode(b"b", 0)
    scene.projector.ends.put(True)
    heard = [scene.encoded() for _ in range(2)]
    assert [(one.digest, one.error is None) for one in heard] == [(b"a", True), (b"b", False)]
    scene.encode(b"c", 0)
    assert isinstance(scene.encoded().error, RuntimeError)
    with pytest.raises(ClosedError, match="has ended"):
        scene.encoder.layout((8, 8))
    scene.encoder.pause("tokens")  # and no decode waits
    scene.encoder.resume()


def test_chunks_of_too_few_rows_are_rejected_by_name(scene: Scene) -> None:
    scene.projector.n_rows = MIN_ROWS - 1
    with pytest.raises(InvalidRequestError, match="4 rows"):
        scene.encoder.layout((8, 8))


# --- Layouts of audio ------------------------------------------------------------------------
def layout_of(scene: Scene, n_samples: int) -> list[int]:
    """The rows of audio, when they are known."""
    while (pieces := scene.encoder.layout((n_samples,))) is None:
        assert isinstance(scene.heard(), MediaMeasured)
    return [piece.n_rows for piece in pieces]


def test_audio_is_measured_beside_the_ticks_and_once(scene: Scene) -> None:
    assert scene.encoder.layout((9,)) is None
    assert scene.projector.measures.get(timeout=WAIT_S) == 9
    assert scene.encoder.layout((9,)) is None
    assert scene.encoder.layout((8, 8)) is not None  # an image meanwhile
    assert scene.encoder.layout((10,)) is None
    for n_rows in (7, 8):
        scene.projector.layouts.put(n_rows)
    assert layout_of(scene, 9) == [0, 7]
    assert layout_of(scene, 10) == [0, 8]
    assert layout_of(scene, 9) == [0, 7]
    assert scene.projector.measured == [9, 10]


def test_audio_that_cannot_be_measured_is_rejected_by_name_and_measured_again(scene: Scene) -> None:
    scene.projector.layouts.put(LlamaCallError("mtmd_tokenize", 1, "scripted"))
    with pytest.raises(InvalidRequestError, match=r"audio is '9 samples'.*scripted"):
        layout_of(scene, 9)
    scene.projector.layouts.put(RuntimeError("scripted"))
    with pytest.raises(GenerationError, match="9 samples was not measured"):
        layout_of(scene, 9)
    scene.projector.layouts.put(7)
    assert layout_of(scene, 9) == [0, 7]
    scene.projector.layouts.put(MIN_ROWS - 1)
    with pytest.raises(InvalidRequestError, match="audio is '4 rows'"):
        layout_of(scene, 10)


def test_audio_that_no_question_waits_for_is_not_measured(scene: Scene) -> None:
    assert scene.encoder.layout((9,)) is None
    assert scene.projector.measures.get(timeout=WAIT_S) == 9
    assert scene.encoder.layout((10,)) is None
    scene.encoder.forget((10,))
    scene.encoder.forget((9,))  # it is under way
    scene.projector.layouts.put(7)
    assert isinstance(scene.heard(), MediaMeasured)
    assert layout_of(scene, 9) == [0, 7]
    assert scene.projector.measured == [9]


def test_audio_with_more_rows_than_a_sequence_is_not_measured(scene: Scene) -> None:
    scene.encoder.audio_sample_rate, scene.encoder._rows_per_window = 16_000, 50
    scene.encoder.n_rows_max = 100
    with pytest.raises(PromptTooLongError, match="150 tokens > 100"):
        scene.encoder.layout((3 * 30 * 16_000,))
    assert scene.projector.measured == []


def test_an_encoder_is_closed_while_it_measures(scene: Scene) -> None:
    assert scene.encoder.layout((9,)) is None
    assert scene.projector.measures.get(timeout=WAIT_S) == 9
    assert scene.encoder.layout((10,)) is None
    closing = threading.Thread(target=scene.encoder.close)
    closing.start()
    wait_until(lambda: scene.encoder._is_stopping)
    scene.projector.layouts.put(7)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert scene.projector.measured == [9]


def test_no_audio_is_measured_after_the_thread_has_ended(scene: Scene) -> None:
    def fail(_: bytes) -> None:
        raise RuntimeError("scripted")

    assert scene.encoder.layout((9,)) is None
    assert scene.projector.measures.get(timeout=WAIT_S) == 9
    assert scene.encoder.layout((10,)) is None
    scene.encoder.start(scene.posted.put, fail)
    scene.encode(b"a", 0)
    assert scene.encoded().error is not None
    assert isinstance(scene.heard(), MediaMeasured)  # the thread ends: the next is not begun
    scene.projector.layouts.put(7)
    scene.encoder._thread.join(WAIT_S)
    for n_samples in (10, 11):  # one that waited, and a new one
        with pytest.raises(ClosedError, match="has ended"):
            scene.encoder.layout((n_samples,))


def test_a_system_without_threads_fails_one_question_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [RuntimeError("can't start new thread")]

    def refuse_once(thread: threading.Thread) -> None:
        if left and thread.name == "cllm-layout":
            raise left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with pytest.raises(RuntimeError, match="new thread"):
        scene.encoder.layout((9,))
    scene.projector.layouts.put(7)
    assert layout_of(scene, 9) == [0, 7]


@pytest.mark.parametrize(
    ("target_itl_ms", "works", "decode_s", "turn_s"),
    [
        (None, ["tokens", "tokens"], 0.02, 0.02),
        (None, ["tokens", "media", "tokens"], 0.02, 0.04),
        (100, ["tokens", "tokens"], 0.02, FIRST_AIM * 0.1 - 0.02),
        (100, ["tokens", "tokens"], 0.2, 0.01),
        (100, ["tokens", "media", "tokens"], 0.02, 0.0),
        (100, ["tokens", "prompts"], 0.02, 0.0),
        (100, ["prompts", "tokens"], 0.02, FIRST_AIM * 0.1),
        (100, ["tokens", "texts"], 0.02, FIRST_AIM * 0.1 - 0.02),
    ],
    ids=[
        "without a target as long as the decode",
        "without a target as long as both decodes",
        "what the target leaves",
        "a tenth of the target",
        "rows of an image fill the gap",
        "rows of prompts fill the gap",
        "the next decode has no prompts",
        "texts give turns",
    ],
)
def test_the_turn_of_an_encode_before_a_decode(
    monkeypatch: pytest.MonkeyPatch,
    target_itl_ms: float | None,
    works: list[Work],
    decode_s: float,
    turn_s: float,
) -> None:
    encoder = Scene(target_itl_ms=target_itl_ms).encoder
    now = 0.0
    monkeypatch.setattr(media_encoder, "time", SimpleNamespace(monotonic=lambda: now))
    turns: list[float] = []
    turn_of = encoder._turn_s

    def turn(work: Work, at: float) -> float:
        turns.append(turn_of(work, at))
        return 0.0  # no slice would end it

    monkeypatch.setattr(encoder, "_turn_s", turn)
    encoder._wants_turn = True
    for work in works:
        encoder.pause(work)
        now += decode_s
        encoder.resume()
    assert turns[-1] == pytest.approx(turn_s)
    encoder._wants_turn = False
    encoder.close()


def test_an_encode_resumes_where_no_decode_follows(scene: Scene) -> None:
    """A stream that has ended, or whose reader is slow, does not hold the encoder."""
    scene.encode(b"a", 0)
    scene.projector.began.get(timeout=WAIT_S)
    scene.projector.ends.put(False)
    scene.projector.began.get(timeout=WAIT_S)

    def decode() -> None:
        scene.encoder.pause("media")
        scene.encoder.resume()

    thread = threading.Thread(target=decode)
    thread.start()
    wait_until(lambda: scene.encoder._is_decoding)
    scene.projector.ends.put(False)
    thread.join(WAIT_S)
    scene.projector.began.get(timeout=WAIT_S)  # by itself
    scene.projector.ends.put(True)
    assert scene.encoded().error is None
