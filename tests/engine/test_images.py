"""Images in prompts of a real engine: every kind of projector and layout, shared, saved, continued, rejected."""

from __future__ import annotations

import base64
import errno
import io
import signal
import subprocess
import zlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image as Pillow

import cllm
from cllm import (
    Audio,
    ClosedError,
    Completion,
    Embedder,
    Engine,
    GenerationError,
    Image,
    InvalidArgumentError,
    InvalidRequestError,
    PromptTooLongError,
    RequestError,
    SavedGeneration,
)
from cllm.engine.loop.media_reader import Decoder
from cllm.engine.media_child import pixels_of
from cllm.engine.media_limits import MAX_FILE_BYTES
from cllm.engine.media_parts import media_of
from cllm.testing import FakeEngine
from tests.conftest import QUIET, examples, on_either_loop
from tests.engine.test_lifecycle import run_child
from tests.engine.test_process import send
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "a sequence each": {"kv_unified": False, "n_seq_max": 2, "n_ctx": 2048},
    "deterministic": {"deterministic": True, "n_seq_max": 2, "n_ctx": 2048},
}
CASES = [f"{name}, {layout}" for name in PROJECTORS for layout in LAYOUTS]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def pixels(seed: int, height: int = 64, width: int = 96) -> NDArray[np.uint8]:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3), np.uint8)


def image(seed: int) -> Image:
    return Image(pixels(seed))


def engine_of(name: str, kind: type[Engine] = Engine, **options: Any) -> Engine:
    """An engine with the projector of this name and its text model."""
    model = make_model.ensure(PROJECTORS[name].text_model)
    options = {"n_ctx": 1024, "preflight": False, **QUIET, **options}
    return kind(model, mmproj=make_projector.ensure(name), **options)


def question(seed: int, text: str = " what?") -> Sequence[str | Image]:
    return ["look: ", image(seed), text]


async def answers(engine: Engine, prompts: Sequence[Sequence[str | Image]]) -> list[Completion]:
    return [await engine.generate(prompt, **GREEDY) for prompt in prompts]


@pytest.mark.anyio
@on_either_loop("case", CASES)
async def test_an_image_is_computed_once_and_answers_depend_on_it(case: str) -> None:
    name, _, layout = case.partition(", ")
    async with engine_of(name, **LAYOUTS[layout]) as engine:
        assert engine.model.modalities == ("text", "image")
        first, again, other = await answers(engine, [question(1), question(1), question(2)])
        assert first.token_ids == again.token_ids != other.token_ids
        n_image = first.usage.n_image_tokens
        assert 0 < n_image < first.usage.n_prompt
        if layout == "shared":
            assert again.usage.n_cached >= n_image
        assert other.usage.n_cached < n_image
        assert await engine.audit() == []


@pytest.mark.anyio
@on_either_loop("name", [name for name in PROJECTORS if name != "gemma3"])
async def test_an_image_that_is_decoded_in_pieces_gives_the_same_answer(name: str) -> None:
    async with engine_of(name) as engine:
        expected = await answers(engine, [question(1)])
    async with engine_of(name, n_batch=16, n_seq_max=4) as engine:
        found = await answers(engine, [question(1)])
        assert engine.statistics().n_ticks > expected[0].usage.n_prompt // 16
    assert found[0].token_ids == expected[0].token_ids


async def answers_at_once(
    start: Callable[..., Engine], prompts: Sequence[Sequence[str | Image | Audio]]
) -> list[Completion]:
    """The answers of requests at once, which are those of each alone."""
    options: dict[str, Any] = {"deterministic": True, "n_seq_max": 4, "n_ctx": 4096}
    async with start(prefix_cache=False, **options) as engine:
        alone = [await engine.generate(prompt, **GREEDY) for prompt in prompts]
    async with start(**options) as engine:
        together: list[Completion] = await engine.generate_all(prompts, **GREEDY)
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        assert await engine.audit() == []
    return together


@pytest.mark.anyio
@on_either_loop("name", PROJECTORS)
async def test_images_of_requests_at_once_give_the_answers_of_each_alone(name: str) -> None:
    prompts: list[Sequence[str | Image]] = [
        [f"{i}: ", image(i % 3), " and ", image(4), f" {i}?"] for i in range(6)
    ]
    await answers_at_once(partial(engine_of, name), prompts)


@pytest.mark.anyio
async def test_images_work_with_the_engine_in_a_process_of_its_own_and_over_its_crash() -> None:
    async with engine_of("qwen2vl") as engine:
        (expected,) = await answers(engine, [question(1)])
    async with engine_of("qwen2vl", process=True) as engine:
        assert (await answers(engine, [question(1)]))[0].token_ids == expected.token_ids
        async with engine.stream(question(1), temperature=0, max_tokens=8, ignore_eos=True) as s:
            tokens = list((await anext(s)).token_ids)
            send(engine, signal.SIGKILL)
            async for delta in s:
                tokens += delta.token_ids
        assert tuple(tokens) == expected.token_ids


class Poisonous(Engine):
    _child_backend = "tests.engine.process.poisonous:PoisonousBackend"


@pytest.mark.anyio
async def test_an_image_that_aborts_the_encoder_ends_its_own_request_alone() -> None:
    poison = pixels(9)
    poison[0, 0] = 255, 0, 255
    prompts: list[Any] = [question(1), ["look: ", Image(poison)], question(2), "count: "]
    options: dict[str, Any] = {"deterministic": True, "n_seq_max": 4, "n_ctx": 4096}
    async with engine_of("qwen2vl", **options) as engine:
        wholes = await answers(engine, [prompt for prompt in prompts if prompt is not prompts[1]])
    async with engine_of("qwen2vl", process=True, kind=Poisonous, **options) as engine:
        found = await engine.generate_all(prompts, return_exceptions=True, **GREEDY)
        failed = found.pop(1)
        assert isinstance(failed, GenerationError)
        assert "GGML_ASSERT(pixel != poison) failed" in str(failed.__cause__)
        assert [c.token_ids for c in found] == [c.token_ids for c in wholes]
        assert engine.statistics().n_restarts <= 3
        assert await engine.audit() == []


class KilledOnce(Engine):
    _child_backend = "tests.engine.process.poisonous:KilledOnceAtAnImage"


@pytest.mark.anyio
@on_either_loop(
    "case",
    [f"{name} {at}" for name in ("gemma3", "qwen2vl") for at in ("encode", "decode", "after")],
)
async def test_every_answer_is_right_when_the_process_is_killed_at_an_image(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, point = case.split()
    monkeypatch.setenv("CLLM_TEST_POINT", point)
    monkeypatch.setenv("CLLM_TEST_MARKS", str(tmp_path / "killed"))
    prompts: list[Any] = ["count: ", question(1), question(1), question(2)]
    options: dict[str, Any] = {"deterministic": True, "n_seq_max": 4, "n_ctx": 4096}
    async with engine_of(name, **options) as engine:
        expected = await answers(engine, prompts)
    async with engine_of(name, process=True, kind=KilledOnce, **options) as engine:
        found: list[Completion] = await engine.generate_all(prompts, **GREEDY)
        assert engine.statistics().n_restarts == 1
        assert await engine.audit() == []
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    counts = [c.usage.n_image_tokens for c in found]
    assert counts == [c.usage.n_image_tokens for c in expected]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["gemma3", "qwen2vl"])
async def test_a_suspended_request_continues_from_a_file_and_a_fork_has_the_image(
    name: str, tmp_path: Path
) -> None:
    async with engine_of(name) as engine:
        (expected,) = await answers(engine, [question(1)])
        async with engine.stream(question(1), **GREEDY) as stream:
            await anext(stream)
            (fork,) = stream.fork(1)
            async with fork:
                assert (await fork.completion()).token_ids == expected.token_ids
            saved = await stream.suspend()
    saved.save(tmp_path / "saved")
    async with (
        engine_of(name) as engine,
        engine.resume(SavedGeneration.load(tmp_path / "saved")) as s,
    ):
        assert (await s.completion()).token_ids == expected.token_ids


@pytest.mark.anyio
async def test_an_answer_about_an_image_is_restored_from_a_file_of_the_prefix_cache(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"prefix_cache_dir": tmp_path, "n_ctx": 1024}
    async with engine_of("qwen2vl", **options) as engine:
        (expected,) = await answers(engine, [question(1)])
    async with engine_of("qwen2vl", **options) as engine:
        (again,) = await answers(engine, [question(1)])
        assert again.token_ids == expected.token_ids
        assert again.usage.n_cached >= again.usage.n_image_tokens


@pytest.mark.anyio
async def test_drafts_from_the_prompt_leave_images_alone() -> None:
    async with engine_of("qwen2vl") as engine:
        (expected,) = await answers(engine, [["ab ab ", image(1), " ab ab"]])
    async with engine_of("qwen2vl", speculation="ngram") as engine:
        (drafted,) = await answers(engine, [["ab ab ", image(1), " ab ab"]])
        assert drafted.token_ids == expected.token_ids


@pytest.mark.anyio
async def test_a_request_that_leaves_while_its_image_is_encoded_disturbs_nothing() -> None:
    async with engine_of("llava") as engine:
        with anyio.move_on_after(0):
            await engine.generate(question(1), **GREEDY)
        async with engine.stream(question(3), **GREEDY):
            pass  # left at once, perhaps in the middle of the encode
        (answer,) = await answers(engine, [question(2)])
        assert answer.usage.n_output == 8
        assert await engine.audit() == []


# --- Chats ---------------------------------------------------------------------------------------
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def said(*parts: str | Image, role: str = "user") -> list[dict[str, Any]]:
    """One message with these texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": role, "content": content}]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
async def test_an_image_in_a_message_is_where_the_template_puts_the_message(name: str) -> None:
    async with engine_of(name, chat_template=PLAIN) as engine:
        (expected,) = await answers(engine, [question(1)])
        messages = said(*question(1))
        answer = await engine.chat(messages, **GREEDY)
        assert answer.prompt_token_ids == expected.prompt_token_ids
        assert answer.token_ids == expected.token_ids
        rendered = await engine.render_chat(messages)
        assert rendered.text == "look: <image> what?"
        assert rendered.token_ids == expected.prompt_token_ids
        two = await engine.render_chat(said("a", "b", image(1), image(2), "c", "d"))
        assert two.text == "a\nb<image><image>c\nd"


@pytest.mark.anyio
async def test_a_suspended_chat_about_an_image_continues_from_a_file(tmp_path: Path) -> None:
    async with engine_of("qwen2vl", chat_template=PLAIN) as engine:
        expected = await engine.chat(said(*question(1)), **GREEDY)
        async with engine.stream_chat(said(*question(1)), **GREEDY) as stream:
            await anext(stream)
            saved = await stream.suspend()
        saved.save(tmp_path / "saved")
        loaded = SavedGeneration.load(tmp_path / "saved")
        async with engine.resume(loaded) as resumed:
            assert (await resumed.completion()).token_ids == expected.token_ids


@pytest.mark.anyio
async def test_a_score_takes_no_image() -> None:
    async with engine_of("qwen2vl") as engine:
        with pytest.raises(InvalidRequestError, match="must be a string or a sequence of token"):
            await engine.score(question(1), "a")


@pytest.mark.anyio
async def test_an_embedder_takes_no_projector() -> None:
    with pytest.raises(InvalidArgumentError, match=r"mmproj .* must be None"):
        async with Embedder(mmproj=make_projector.ensure("qwen2vl")):
            pass


@pytest.mark.anyio
async def test_images_that_a_chat_cannot_show_are_rejected() -> None:
    twice = PLAIN + PLAIN
    for template in ("none of it", twice):
        async with engine_of("qwen2vl", chat_template="{{ '' }}" + template) as engine:
            with pytest.raises(InvalidRequestError, match="does not show each image once"):
                await engine.chat(said(image(1)), **GREEDY)
    async with engine_of("qwen2vl", chat_template=PLAIN) as engine:
        for messages, words in (
            (
                said(image(1), role="system"),
                "only messages of users and results of tools have images",
            ),
            (
                [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}],
                "a cllm.Image",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await engine.chat(messages, **GREEDY)


# --- What is rejected ----------------------------------------------------------------------------
def released() -> memoryview:
    """A buffer that cannot be read any more."""
    view = memoryview(b"123")
    view.release()
    return view


def file_of(kind: str, **options: Any) -> bytes:
    """The bytes of a file with an image."""
    written = io.BytesIO()
    Pillow.fromarray(pixels(1)).save(written, kind, **options)
    return written.getvalue()


@pytest.mark.anyio
@on_either_loop("kind", ["PNG", "BMP", "GIF", "JPEG", "WEBP"])
async def test_files_are_decoded_from_bytes_and_paths(kind: str, tmp_path: Path) -> None:
    data = file_of(kind)
    path = tmp_path / "image"
    path.write_bytes(data)
    async with engine_of("qwen2vl") as engine:
        one, two = await answers(engine, [["a", Image(data)], ["a", Image(path)]])
        assert one.token_ids == two.token_ids
        if kind in ("PNG", "BMP"):
            (array,) = await answers(engine, [["a", image(1)]])
            assert array.token_ids == one.token_ids


@pytest.mark.anyio
async def test_wrong_images_are_rejected_by_name_and_the_engine_goes_on(tmp_path: Path) -> None:
    png = file_of("PNG")
    huge = bytearray(png)
    huge[16:24] = (50_000).to_bytes(4, "big") * 2  # width and height in the header
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    wrong: dict[str, bytes | Path] = {
        "50000×50000 pixels": bytes(huge),
        "an intact PNG": png[: len(png) // 2],
        "an intact PNG, JPEG, WebP, BMP or GIF": b"GGUF" * 99,
        "can be read": tmp_path / "none.png",
    }
    async with engine_of("qwen2vl") as engine:
        for words, source in wrong.items():
            with pytest.raises(InvalidRequestError, match=words) as caught:
                await engine.generate(["a", Image(source)], **GREEDY)
            assert caught.value.field == "prompt[1]"
        with pytest.raises(InvalidRequestError, match="texts, images and audio"):
            await engine.generate(["a", image(1), 5], **GREEDY)
        with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
            await engine.generate(question(1), prompt_logprobs=1, **GREEDY)
        assert (await answers(engine, [question(1)]))[0].usage.n_output == 8


@pytest.mark.parametrize(
    "source",
    [
        b"",
        5,
        "",
        "a\0b",
        "a\ud800",
        pixels(1)[..., 0],
        pixels(1).astype(np.float32),
        pixels(1, 1, 20_000),
        memoryview(bytes(MAX_FILE_BYTES + 8)).cast("Q"),
        released(),
    ],
    ids=[
        "no bytes",
        "a number",
        "no path",
        "NUL",
        "no name",
        "grey",
        "floats",
        "too wide",
        "too long",
        "released",
    ],
)
def test_a_source_of_another_kind_is_rejected(source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="image is"):
        cllm.Image(source)


@pytest.mark.anyio
async def test_an_engine_without_a_projector_says_so() -> None:
    async with Engine(n_ctx=256, preflight=False) as engine:
        assert engine.model.modalities == ("text",)
        with pytest.raises(InvalidRequestError, match="no projector"):
            await engine.generate(question(1), **GREEDY)


@pytest.mark.anyio
async def test_a_saved_request_needs_a_projector_that_cuts_its_images_alike() -> None:
    async with (
        engine_of("qwen2vl", stream_buffer=2) as engine,  # it still runs when it is suspended
        engine.stream(question(1), **GREEDY) as stream,
    ):
        await anext(stream)
        saved = await stream.suspend()
    model = make_model.ensure(PROJECTORS["qwen2vl"].text_model)
    async with Engine(model, n_ctx=1024, preflight=False, **QUIET) as engine:
        with pytest.raises(InvalidRequestError, match="no projector"):
            async with engine.resume(saved):
                pass
    async with engine_of("qwen2vl", image_max_tokens=9) as engine:
        with pytest.raises(InvalidRequestError, match="this engine's projector"):
            async with engine.resume(saved):
                pass
        (answer,) = await answers(engine, [question(1)])
        assert answer.usage.n_image_tokens <= 9


@pytest.mark.anyio
async def test_a_prompt_with_more_images_than_the_context_holds_is_rejected_early() -> None:
    async with engine_of("gemma3", n_ctx=64) as engine:
        with pytest.raises(PromptTooLongError):
            await engine.generate([image(n) for n in range(9)], **GREEDY)


def test_a_projector_of_another_model_is_rejected_at_load() -> None:
    """libmtmd loses the memory of such a projector, so the test runs in a child without a search for leaks."""
    done = run_child(f"""
        import cllm
        async def main():
            try:
                async with Engine(mmproj={str(make_projector.ensure("qwen2vl"))!r}, preflight=False):
                    pass
            except cllm.ModelLoadError:
                os._exit(7)
        anyio.run(main)
    """)
    assert done.returncode == 7, done.stderr[-2000:]


@pytest.mark.anyio
async def test_the_projector_beside_the_model_is_found(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.symlink_to(make_model.ensure(PROJECTORS["qwen2vl"].text_model))
    async with Engine(model, mmproj="auto", n_ctx=512, preflight=False) as engine:
        assert engine.model.modalities == ("text",)
    (tmp_path / "mmproj-F16.gguf").symlink_to(make_projector.ensure("qwen2vl"))
    async with Engine(model, mmproj="auto", n_ctx=512, preflight=False) as engine:
        assert engine.model.modalities == ("text", "image")


# --- What is seen of them ----------------------------------------------------------------------------
@pytest.mark.anyio
async def test_the_slots_show_where_images_are() -> None:
    prompt: list[Any] = ["ab", image(1), "c", image(2)]
    async with (
        FakeEngine(lambda prompt: "d" * 99, n_ctx=4096, stream_buffer=2) as engine,
        engine.stream(prompt) as stream,
    ):
        await anext(stream)
        running = [slot for slot in await engine.slots() if slot.request_id is not None]
        (slot,) = running
        assert slot.media == ((2, 8), (9, 15))
        assert slot.n_prompt == 15


# --- Memory ------------------------------------------------------------------------------------------
@pytest.mark.anyio
async def test_a_request_reads_its_images_when_open_requests_hold_few_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt: list[Any] = ["a", image(1)]
    monkeypatch.setattr("cllm.engine.loop.media_reader.MAX_OPEN_BYTES", 1)
    async with FakeEngine(lambda prompt: "b" * 3000, n_ctx=4096, stream_buffer=2) as engine:
        done: list[str] = []

        async def ask() -> None:
            done.append((await engine.generate(prompt, max_tokens=2)).text)

        async with anyio.create_task_group() as tasks, engine.stream(prompt) as first:
            await anext(first)
            tasks.start_soon(ask)
            # One without images does not wait, and by then the other does.
            for _ in range(3):
                await engine.generate("c", max_tokens=1)
            assert done == []
        assert done == ["bb"]


@pytest.mark.anyio
async def test_the_outputs_of_one_request_share_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last would otherwise wait for memory that the first keep until they are read."""
    monkeypatch.setattr("cllm.engine.loop.media_reader.MAX_OPEN_BYTES", 1)
    async with FakeEngine(lambda prompt: "b" * 3000, n_ctx=4096, stream_buffer=2) as engine:
        first = engine.stream(["a", image(1)], max_tokens=40)
        streams = [first, *(first.again(i, f"again-{i}") for i in range(1, 4))]
        async with AsyncExitStack() as opened:
            with anyio.fail_after(60):
                for stream in streams:
                    await opened.enter_async_context(stream)
            assert engine._parts.gate.n_media_bytes == pixels(1).nbytes
            assert [(await stream.completion()).text for stream in streams] == ["b" * 40] * 4
        assert engine._parts.gate.n_media_bytes == 0


@pytest.mark.anyio
async def test_a_process_that_cannot_be_started_now_is_no_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with FakeEngine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr("cllm.engine.loop.media_reader.subprocess.Popen", fail)
            with pytest.raises(
                RequestError, match="cannot be started: Too many open files"
            ) as caught:
                await engine.generate(["a", Image(file_of("PNG"))])
        assert not isinstance(caught.value, InvalidRequestError)
        await engine.generate(["a", Image(file_of("PNG"))], max_tokens=1)


@pytest.mark.anyio
async def test_one_process_decodes_the_files_of_a_prompt_and_another_those_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[subprocess.Popen[bytes]]()
    start = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr("cllm.engine.loop.media_reader.subprocess.Popen", counted)
    files = [Image(file_of(kind)) for kind in ("PNG", "JPEG", "GIF", "BMP")]
    async with FakeEngine(n_ctx=4096) as engine:
        await engine.generate(["a", *files], max_tokens=1)
        assert [process.poll() is None for process in started] == [False]  # it has ended
        with pytest.raises(InvalidRequestError, match=r"prompt\[1\].*an intact PNG"):
            await engine.generate([files[0], Image(file_of("PNG")[:99])], max_tokens=1)
        assert [process.poll() is None for process in started] == [False, False]


@pytest.mark.anyio
async def test_a_file_does_not_pay_for_an_earlier_one_that_has_ended_their_process() -> None:
    decoder = Decoder()
    found = [decoder.run(Image(file_of("PNG")), 0)]
    assert decoder._process is not None
    decoder._process.kill()
    found.append(decoder.run(Image(file_of("PNG")), 0))
    await decoder.close()
    assert found[0] == found[1]
    with pytest.raises(InvalidRequestError, match="the process that decodes it ended with -9"):
        decoder.run(Image(file_of("PNG")), 0)  # closed meanwhile
    assert decoder._process is None


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_a_file_with_damaged_pixels_has_none(kind: str) -> None:
    data = file_of(kind)
    for place in range(len(data) // 3, len(data) - 16, 97):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        try:
            with Pillow.open(io.BytesIO(damaged)) as whole:
                expected = np.array(whole.convert("RGB"))
        except Exception:
            with pytest.raises(Exception):  # noqa: B017, PT011  # what Pillow raises
                pixels_of(bytes(damaged))
        else:
            assert pixels_of(bytes(damaged)) == (expected.shape[:2], expected.tobytes())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("exif", [b"junk", b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")  # of Pillow
def test_damaged_metadata_does_no_harm(kind: str, exif: bytes) -> None:
    shape, found = pixels_of(file_of(kind, exif=exif))
    assert (shape, found) == pixels_of(file_of(kind))


@pytest.mark.anyio
async def test_closing_ends_a_request_that_waits_to_read_its_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt: list[Any] = ["a", image(1)]
    monkeypatch.setattr("cllm.engine.loop.media_reader.MAX_OPEN_BYTES", 1)
    errors: list[BaseException] = []
    async with (
        anyio.create_task_group() as tasks,
        FakeEngine(lambda prompt: "b" * 3000, n_ctx=4096, stream_buffer=2) as engine,
    ):

        async def ask() -> None:
            try:
                await engine.generate(prompt, max_tokens=2)
            except ClosedError as error:
                errors.append(error)

        first = engine.stream(prompt)
        await anext(first)
        tasks.start_soon(ask)
        for _ in range(3):
            await engine.generate("c", max_tokens=1)
    assert len(errors) == 1


@pytest.mark.anyio
async def test_the_images_of_one_prompt_have_a_limited_number_of_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_bytes = pixels(1).nbytes
    monkeypatch.setattr("cllm.engine.loop.prompt_tokenizer.MAX_PROMPT_BYTES", 2 * n_bytes)
    async with FakeEngine(lambda prompt: "b", n_ctx=4096) as engine:
        prompt: list[Any] = [image(1), image(2)]
        assert (await engine.generate(prompt)).text == "b"
        with pytest.raises(
            InvalidRequestError, match=f"at most {2 * n_bytes} bytes of pixels"
        ) as caught:
            await engine.generate([*prompt, "a", image(3)])
        assert caught.value.field == "prompt[3]"


@given(height=st.integers(1, 40), width=st.integers(1, 40), seed=st.integers(0, 1 << 16))
@examples(40)
def test_pixels_as_a_data_url_are_the_same_pixels(height: int, width: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    url = Image(drawn).data_url()
    part = media_of({"type": "image_url", "image_url": {"url": url}}, "part")
    assert part is not None
    data = part.read()
    assert isinstance(data, bytes)
    with Pillow.open(io.BytesIO(data)) as opened:
        assert np.array_equal(np.asarray(opened.convert("RGB")), drawn)


PICTURE = np.random.default_rng(4).integers(0, 256, 3_000_001, np.uint8).tobytes()


@pytest.mark.parametrize("of_url", [False, True])
@pytest.mark.parametrize("form", ["plain", "without its end", "in lines", "escaped"])
def test_base64_text_of_every_form_is_the_same_file(form: str, of_url: bool) -> None:
    text = (base64.urlsafe_b64encode if of_url else base64.b64encode)(PICTURE).decode()
    text = {
        "plain": text,
        "without its end": text.rstrip("="),
        "in lines": "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
        "escaped": quote(text),
    }[form]
    assert Image.of_base64(f"data:,{text}", 6).read() == PICTURE


@pytest.mark.parametrize("text", ["QU@D", "QUFB=QUFB", "QUFBé", "QUFBQ", "QQ=QQ=="])
def test_text_that_is_not_base64_is_no_other_file(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="a file as base64 text"):
        Image.of_base64(text).read()


def test_base64_text_is_text_and_begins_within_it() -> None:
    for text, start in ((5, 0), (None, 0), ("QUFB", -1), ("QUFB", 5)):
        with pytest.raises(InvalidRequestError):
            Image.of_base64(cast(Any, text), start)
