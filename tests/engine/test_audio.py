"""Audio in prompts of a real engine: files of any kind, shared, saved, continued, rejected."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from cllm import (
    Audio,
    Completion,
    Engine,
    Image,
    InvalidArgumentError,
    InvalidRequestError,
    PromptTooLongError,
    SavedGeneration,
)
from cllm.engine.core.commands import Ask, Withdraw
from cllm.engine.thread.mailbox import Inbox
from tests.conftest import QUIET, on_either_loop
from tests.engine.test_images import answers_at_once
from tools import make_model, make_projector
from tools.make_projector import AUDIO

RATE = 16_000
N_ROWS = 50  # of each 30 s
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
FORMATS = {
    "WAV": "PCM_16", "FLAC": "PCM_24", "OGG": "VORBIS", "AIFF": "PCM_16", "MP3": "MPEG_LAYER_III",
}  # fmt: skip


def samples(seed: int, n_samples: int = RATE) -> NDArray[np.float32]:
    """Return a tone with overtones, and some noise."""
    rng, at = np.random.default_rng(seed), np.arange(n_samples) / RATE
    tones = np.sin(2 * np.pi * np.outer(rng.uniform(100, 3000, 3), at)).sum(axis=0)
    return np.asarray((tones / 4 + rng.normal(0, 0.05, n_samples)).clip(-1, 1), np.float32)


def engine_of(name: str = "ultravox", kind: type[Engine] = Engine, **options: Any) -> Engine:
    model = make_model.ensure(AUDIO[name].text_model)
    options = {"n_ctx": 1024, "preflight": False, **QUIET, **options}
    return kind(model, mmproj=make_projector.ensure(name), **options)


def question(seed: int, n_samples: int = RATE) -> Sequence[str | Audio]:
    return ["hear: ", Audio(samples(seed, n_samples)), " what?"]


async def answers(engine: Engine, prompts: Sequence[Sequence[str | Audio]]) -> list[Completion]:
    return [await engine.generate(prompt, **GREEDY, logprobs=1) for prompt in prompts]


def file_of(kind: str, values: NDArray[Any], rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, values, rate, format=kind, subtype=FORMATS[kind])
    return file.getvalue()


@pytest.mark.anyio
@on_either_loop("name", AUDIO)
async def test_audio_is_computed_once_and_answers_depend_on_it(name: str) -> None:
    async with engine_of(name) as engine:
        assert (engine.model.modalities, engine.model.audio_sample_rate) == (
            ("text", "audio"),
            RATE,
        )
        first, again, other = await answers(engine, [question(1), question(1), question(2)])
        assert first.token_ids == again.token_ids
        assert first.logprobs is not None
        assert other.logprobs is not None
        assert first.logprobs[0].logprob != other.logprobs[0].logprob
        assert (first.usage.n_audio_tokens, first.usage.n_image_tokens) == (N_ROWS, 0)
        assert again.usage.n_cached >= N_ROWS > other.usage.n_cached
        assert await engine.audit() == []


@pytest.mark.anyio
@on_either_loop("name", AUDIO)
async def test_audio_is_as_many_chunks_as_windows_of_30_s(name: str) -> None:
    async with engine_of(name, deterministic=True) as engine:
        (whole,) = await answers(engine, [question(1, 65 * RATE)])
        assert whole.usage.n_audio_tokens == 3 * N_ROWS
        assert await engine.audit() == []
    async with engine_of(name, deterministic=True, n_batch=16) as engine:
        (pieces,) = await answers(engine, [question(1, 65 * RATE)])
    assert pieces.token_ids == whole.token_ids


@pytest.mark.anyio
@on_either_loop("name", AUDIO)
async def test_recordings_of_requests_at_once_give_the_answers_of_each_alone(name: str) -> None:
    prompts = [[*question(i % 3), " and ", *question(4)] for i in range(6)]
    together = await answers_at_once(partial(engine_of, name), prompts)
    assert [c.usage.n_audio_tokens for c in together] == [2 * N_ROWS] * 6


@pytest.mark.anyio
async def test_audio_works_with_the_engine_in_a_process_of_its_own() -> None:
    async with engine_of() as engine:
        expected = await answers(engine, [question(1), question(2, 31 * RATE)])
    async with engine_of(process=True) as engine:
        found = await answers(engine, [question(1), question(2, 31 * RATE)])
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.usage.n_audio_tokens for c in found] == [N_ROWS, 2 * N_ROWS]


# --- Files -----------------------------------------------------------------------------------
@pytest.mark.anyio
@pytest.mark.parametrize("kind", FORMATS)
async def test_files_are_decoded_from_bytes_and_paths(kind: str, tmp_path: Path) -> None:
    content = file_of(kind, samples(1))
    (tmp_path / "recording").write_bytes(content)
    async with engine_of() as engine:
        first = await engine.generate(["hear: ", Audio(content), "?"], **GREEDY)
        again = await engine.generate(["hear: ", Audio(tmp_path / "recording"), "?"], **GREEDY)
        assert first.usage.n_audio_tokens == N_ROWS
        assert again.usage.n_cached >= N_ROWS
        if kind == "FLAC":  # exact: the same samples as an array
            values, _ = soundfile.read(io.BytesIO(content), dtype="float32")
            same = await engine.generate(["hear: ", Audio(values), "?"], **GREEDY)
            assert same.usage.n_cached >= N_ROWS


@pytest.mark.anyio
@pytest.mark.parametrize("rate", [8_000, 44_100])
async def test_the_channels_and_the_rate_of_a_file_become_those_of_the_model(rate: int) -> None:
    at = np.arange(2 * rate) / rate
    tone = np.sin(2 * np.pi * 440 * at).astype(np.float32) / 2
    stereo = np.stack([tone, tone / 2], axis=1)
    async with engine_of() as engine:
        file = await engine.generate(
            ["hear: ", Audio(file_of("FLAC", stereo, rate)), "?"], **GREEDY
        )
        array = await engine.generate(["hear: ", Audio(stereo, rate), "?"], **GREEDY)
    assert file.usage.n_audio_tokens == array.usage.n_audio_tokens == N_ROWS


@pytest.mark.parametrize(
    "given",
    [samples(1), samples(1).astype(np.float64), np.stack([samples(1)] * 2, axis=1)],
    ids=["float32", "float64", "two channels"],
)
def test_arrays_are_the_mean_of_their_channels(given: NDArray[Any]) -> None:
    assert np.allclose(Audio(given).read(), samples(1), atol=1e-6)


def test_integers_are_scaled_and_samples_are_copied() -> None:
    given = np.array([-32768, 0, 16384], np.int16)
    audio = Audio(given)
    given[:] = 0
    found = audio.read()
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [-1.0, 0.0, 0.5]


def test_samples_beyond_one_are_clipped() -> None:
    found = Audio(np.array([30_000.0, -5.0, 1e300, 0.5])).read()
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [1.0, -1.0, 1.0, 0.5]


def test_samples_as_a_file_are_the_same_samples() -> None:
    values, rate = soundfile.read(io.BytesIO(Audio(samples(1), 8_000).file()), dtype="float32")
    assert rate == 8_000
    assert (values == samples(1)).all()


# --- Wrong audio -----------------------------------------------------------------------------
WRONG: dict[str, tuple[Any, str]] = {
    "no file": (b"hello, this is a text", "an intact WAV, FLAC, MP3, Ogg or AIFF file"),
    "cut off": (file_of("FLAC", samples(1))[:60], "an intact WAV, FLAC, MP3, Ogg or AIFF file"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(64), "an intact WAV"),
    "one sample": (file_of("WAV", samples(1)[:1]), "2 to 33554432 samples"),
    "no sample": (file_of("WAV", samples(1)[:0]), "2 to 33554432 samples"),
    "a slow rate": (file_of("WAV", samples(1), 100), "1000 to 768000 samples a second"),
    "many channels": (file_of("WAV", np.zeros((9, 65), np.float32)), "1 to 64 channels"),
    "no such file": (Path("/nowhere/a.wav"), "a file that can be read"),
    "a directory": (Path("/"), "a file that can be read"),
}


@pytest.mark.anyio
async def test_wrong_audio_is_rejected_by_name_and_the_engine_goes_on() -> None:
    async with engine_of() as engine:
        async with engine.stream("a", max_tokens=400, temperature=0, ignore_eos=True) as stream:
            await anext(stream)
            for name, (source, limit) in WRONG.items():
                with pytest.raises(InvalidRequestError, match=r"^prompt\[1\] ") as caught:
                    await engine.generate(["hear: ", Audio(source), "?"], **GREEDY)
                assert limit in str(caught.value), name
            assert len((await stream.completion()).token_ids) == 400
        assert await engine.audit() == []


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (np.zeros((2, 2, 2), np.float32), "shape (n_samples,)"),
        (np.zeros(9, np.int32), "float32, float64 or int16"),
        (np.array([1, np.nan], np.float32), "finite"),
        (np.zeros(1, np.float32), "2 to 33554432 samples"),
        (np.zeros((2**25) + 1, np.int16), "2 to 33554432 samples"),
        (b"", "1 to 67108864 bytes"),
        (7, "a path, the bytes of a file, or an array"),
    ],
    ids=["shape", "dtype", "nan", "one", "long", "empty", "number"],
)
def test_a_source_of_another_kind_is_rejected(source: Any, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Audio(source)
    assert caught.value.field == "audio"
    assert limit in str(caught.value)


def test_a_sample_rate_is_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="sample_rate"):
        Audio(samples(1), 0)


@pytest.mark.anyio
async def test_media_that_the_projector_does_not_take_is_left_out_by_name() -> None:
    image = Image(np.zeros((64, 64, 3), np.uint8))
    async with engine_of() as engine:
        with pytest.raises(InvalidRequestError, match=r"prompt\[0\].* takes no images"):
            await engine.generate([image, "?"], **GREEDY)
    sees = Engine(
        make_model.ensure("tiny-llama"), mmproj=make_projector.ensure("llava"), n_ctx=512,
        preflight=False, **QUIET,
    )  # fmt: skip
    async with sees as engine:
        assert (engine.model.modalities, engine.model.audio_sample_rate) == (("text", "image"), 0)
        with pytest.raises(InvalidRequestError, match=r"prompt\[0\].* takes no audio"):
            await engine.generate([Audio(samples(1)), "?"], **GREEDY)
    async with Engine(n_ctx=512, **QUIET) as engine:
        with pytest.raises(InvalidRequestError, match=r"prompt\[0\].*no projector \(mmproj\)"):
            await engine.generate([Audio(samples(1)), "?"], **GREEDY)


@pytest.mark.anyio
async def test_audio_longer_than_the_context_is_rejected() -> None:
    async with engine_of(n_ctx=256) as engine:
        # Six windows: 250 rows are certain, so that they are counted.
        with pytest.raises(PromptTooLongError, match="301 tokens"):
            await engine.generate(["", Audio(samples(1, 170 * RATE))], **GREEDY)
        # 300 rows are certain: it is not measured.
        with pytest.raises(PromptTooLongError, match="300 tokens"):
            await engine.generate(["", Audio(samples(1, 180 * RATE))], **GREEDY)


@pytest.mark.anyio
@pytest.mark.parametrize("process", [False, True])
async def test_a_request_that_leaves_while_its_audio_is_measured_disturbs_nothing(
    process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()
    put = Inbox.put

    def note(inbox: Inbox, command: Any) -> None:
        asked.append(command)
        put(inbox, command)

    async with engine_of(process=process) as engine:
        monkeypatch.setattr(Inbox, "put", note)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answers, engine, [question(1, 40 * RATE)])
                while not any(isinstance(one, Ask) for one in asked):
                    await anyio.sleep(0)
                scope.cancel()
        assert isinstance(asked[-1], Withdraw)
        (found,) = await answers(engine, [question(1, 40 * RATE)])
        assert found.usage.n_audio_tokens == 2 * N_ROWS
        assert await engine.audit() == []


# --- Chats, suspended requests ---------------------------------------------------------------
@pytest.mark.anyio
async def test_audio_in_a_message_is_where_the_template_puts_the_message() -> None:
    part = Audio(samples(1)).part()
    content: list[Any] = [
        {"type": "text", "text": "hear: "}, part, {"type": "audio", "audio": Audio(samples(2))},
        {"type": "text", "text": "what?"},
    ]  # fmt: skip
    async with engine_of() as engine:
        messages: list[Any] = [{"role": "user", "content": content}]
        rendered = await engine.render_chat(messages)
        assert "hear: <audio><audio>what?" in rendered.text
        said = await engine.chat(messages, **GREEDY)
        assert said.usage.n_audio_tokens == 2 * N_ROWS
        with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.content\[0\]"):
            await engine.chat(
                [{"role": "assistant", "content": "a"}, {"role": "system", "content": [part]}]
            )


@pytest.mark.anyio
async def test_audio_in_a_result_of_a_tool_becomes_words_without_an_encoder() -> None:
    result = [{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]
    messages: list[Any] = [
        {"role": "user", "content": "play"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "play", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": result},
    ]  # fmt: skip
    async with Engine(n_ctx=512, **QUIET) as engine:
        said = await engine.chat(messages, max_tokens=4, temperature=0)
        assert said.usage.n_audio_tokens == 0


@pytest.mark.anyio
async def test_a_suspended_request_continues_from_a_file(tmp_path: Path) -> None:
    async with engine_of(stream_buffer=2) as engine:  # it still runs when it is suspended
        (expected,) = await answers(engine, [question(1)])
        async with engine.stream(question(1), **GREEDY, request_id="r") as stream:
            await anext(stream)
            saved = await stream.suspend()
        saved.save(tmp_path / "saved")
    async with engine_of() as engine:
        loaded = SavedGeneration.load(tmp_path / "saved")
        async with engine.resume(loaded) as stream:
            again = await stream.completion()
    assert again.token_ids == expected.token_ids
    assert again.usage.n_audio_tokens == N_ROWS
