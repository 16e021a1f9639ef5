"""A server without a model: the real HTTP server over a `FakeEngine`, with scripted answers, delays and faults.

`cllm serve --fake RULES.yaml` serves it to clients in any language; the fixture `cllm_server` to tests.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.engine import media_parts
from cllm.engine.chat.media_marks import shown
from cllm.engine.config import EngineConfig
from cllm.engine.request import GenerationRequest
from cllm.errors import EngineFailedError
from cllm.server.app import create_app
from cllm.server.config import ServerConfig
from cllm.server.http.limits import HEADER, REQUEST_ID
from cllm.server.http.problems import Problem, route_path
from cllm.server.http.replies import EVENTS_TYPE, LINES_TYPE
from cllm.server.serving import Server, listen
from cllm.testing.fake_engine import FakeAnswer, FakeEngine
from cllm.testing.fake_rules import FakeRule, FakeRules
from cllm.testing.fake_vocabulary import FakeVocabulary

# Without `/v1`.
QUESTIONS = (
    "/generate", "/completions", "/completion", "/chat/completions", "/responses", "/messages", "/api/chat",
    "/api/generate",
)  # fmt: skip
ENDS_OF_EVENTS = {EVENTS_TYPE.decode(): b"\n\n", LINES_TYPE.decode(): b"\n"}
N_CTX = 16384
START_S = 30.0
DRAIN_S = 1.0  # time for streams that are still open when a test has ended


class DisconnectedError(Exception):
    """Error that makes uvicorn close a connection, as a rule says; `_is_unexpected` keeps it out of the log."""


def _is_unexpected(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, DisconnectedError)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the server received.

    Attributes
    ----------
    path : str
    body : object
        Parsed JSON body; None if it is no JSON.
    headers : mapping
        Header values by name in lower case.
    """

    path: str
    body: Any
    headers: Mapping[str, str]


class ScriptedFaults:
    """ASGI middleware that applies the matching rule to each request of `QUESTIONS`.

    A request without a matching rule is answered with status 400.

    Parameters
    ----------
    rules : FakeRules
    asked : list of Asked
        List to which the requests are appended, in the order of their arrival.
    """

    def __init__(self, app: ASGIApp, rules: FakeRules, asked: list[Asked]) -> None:
        self._app = app
        self._rules = rules
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = route_path(scope) if scope["type"] == "http" else ""
        if path.removeprefix("/v1") not in QUESTIONS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        data = await _read(receive)
        body = _parsed(data)
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._asked.append(Asked(path, body, headers))
        questions, role = questions_of(body)
        rule = self._rules.choose(questions[0], role)
        if rule is None:
            message = f"no rule is for {questions[0][:200]!r}"
            await Problem(400, message, code="no_rule").response_to(scope)(scope, receive, send)
            return
        if await _leaves_within(rule.first_token_s, receive):
            return
        if rule.status is not None:
            await _problem_of(rule, rule.status).response_to(scope)(scope, receive, send)
            return
        given = headers.get(HEADER, "")
        given = given if REQUEST_ID.fullmatch(given) else ""
        with self._rules.answering(given, rule, questions) as request_id:
            others = [each for each in scope["headers"] if each[0] != HEADER.encode()]
            scope = {**scope, "headers": [*others, (HEADER.encode(), request_id.encode())]}
            await self._app(scope, _again(data, receive), _paced(_as(given, send), rule))


def _as(request_id: str, send: Send) -> Send:
    """Return a `send` with this id of the request in the answer; "" leaves it."""

    async def told(message: Message) -> None:
        if request_id and message["type"] == "http.response.start":
            name = HEADER.encode()
            headers = [
                (key, request_id.encode() if key.lower() == name else value)
                for key, value in message["headers"]
            ]
            message = {**message, "headers": headers}
        await send(message)

    return told


async def _leaves_within(seconds: float, receive: Receive) -> bool:
    """Wait, and return False; True at once if the client leaves.  The body has been read."""
    with anyio.move_on_after(seconds):
        while seconds and (await receive())["type"] != "http.disconnect":
            pass
        return seconds > 0
    return False


def questions_of(body: Any) -> tuple[Sequence[str], str]:
    """Return the last message or the prompts of a request, and the role."""
    if not isinstance(body, Mapping):
        return [""], "user"
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        return [messages], "user"
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        question, role = _last_of(messages[-1])
        return [question], role
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and any(isinstance(part, Mapping) for part in prompt):
        return [_text_of(prompt)], "user"  # texts and media
    is_several = isinstance(prompt, list) and not any(type(part) is int for part in prompt)
    return list(map(_prompt_text, prompt if is_several else [prompt])) or [""], "user"


def _prompt_text(prompt: object) -> str:
    """Return the text of a prompt, or of its token ids; the application rejects others."""
    known = range(FakeVocabulary().n_tokens)
    if isinstance(prompt, list) and all(type(token) is int and token in known for token in prompt):
        return FakeVocabulary().join(prompt).decode("utf-8", "replace")
    return prompt if isinstance(prompt, str) else ""


def _last_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the role of a message, in any of the three kinds of API."""
    if message.get("type") == "function_call_output":
        return _text_of(message.get("output", "")), "tool"
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or "", str(message.get("role", "user"))
    parts = content if isinstance(content, list) else [content]
    results = [i for i, part in enumerate(parts) if _is_result(part)]
    if results and results[-1] == len(parts) - 1:
        return _text_of(parts[-1].get("content", "")), "tool"
    parts = parts[results[-1] + 1 :] if results else parts  # text behind results is the user's
    return _text_of(parts), str(message.get("role", "user"))


def _is_result(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "tool_result"


def _text_of(content: Any) -> str:
    """Return the text of a content, with `<image>` and `<audio>` in place of media."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # line ends between texts, as in the prompt
        text, was_text = "", False
        for part in content:
            is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
            text += ("\n" if was_text and is_text else "") + _text_of(part)
            was_text = is_text
        return text
    if not isinstance(content, Mapping):
        return ""
    kind = content.get("type")
    if kind in media_parts.TYPES:
        return shown("audio" if kind in media_parts.AUDIO_TYPES else "image")
    return str(content.get("text", ""))


async def _read(receive: Receive) -> bytes:
    data, more = b"", True
    while more:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return data


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _again(data: bytes, receive: Receive) -> Receive:
    """Return a function that gives the whole body again, and then continues with `receive`."""
    is_told = False

    async def told() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": data, "more_body": False}

    return told


def _problem_of(rule: FakeRule, status: int) -> Problem:
    headers = {} if rule.retry_after_s is None else {"Retry-After": str(rule.retry_after_s)}
    return Problem(status, rule.message, code="scripted", headers=headers)


def _paced(send: Send, rule: FakeRule) -> Send:
    """Return a `send` that delays events as a rule says, and raises `DisconnectedError` where it says so."""
    n_events, end_of_event = 0, b""  # empty: the answer is not streamed

    async def paced(message: Message) -> None:
        nonlocal n_events, end_of_event
        limit = rule.disconnect_after
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            end_of_event = ENDS_OF_EVENTS.get(kind, b"")
        elif end_of_event:
            # One part of a body may have several events.
            for event in message.get("body", b"").split(end_of_event)[:-1]:
                if n_events == limit:
                    raise DisconnectedError("as a rule says")
                n_events += 1
                await anyio.sleep(rule.token_s)
                await send({**message, "body": event + end_of_event, "more_body": True})
            if message.get("more_body", False):
                return
            message = {**message, "body": b""}
        if message["type"] == "http.response.body" and limit is not None and n_events in (0, limit):
            raise DisconnectedError("as a rule says")
        await send(message)

    return paced


class RuledEngine(FakeEngine):
    """`FakeEngine` that answers by rules; scores need none."""

    def __init__(self, rules: FakeRules, config: EngineConfig) -> None:
        super().__init__(config=config)

        def find(request: GenerationRequest, prompt: str) -> FakeAnswer:
            if request.first_scored is not None:
                return FakeAnswer()
            return rules.answer(request.request_id, prompt)

        self._find_answer = find


def create_fake_app(
    rules: FakeRules,
    engine: EngineConfig | None = None,
    config: ServerConfig | None = None,
    **options: Any,
) -> FastAPI:
    """Return an application of a `FakeEngine` with rules; `app.state.asked` has the requests."""
    engine = EngineConfig(n_ctx=N_CTX) if engine is None else engine
    app = create_app(
        engine,
        config,
        make_engine=lambda config: RuledEngine(rules, config),
        **options,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_unexpected)
    app.state.asked = []
    app.add_middleware(ScriptedFaults, rules=rules, asked=app.state.asked)
    return app


@dataclass(frozen=True, slots=True)
class FakeServer:
    """Running server, as the fixture `cllm_server` returns it.

    Attributes
    ----------
    url : str
        `http://127.0.0.1:PORT`; OpenAI's clients take `base_url`, which ends with `/v1`.
    asked : list of Asked
        The requests so far.
    """

    url: str
    asked: list[Asked]

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"


@contextmanager
def fake_server(rules: object = ()) -> Iterator[FakeServer]:
    """Run a server on a free port of 127.0.0.1 until the end of the block, in a thread with its own event loop.

    Raises `InvalidArgumentError` for an invalid rule, `EngineFailedError` if it has not started within 30 s.

    Parameters
    ----------
    rules : object
        A list of mappings, a mapping with `rules`, or one from questions to answers; see `FakeRules.of`.
    """
    config = ServerConfig(port=0, drain_timeout_s=DRAIN_S)
    app = create_fake_app(FakeRules.of(rules), config=config)
    server = Server(app, config)
    with listen(config) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + START_S
            while app.state.server.engine is None:
                if not thread.is_alive():
                    raise EngineFailedError(f"the server has ended: {app.state.server.failure}")
                if time.monotonic() > deadline:
                    raise EngineFailedError(f"the server has not started within {START_S} s")
                time.sleep(0.001)
            yield FakeServer(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.asked)
        finally:
            server.should_exit = True
            thread.join(START_S)
