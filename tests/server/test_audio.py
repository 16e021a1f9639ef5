"""Audio over HTTP: in messages and results of tools, in the form of each API, and transcriptions."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from cllm import Audio, Engine, InvalidRequestError, SamplingParams
from cllm.server import ServerConfig, create_app
from cllm.server.routes.transcriptions import _FileCall, _messages
from cllm.server.several import _name_in
from cllm.testing import FakeEngine
from tests.conftest import QUIET, examples
from tests.server.conftest import client_of
from tests.server.test_images import GREEDY, PATHS, asking, prompts_with, serving, with_result
from tools import make_model, make_projector

pytestmark = pytest.mark.anyio
SAMPLES = np.sin(np.arange(8_000) / 9).astype(np.float32) / 2
TRANSCRIBE = "/v1/audio/transcriptions"


def wav(n_samples: int = len(SAMPLES)) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, SAMPLES[:n_samples], 16_000, format="WAV")
    return file.getvalue()


WAV = base64.b64encode(wav()).decode()
# Audio in the form of each API, and of a result of a tool of MCP.
PARTS: dict[str, dict[str, Any]] = {
    "input_audio": {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
    "input_audio with a data: URL": {
        "type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{WAV}"}},
    "audio_url": {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{WAV}"}},
    "audio of MCP": {"type": "audio", "data": WAV, "mimeType": "audio/wav"},
    "resource of MCP": {
        "type": "resource", "resource": {"uri": "a:b", "mimeType": "audio/wav", "blob": WAV}},
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body_of", [asking, with_result])
async def test_audio_in_the_form_of_any_api_is_heard(path: str, body_of: Any) -> None:
    known = {**PARTS}
    if (path, body_of) == ("/v1/messages", asking):
        del known["resource of MCP"]  # Anthropic's messages of users have none
    prompts = await prompts_with(known, path, body_of)
    assert all("<audio>" in prompt and WAV[:40] not in prompt for prompt in prompts)


async def test_audio_is_counted_apart_and_told_in_the_usage() -> None:
    async with serving() as (_, http):
        body = asking("/v1/chat/completions", [PARTS["input_audio"]])
        said = (await http.post("/v1/chat/completions", json=body)).json()
        details = said["usage"]["prompt_tokens_details"]
        assert (details["audio_tokens"], details["image_tokens"]) == (5, 0)
        counted = (await http.post("/v1/chat/completions/input_tokens", json=body)).json()
        assert counted["input_tokens"] == said["usage"]["prompt_tokens"]
        prompt = {"prompt": ["a", PARTS["input_audio"]], **GREEDY}
        told = (await http.post("/generate", json=prompt)).json()
        assert told["usage"]["audio_tokens"] == 5
        props = (await http.get("/props")).json()
        assert props["modalities"] == {"vision": True, "audio": True}
        listed = (await http.get("/v1/models")).json()["data"][0]["architecture"]
        assert listed["input_modalities"] == ["text", "image", "audio"]


async def test_the_media_data_of_llama_server_may_be_audio() -> None:
    prompts: list[str] = []
    async with serving(prompts) as (_, http):
        prompt = {"prompt_string": "a<__media__>b", "multimodal_data": [WAV]}
        response = await http.post("/completion", json={"prompt": prompt, **GREEDY})
        assert response.status_code == 200, response.text
    assert prompts == ["a<audio>b"]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_audio"}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": 7}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "!"}}, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, ""),
        ({"type": "audio_url", "audio_url": {"url": "http://a/b.wav"}}, "audio_url.url"),
        ({"type": "audio", "source": {"type": "file"}}, "source.type"),
        ({"type": "audio", "audio": {}}, "audio"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_audio_that_cannot_be_read_is_rejected_by_name(part: Any, field: str) -> None:
    async with serving() as (_, http):
        response = await http.post(PATHS[0], json=asking(PATHS[0], [part]))
        assert response.status_code == 400, response.text
        param = response.json()["error"]["param"]
        assert param == f"messages[0].content[0]{'.' * bool(field)}{field}"


async def test_a_model_that_hears_answers_through_http_as_in_the_engine() -> None:
    engine = Engine(
        make_model.ensure("tiny-llama"), mmproj=make_projector.ensure("ultravox"), n_ctx=1024,
        preflight=False, **QUIET,
    )  # fmt: skip
    async with engine, client_of(engine) as http:
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "audio", "audio": Audio(wav())}]}
        ]
        expected = await engine.chat(messages, **GREEDY)
        said = (await http.post(PATHS[0], json=asking(PATHS[0], [PARTS["input_audio"]]))).json()
        assert said["choices"][0]["message"]["content"] == expected.text
        assert said["usage"]["prompt_tokens_details"]["audio_tokens"] == 50
        assert (await http.get("/props")).json()["modalities"] == {"vision": False, "audio": True}
        heard = await http.post(
            TRANSCRIBE, files={"file": ("a.wav", wav())}, data={"max_tokens": "4"}
        )
        assert heard.status_code == 200, heard.text
        assert heard.json()["usage"]["input_token_details"]["audio_tokens"] == 50


# --- Transcriptions --------------------------------------------------------------------------
async def transcribed(http: httpx.AsyncClient, file: bytes | None = None, **data: str) -> Any:
    content = wav() if file is None else file
    return await http.post(TRANSCRIBE, files={"file": ("a.wav", content, "audio/wav")}, data=data)


async def test_a_recording_is_transcribed() -> None:
    prompts: list[str] = []
    async with serving(prompts) as (_, http):
        response = await transcribed(http, model="whisper-1", language="en")
        assert response.status_code == 200, response.text
        told = response.json()
        assert told["text"] == "I see."
        assert told["usage"]["input_token_details"]["audio_tokens"] == 5
        assert told["usage"]["total_tokens"] == (
            told["usage"]["input_tokens"] + told["usage"]["output_tokens"]
        )
        plain = await transcribed(http, response_format="text", prompt="Write it down:")
        assert (plain.text, plain.headers["content-type"]) == (
            "I see.\n", "text/plain; charset=utf-8")  # fmt: skip
        same = await http.post("/audio/transcriptions", files={"file": wav()})
        assert same.json()["text"] == "I see."
    assert "Transcribe audio to text (language: en)<audio>" in prompts[0]
    assert "Write it down:" in prompts[1]


async def test_a_transcription_is_streamed_in_openai_s_events() -> None:
    async with serving() as (_, http):
        response = await transcribed(http, stream="true")
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        assert (
            "".join(e["delta"] for e in events if e["type"] == "transcript.text.delta") == "I see."
        )
        assert events[-1]["type"] == "transcript.text.done"
        assert events[-1]["text"] == "I see."


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"response_format": "srt"}, "response_format"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "text"}, "stream"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "-1"}, "temperature"),
        ({"max_tokens": "0.5"}, "max_tokens"),
        ({"temprature": "0"}, "temprature"),
        ({"file": "no file"}, "file"),
    ],
    ids=str,
)
async def test_a_wrong_field_of_a_form_is_rejected_by_name(data: Any, param: str) -> None:
    async with serving() as (_, http):
        response = await transcribed(http, **data)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


async def test_a_form_without_a_readable_file_is_rejected() -> None:
    async with serving() as (_, http):
        for response in (
            await http.post(TRANSCRIBE, data={"model": "a"}),
            await http.post(TRANSCRIBE, json={"file": WAV}),
            await http.post(TRANSCRIBE, files={"file": b""}),
            await transcribed(http, b"no audio"),
            await transcribed(http, wav(1)),
        ):
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "file", response.text
        broken = {"content-type": "multipart/form-data; boundary=x"}
        for body in (b"--y\r\n", b"--x\r\nContent-Disposition: form-data\r\n\r\na", b"\0" * 99):
            response = await http.post(TRANSCRIBE, content=body, headers=broken)
            assert response.status_code == 400, response.text
        two = [("file", wav()), ("file", wav())]
        assert (await http.post(TRANSCRIBE, files=two)).status_code == 400


async def test_a_model_without_ears_says_so() -> None:
    async with Engine(n_ctx=512, **QUIET) as engine, client_of(engine) as http:
        response = await transcribed(http)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "file"
        assert "no projector (mmproj)" in error["message"]


def named(files: Any, **data: str) -> str | None:
    request = httpx.Request("POST", "http://a/", files=files, data=data)
    return _name_in(request.read(), request.headers["content-type"])


def test_the_model_of_a_form_selects_one_of_several() -> None:
    file = {"file": wav()}
    assert named(file, language="en", model="small") == "small"
    assert named(file) is None
    trap = b'name="model"\r\n\r\nother\r\n' * 50_000  # 1.3 MB
    assert named({"file": ("model", trap)}, model="small") == "small"
    assert named({"model": ("model", b"other")}, prompt=trap[:99].decode()) is None
    assert _name_in(b"--x\r\n" * 200_000, "multipart/form-data; boundary=x") is None
    form = "multipart/form-data; boundary=x"
    part = b'Content-Disposition: form-data; name="model"\r\n\r\nother\r\n'
    inside = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nsay --x\r\n' + part
    assert _name_in(inside + b"--x--\r\n", form) is None
    assert _name_in(b"--x\r\n" + b"A: " + b"b" * 2_000 + b"\r\n" + part, form) is None
    assert _name_in(b"--x\r\n" + part + b"--x--\r\n", form) == "other"
    assert _name_in(trap, "multipart/form-data") is None


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=x; charset=undefined",
        "multipart/form-data; boundary=x; charset=punycode",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
    ],
)
async def test_a_form_of_another_kind_or_charset_is_rejected(content_type: str) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="a\xe4"\r\n\r\n1\r\n--x--\r\n'
    async with serving() as (_, http):
        headers = {"content-type": content_type}
        response = await http.post(TRANSCRIBE, content=body, headers=headers)
        assert response.status_code == 400, response.text
        said = "charset utf-8" if "charset" in content_type else "form"
        assert said in response.json()["error"]["message"]


def test_the_prompt_and_the_file_are_told_apart_in_errors() -> None:
    call = _FileCall([], {}, SamplingParams())
    told = {
        field: call.problem_of(InvalidRequestError(field, 1, "2")).param
        for field in ("messages", "messages[0].content[1]", "messages[0].content[1].audio", "lora")
    }
    assert [*told.values()] == ["prompt", "file", "file", "lora"]


async def test_fields_of_openai_s_clients_change_nothing() -> None:
    async with serving() as (_, http):
        for name in ("chunking_strategy[type]", "include[]", "timestamp_granularities[]"):
            data: Any = {name: "x"}
            assert (await transcribed(http, **data)).status_code == 200


async def test_a_file_above_a_megabyte_and_with_wild_samples_is_heard() -> None:
    wild = np.full(400_000, 3.4e38, np.float32)
    for rate in (8_000, 16_000):
        written = io.BytesIO()
        soundfile.write(written, wild, rate, format="WAV", subtype="FLOAT")
        async with serving() as (_, http):
            response = await transcribed(http, written.getvalue())
            assert response.status_code == 200, response.text


async def test_deltas_are_the_text_and_lfm2_is_asked_as_it_was_trained() -> None:
    async with (
        FakeEngine(lambda prompt: "  I see. ", n_ctx=4096) as engine,
        client_of(engine) as http,
    ):
        response = await transcribed(http, stream="true")
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        *deltas, last = [json.loads(line) for line in lines[:-1]]
        assert "".join(delta["delta"] for delta in deltas) == last["text"] == "I see. "
        assert last["finish_reason"] == "stop"
        cut = (await transcribed(http, max_tokens="3")).json()
        assert (cut["text"], cut["finish_reason"]) == ("I", "length")
    audio = Audio(wav())
    system, user = _messages("lfm2", audio, {"language": "de"})
    assert system == {"role": "system", "content": "Perform ASR. (language: de)"}
    assert user["content"] == [{"type": "audio", "audio": audio}]
    assert len(_messages("lfm2moe", audio, {"prompt": "Listen."})) == 1


FIELD = st.sampled_from(
    ["stream", "temperature", "max_tokens", "response_format", "prompt", "model"]
)


@given(
    content=st.binary(max_size=200) | st.just(wav()),
    data=st.dictionaries(FIELD, st.text(max_size=9), max_size=3),
    body=st.binary(max_size=200),
)
@examples(30)
def test_any_form_is_answered_or_rejected_and_never_a_fault_of_the_server(
    content: bytes, data: dict[str, str], body: bytes
) -> None:
    async def ask() -> None:
        async with (
            FakeEngine(lambda prompt: "I see.", n_ctx=4096) as engine,
            client_of(engine) as http,
        ):
            response = await http.post(TRANSCRIBE, files={"file": content}, data=data)
            assert response.status_code in (200, 400), response.text
            head = {"content-type": "multipart/form-data; boundary=x"}
            response = await http.post(TRANSCRIBE, content=b"--x\r\n" + body, headers=head)
            assert response.status_code == 400, response.text

    anyio.run(ask)


async def test_a_form_that_is_too_large_is_rejected() -> None:
    async with FakeEngine() as engine:
        app = create_app(engine, ServerConfig(max_body_bytes=1000))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await transcribed(http)).status_code == 413
