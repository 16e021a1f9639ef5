"""Every route that answers with text ends an answer that fails in the same way."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import httpx
import pytest

from cllm import (
    ClosedError,
    DeadlineError,
    EmbeddingError,
    Engine,
    EngineStatus,
    QueueFullError,
)
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.process.handle import CrashError
from cllm.errors import LlamaCallError
from cllm.server import create_app
from cllm.server.answers import answer
from cllm.server.http.problems import Problem
from cllm.server.http.replies import Reply, Writer
from cllm.testing import FakeAnswer, FakeEngine
from tests.conftest import QUIET
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio
ASK = [{"role": "user", "content": "1+1="}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "1+1="}, "/v1/completions": {"prompt": "1+1="},
    "/v1/chat/completions": {"messages": ASK}, "/v1/responses": {"input": "1+1="},
    "/v1/messages": {"messages": ASK, "max_tokens": 9}, "/completion": {"prompt": "1+1="},
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("error", "status", "is_logged"),
    [
        (RuntimeError("a secret"), 500, True),
        (QueueFullError(1, 1.0), 429, False),
        (ClosedError("closed"), 503, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_fails_is_a_status_before_the_head_and_an_event_after_it(
    path: str,
    error: Exception,
    status: int,
    is_logged: bool,
    has_begun: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_: Any, __: Any, ___: Any, on_admitted: Any) -> Any:
        if has_begun:
            await on_admitted()
        raise error

    monkeypatch.setattr(answer, "run_streams", fail)
    async with FakeEngine(lambda _: "2") as engine, client_of(engine) as client:
        with caplog.at_level(logging.ERROR, "cllm.server"):
            reply = await client.post(path, json={**ROUTES[path], "stream": True})
    assert reply.status_code == (200 if has_begun else status)
    assert "a secret" not in reply.text
    assert '"error":' in reply.text
    if has_begun and path != "/v1/responses":
        told = '"type":"' if path == "/v1/messages" else "data: [DONE]"
        assert told in reply.text
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.exc_info[1] for record in logged if record.exc_info] == [error] * is_logged


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_stream_that_fails_after_its_head_is_counted_and_logged_as_failed(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Any, __: Any, ___: Any, on_admitted: Any) -> Any:
        if has_begun:
            await on_admitted()
        raise ClosedError("closed")

    monkeypatch.setattr(answer, "run_streams", fail)
    async with FakeEngine(lambda _: "2") as engine, client_of(engine) as client:
        with caplog.at_level(logging.INFO, "cllm.access"):
            await client.post("/generate", json={"prompt": "1+1=", "stream": True})
        (line,) = [r.getMessage() for r in caplog.records if r.name == "cllm.access"]
        metrics = (await client.get("/metrics")).text
    assert (" error=unavailable" in line) is has_begun
    assert ('cllm_stream_errors_total{status="503"} 1.0' in metrics) is has_begun


KINDS = [
    (ClosedError("closed"), 503, "overloaded_error"),
    (RuntimeError("a secret"), 500, "api_error"),
    (DeadlineError("late"), 408, "timeout_error"),
    (QueueFullError(1, 1.0), 429, "rate_limit_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), KINDS, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_error_of_a_message_has_the_type_that_anthropics_clients_know(
    error: Exception, status: int, kind: str, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Any, __: Any, ___: Any, on_admitted: Any) -> Any:
        if is_streamed:
            await on_admitted()
        raise error

    monkeypatch.setattr(answer, "run_streams", fail)
    body = {**ROUTES["/v1/messages"], "stream": is_streamed}
    async with FakeEngine(lambda _: "2") as engine, client_of(engine) as client:
        reply = await client.post("/v1/messages", json=body)
    assert reply.status_code == (200 if is_streamed else status)
    assert f'"type":"{kind}"' in reply.text.replace(": ", ":")
    if not is_streamed:
        assert ("x-should-retry" in reply.headers) is (status == 408)


async def test_a_fault_of_the_server_has_the_id_of_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> Any:
        raise RuntimeError("a secret")

    async with (
        FakeEngine() as engine,
        client_of(engine, cors_origins=("https://a.example",)) as client,
    ):
        monkeypatch.setattr(engine, "slots", fail)
        with caplog.at_level(logging.ERROR, "cllm.server"):
            reply = await client.get(
                "/slots", headers={"X-Request-ID": "mine", "Origin": "https://a.example"}
            )
    assert reply.status_code == 500
    assert reply.headers["X-Request-ID"] == "mine"
    assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert reply.json()["error"]["message"] == "internal error"
    assert [record.getMessage() for record in caplog.records] == ["request mine failed"]


DRAINED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x"}, "/embedding": {"content": "x"},
    "/generate/score": {"prompt": "a", "continuation": "b"}, "/api/embed": {"model": "m", "input": "x"},
    "/completion": {"prompt": "1+1="}, **ROUTES,
    "/v1/completions": {"prompt": "1+1=", "echo": True, "logprobs": 1},
}  # fmt: skip


@pytest.mark.parametrize("path", DRAINED)
async def test_what_runs_when_a_server_stops_is_answered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine(lambda _: "2") as engine:
        app = create_app(engine)
        submit, embed = Dispatcher.submit, Dispatcher.embed

        def stop_and(call: Any) -> Any:
            def called(dispatcher: Dispatcher, request: Any) -> Any:
                app.state.server.stop()
                engine._status = EngineStatus.DRAINING
                return call(dispatcher, request)

            return called

        monkeypatch.setattr(Dispatcher, "submit", stop_and(submit))
        monkeypatch.setattr(Dispatcher, "embed", stop_and(embed))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.post(path, json=DRAINED[path])
        engine._status = EngineStatus.READY
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_has_left_is_no_error_and_is_sent_nothing_more(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []
    asked = [
        {"type": "http.request", "body": json.dumps({**ROUTES[path], "stream": True}).encode()}
    ]

    async def receive() -> Any:
        return asked.pop() if asked else await anyio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 1:
            raise ConnectionResetError

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    async with FakeEngine(lambda _: "2") as engine:
        app = create_app(engine)
        with caplog.at_level(logging.WARNING, "cllm.server"):
            await app(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    assert not caplog.records


@pytest.mark.parametrize("path", [*ROUTES, "/api/chat", "/api/generate"])
async def test_no_text_of_an_answer_ends_a_line_of_its_stream(path: str) -> None:
    """`httpx.Response.iter_lines`, with which many clients read streams, knows more line ends than "\\n"."""
    said = "a\u2028b\x85c\u2029d\ré"
    body = {
        **ROUTES.get(path, {"model": "fake", "messages": ASK, "prompt": "1+1="}),
        "stream": True,
    }
    if path == "/v1/messages":
        body["max_tokens"] = 99
    if path == "/api/chat":
        del body["prompt"]
    elif path == "/api/generate":
        del body["messages"]
    async with FakeEngine(lambda _: said) as engine, client_of(engine) as client:
        text = (await client.post(path, json=body)).text
    found = ""
    for line in httpx.Response(200, text=text).iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]" and not data.startswith(("event:", ":")):
            found += json.dumps(json.loads(data), ensure_ascii=False)
    assert all(character in found for character in "\u2028\x85\u2029é")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1+1=", "max_tokens": 0}),
        ("/v1/completions", {"prompt": "1+1=", "max_tokens": 0, "echo": True}),
        ("/v1/completions", {"prompt": "1+1=", "max_tokens": 5, "max_completion_tokens": 0}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 0}),
        ("/completion", {"prompt": "1+1=", "n_predict": 0}),
        ("/completion", {"prompt": "1+1=", "max_tokens": 0}),
    ],
    ids=str,
)
async def test_a_request_without_output_computes_its_prompt_alone(
    path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    answer = FakeAnswer("secret", "thought", [("call", {})])
    async with FakeEngine(lambda _: answer) as engine, client_of(engine) as client:
        said = await client.post(path, json={**body, "stream": is_streamed})
        assert engine.statistics().n_prefill_tokens >= len("1+1=")
    assert said.status_code == 200, said.text
    assert "secret" not in said.text
    assert "thought" not in said.text
    assert ("1+1=" in said.text) == bool(body.get("echo") or path == "/completion")
    if not is_streamed:
        told = said.json()
        usage = told.get("usage", {})
        names = ("completion_tokens", "output_tokens")
        counted = [told.get("tokens_predicted"), *(usage.get(name) for name in names)]
        assert [n for n in counted if n is not None] == [0]
    ends = {
        "/v1/completions": '"finish_reason":"length"', "/completion": '"stop_type":"limit"',
        "/v1/messages": '"stop_reason":"max_tokens"',
    }  # fmt: skip
    assert ends[path] in said.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (path, {**ROUTES[path], "response_format": form}, field)
        for path in ("/v1/chat/completions", "/v1/completions")
        for form, field in (
            ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}, "strict": True}},
             "response_format.json_schema.schema"),
            ({"type": "json_schema", "schema": {"$ref": "#/x"}}, "response_format.schema"),
            ({"type": "json_object", "schema": {"$ref": "#/x"}}, "response_format.schema"),
        )
    ]
    + [
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "a",
         "schema": {"$ref": "#/x"}}}}, "text.format.schema"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ("/v1/responses", {"input": "x", "text": {"format": 5}}, "text.format"),
        ("/v1/messages", {**ROUTES["/v1/messages"], "output_config": {"format": {"type": "json_schema",
         "schema": {"$ref": "#/x"}}}}, "output_config.format.schema"),
        ("/v1/messages", {**ROUTES["/v1/messages"], "output_format": {"type": "json_schema",
         "schema": {"$ref": "#/x"}}}, "output_format.schema"),
        ("/v1/messages", {**ROUTES["/v1/messages"], "thinking": {"type": "bogus"}}, "thinking.type"),
        ("/v1/messages", {**ROUTES["/v1/messages"], "tools": [
            {"type": "web_search_20250305", "name": "w"}, {"name": "f", "input_schema": 5}]}, "tools[1].input_schema"),
        ("/v1/responses", {"input": "x", "tools": [
            {"type": "web_search"}, {"type": "function", "name": "f", "parameters": 5}]}, "tools[1].parameters"),
        ("/v1/chat/completions", {"messages": ASK, "tools": [
            {"type": "web_search"}, {"type": "function", "function": {"name": "f", "parameters": 5}}]},
         "tools[1].function.parameters"),
    ],
    ids=str,
)  # fmt: skip
async def test_an_error_names_the_field_that_the_client_has_sent(
    path: str, body: dict[str, Any], field: str
) -> None:
    async with Engine(n_ctx=512, n_seq_max=2, **QUIET) as engine, client_of(engine) as client:
        for is_streamed in (False, True):
            said = await client.post(path, json={**body, "stream": is_streamed})
            assert (said.status_code, said.json()["error"]["param"]) == (400, field), said.text


async def test_a_message_that_fills_the_context_says_so() -> None:
    async with FakeEngine(lambda _: "x" * 500, n_ctx=128) as engine, client_of(engine) as client:
        body = {"messages": ASK, "max_tokens": 400}
        said = (await client.post("/v1/messages", json=body)).json()
    assert said["stop_reason"] == "model_context_window_exceeded"


async def test_models_have_the_fields_of_anthropics_list_too() -> None:
    async with FakeEngine() as engine, client_of(engine) as client:
        told = (await client.get("/v1/models")).json()
    (model,) = told["data"]
    assert (model["type"], model["display_name"]) == ("model", model["id"])
    assert model["created_at"].endswith("Z")
    assert (told["first_id"], told["last_id"], told["has_more"]) == (model["id"],) * 2 + (False,)


async def test_as_many_outputs_as_candidates_are_no_other_request() -> None:
    async with FakeEngine(lambda _: "2") as engine, client_of(engine) as client:
        for fields in ({"best_of": 1}, {"n": 2, "best_of": 2}):
            said = await client.post("/v1/completions", json={"prompt": "a", **fields})
            assert len(said.json()["choices"]) == fields.get("n", 1)
        said = await client.post("/v1/completions", json={"prompt": "a", "n": 1, "best_of": 2})
        assert said.json()["error"]["param"] == "best_of"


async def test_a_call_in_the_older_form_is_a_call() -> None:
    prompts: list[str] = []

    def answering(prompt: str) -> str:
        prompts.append(prompt)
        return "ok"

    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look", "arguments": "{}"},
        },
        {"role": "function", "name": "look", "content": "found"},
    ]
    async with FakeEngine(answering) as engine, client_of(engine) as client:
        said = await client.post("/v1/chat/completions", json={"messages": messages})
        assert said.status_code == 200, said.text
    assert "look" in prompts[0]
    assert "found" in prompts[0]


async def test_a_stream_ends_quietly_when_the_rest_of_its_body_is_late() -> None:
    """The task that waits for the client reads the rest of the body, and may find it late."""
    sent: list[Any] = []
    late = anyio.Event()

    async def produce(writer: Writer) -> None:
        await writer.events([(None, {"frame": 1})])
        late.set()
        await anyio.sleep_forever()

    async def receive() -> dict[str, Any]:
        await late.wait()
        raise Problem(408, "the body is late")

    async def send(message: Any) -> None:
        sent.append(message)

    await Reply(produce)({"type": "http", "path": "/live", "headers": []}, receive, send)
    assert b"the body is late" in b"".join(each.get("body", b"") for each in sent)
    assert sent[-1]["more_body"] is False


@pytest.mark.parametrize(
    ("asked", "n_top"),
    [
        ({}, None),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"top_logprobs": 2}, 2),
    ],
    ids=str,
)
async def test_the_text_of_a_response_has_log_probabilities_if_they_are_wanted(
    asked: dict[str, Any], n_top: int | None
) -> None:
    answer = FakeAnswer("é!", "Hm.")
    async with FakeEngine(lambda _: answer) as engine, client_of(engine) as client:
        whole = (await client.post("/v1/responses", json={"input": "x", **asked})).json()
        body = {"input": "x", "stream": True, **asked}
        text = (await client.post("/v1/responses", json=body)).text
        wrong = await client.post("/v1/responses", json={"input": "x", "top_logprobs": 999})
    (part,) = next(item for item in whole["output"] if item["type"] == "message")["content"]
    tokens = part["logprobs"]
    assert bytes(byte for token in tokens for byte in token["bytes"]) == (
        b"" if n_top is None else "é!".encode()
    )
    assert all(len(token["top_logprobs"]) == n_top for token in tokens)
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta["logprobs"]] == tokens
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == tokens
    assert wrong.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_vectors_that_a_shutdown_cut_off_are_503_and_others_that_fail_500(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with several servers go on to the next one after a 503."""
    fault = EmbeddingError.of("r", LlamaCallError("llama_encode", -3))
    cut_off = EmbeddingError("request r was cancelled")
    crashed = EmbeddingError.of("r", CrashError("the engine's process ended by SIGSEGV"))
    for error, status in ((cut_off, 503), (fault, 500), (crashed, 500)):

        async def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        async with FakeEngine(lambda _: "2") as engine, client_of(engine) as client:
            monkeypatch.setattr(engine, "embeddings", fail)
            reply = await client.post(path, json={"input": "a", "model": "m"})
        assert reply.status_code == status, reply.text
        if path.startswith("/v1"):
            code = "unavailable" if status == 503 else "generation_failed"
            assert reply.json()["error"]["code"] == code
