"""A server, or several, as if it were an engine: the same values, and streams that go on elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import numpy as np
import pytest
from PIL import Image as Pillow

from cllm import (
    Audio,
    ClosedError,
    Completion,
    DeadlineError,
    Engine,
    FinishReason,
    GenerationError,
    Image,
    InvalidArgumentError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    TokenDelta,
)
from cllm.client import AnswerStream, AsyncClient, ServerError, async_client, replicas
from cllm.client.events import EventReader, delta_of, object_of
from cllm.client.refusals import refusal_of
from cllm.client.replicas import Replicas
from cllm.testing.fake_server import FakeServer, fake_server
from tests.client.cutting_proxy import cutting
from tests.conftest import QUIET
from tests.engine.samplings import PROMPTS, SAMPLINGS
from tests.server.conftest import LONG, Server, running, wait_for
from tools import make_model, make_projector

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.one_loop,
    # An answer that is left: httpcore leaves its own generator to trio, which closes it and says so.
    pytest.mark.filterwarnings(
        r"ignore:Exception ignored in. <async_generator object \w*(HTTP11Connection|ByteStream|ResponseStream|AsyncStream)"
    ),
]

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]
CHAT = [{"role": "user", "content": "What is the weather?"}]
RULE: dict[str, Any] = {
    "text": "It is warm in Zürich: 20 °C.",
    "reasoning": "Let me think.",
    "tool_calls": [["get_weather", {"city": "Oslo"}], ["get_weather", {"city": "Zürich"}]],
}
N_CTX = 2048


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model, whose answers depend on nobody else's."""
    options = ("--deterministic", "--n-ctx", str(N_CTX), "--pooling", "mean")
    with running(tmp_path_factory.mktemp("exact") / "log", *options) as server:
        yield server


def told(completion: Completion) -> dict[str, Any]:
    """What does not depend on the way it came, and on who else was there."""
    usage = completion.usage
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": completion.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": completion.logprobs,
        "reasoning": completion.reasoning,
        "calls": [(call.name, call.arguments) for call in completion.tool_calls],
        "usage": (usage.n_prompt, usage.n_output),
    }


def joined(deltas: list[TokenDelta]) -> tuple[str, tuple[int, ...], str]:
    return (
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.reasoning for delta in deltas),
    )


# --- The same as an engine ------------------------------------------------------------------------
async def test_a_server_gives_what_an_engine_gives(exact: Server) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "temperature": 0.9, "seed": 5}
    messages = [{"role": "user", "content": "count:1..30"}]
    async with (
        AsyncClient(exact.url) as client,
        Engine(deterministic=True, n_ctx=N_CTX, pooling="mean", **QUIET) as engine,
    ):
        prompts: list[str | list[int]] = [*PROMPTS, [97, 98, 99]]
        for prompt in prompts:
            mine = await client.generate(prompt, **options)
            assert told(mine) == told(await engine.generate(prompt, **options))
            assert mine.fingerprint
        params = SamplingParams(**options)
        async with client.stream(PROMPTS[0], params, request_id="mine") as stream:
            deltas = [delta async for delta in stream]
            completion = await stream.completion()
        assert joined(deltas)[:2] == (completion.text, completion.token_ids)
        assert completion.request_id == "mine"
        assert completion.timings.n_moves == 0
        assert completion.timings.ttft_s is not None
        whole = await client.chat(messages, **options)
        assert told(whole) == told(await engine.chat(messages, **options))
        begun = await client.chat(messages, generated=whole.token_ids[:3], **options)
        assert begun.token_ids == whole.token_ids[3:]
        scored: list[tuple[Any, Any]] = [("1+1=", "2"), ("1+1=", "7 and more"), ([97, 98], [99])]
        for before, after in scored:
            mine_score = await client.score(before, after)
            assert mine_score == await engine.score(before, after)
        with pytest.raises(InvalidRequestError, match="continuation"):
            await client.score("1+1=", "")
        for wrong in (5, ["a"]):
            with pytest.raises(InvalidRequestError, match=r"^prompt is"):
                await client.score(cast(Any, wrong), "a")
        texts: list[str | list[int]] = ["a river", "the sea", [97, 98]]
        vectors = await client.embed(texts)
        assert np.allclose(vectors, await engine.embed(texts), atol=1e-5)
        assert vectors.dtype == np.float32
        assert not np.allclose(
            np.linalg.norm(await client.embed(texts, normalize=False), axis=1), 1
        )


async def test_a_request_that_is_left_is_cancelled(exact: Server) -> None:
    async with AsyncClient(exact.url) as client:
        async with client.stream(LONG, ignore_eos=True, temperature=0.0) as stream:
            first = await anext(stream)
        ended = await stream.completion()
        assert ended.finish_reason is FinishReason.CANCELLED
        assert ended.token_ids == first.token_ids
        with pytest.raises(ClosedError, match="closed before its end"):
            await anext(stream)
    await wait_for(lambda: exact.metrics()["cllm_kv_cells_used"] == 0, "its cells are free")


def test_a_client_and_its_streams_may_be_made_before_an_event_loop_runs() -> None:
    assert AsyncClient("http://127.0.0.1:1").stream("a").request_id


HI = {"text": "Hi"}
HELD = {"times": 1, "text": "0123456789" * 30}


@pytest.mark.parametrize(
    "n_read",
    [
        pytest.param(0, marks=pytest.mark.cllm_server([{**HELD, "first_token_s": 600}, HI])),
        pytest.param(1, marks=pytest.mark.cllm_server([{**HELD, "token_s": 0.1}, HI])),
    ],
)
async def test_another_task_ends_a_stream_that_a_reader_waits_for(
    n_read: int, cllm_server: FakeServer
) -> None:
    errors, read_so_far = list[Exception](), list[TokenDelta]()
    async with AsyncClient(cllm_server.url) as client:

        async def read(stream: AnswerStream) -> None:
            try:
                async for delta in stream:
                    read_so_far.append(delta)
            except ClosedError as error:
                errors.append(error)

        with anyio.fail_after(60):
            async with (
                contextlib.aclosing(client.stream("a")) as stream,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(read, stream)
                while not cllm_server.asked or len(read_so_far) < n_read:
                    await anyio.sleep(0)
                await anyio.wait_all_tasks_blocked()
                await stream.cancel()
            assert (await stream.completion()).finish_reason is FinishReason.CANCELLED
        assert [str(error) for error in errors] == ["the stream was closed before its end"]
        assert set(client._replicas._n_open.values()) == {0}
        assert (await client.generate("b")).text == "Hi"


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("1e999", 1.0), ("nan", 1.0), ("86400", 60.0), ("-5", 0.0), ("0.5", 0.5), ("Fri", 1.0)],
)
def test_a_wait_that_a_server_demands_is_bounded(told: str, seconds: float) -> None:
    error = refusal_of(429, {"retry-after": told}, b"{}")
    assert isinstance(error, QueueFullError)
    assert error.retry_after_s == seconds


async def test_a_deadline_ends_it_as_it_ends_an_engines(exact: Server) -> None:
    async with AsyncClient(exact.url) as client:
        options: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0, "timeout": 0.001}
        ended = await client.generate(LONG, **options)
        assert ended.finish_reason is FinishReason.DEADLINE


async def test_many_prompts_are_answered_in_their_order(exact: Server) -> None:
    done: list[tuple[int, int]] = []
    async with AsyncClient(exact.url) as client:
        answers = await client.generate_all(
            PROMPTS, temperature=0.0, max_tokens=8, on_progress=lambda *n: done.append(n)
        )
        alone = [await client.generate(p, temperature=0.0, max_tokens=8) for p in PROMPTS]
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            await client.generate_all(PROMPTS, max_tokens=-5)
        with pytest.raises(InvalidRequestError, match="request_id"):
            await client.generate_all(PROMPTS, request_id="x")  # type: ignore[call-arg]
    assert [a.text for a in answers] == [a.text for a in alone]
    assert done[-1] == (len(PROMPTS), len(PROMPTS))


async def test_many_prompts_wait_where_the_queue_is_full(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--n-seq-max", "1", "--max-queue", "1") as server:
        async with AsyncClient(server.url) as client:
            answers = await client.generate_all([f"{n}+1=" for n in range(4)], max_tokens=2)
    assert len(answers) == 4


# --- Refused ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("x", {"temperature": -1.0}, InvalidRequestError),
        ("x", {"regex": "("}, InvalidRequestError),
        ("x", {"stop_token_ids": [10**6]}, InvalidRequestError),
        ("x", {"lora": {"nobody": 1.0}}, InvalidRequestError),
        ("x", {"prompt_logprobs": 1}, InvalidRequestError),
        ([97] * 3000, {}, PromptTooLongError),
    ],
)
async def test_what_a_server_refuses_is_the_error_of_an_engine(
    exact: Server, prompt: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    async with AsyncClient(exact.url) as client:
        with pytest.raises(error) as caught:
            await client.generate(prompt, **options)
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.field in options
        assert caught.value.field in str(caught.value)


@pytest.mark.full
async def test_a_wrong_key_and_an_unknown_route_are_told(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--api-key", "secret") as server:
        async with AsyncClient(server.url) as stranger:
            with pytest.raises(ServerError, match="API key") as caught:
                await stranger.generate("1+1=")
            assert caught.value.status == 401
        async with AsyncClient(server.url, api_key="secret") as client:
            assert (await client.generate("1+1=", temperature=0.0)).text == "2"
        async with AsyncClient(server.url + "/elsewhere", "secret") as lost:
            with pytest.raises(ServerError, match=r"Not Found|404"):
                await lost.generate("1+1=")


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:80", "ftp://host", "http://", 5, [], ["http://a", ""], "http://a:99999", "http://a:0",
        "http://a:80?b=1", "http://a#b",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_name(url: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="base_url"):
        AsyncClient(url)


@pytest.mark.parametrize("patience_s", [float("nan"), float("inf"), -1.0, "x", None, True, 10**400])
def test_a_patience_that_is_no_number_of_seconds_is_rejected(patience_s: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="patience_s"):
        AsyncClient("http://127.0.0.1:1", patience_s=patience_s)


@pytest.mark.cllm_server([{"text": "0123456789", "token_s": 0.02}])
async def test_one_task_reads_a_stream_and_one_that_was_left_does_not_look_complete(
    cllm_server: FakeServer,
) -> None:
    async with AsyncClient(cllm_server.url) as client:
        busy, read = 0, list[str]()

        async def reader(stream: AnswerStream) -> None:
            nonlocal busy
            try:
                read.extend([delta.text async for delta in stream])
            except anyio.BusyResourceError:
                busy += 1

        stream = client.stream("a")
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(reader, stream)
        assert ("".join(read), busy, len(cllm_server.asked)) == ("0123456789", 2, 1)
        assert [delta async for delta in stream] == []
        async with client.stream("a") as left:
            await anext(left)
        with pytest.raises(ClosedError, match="closed before its end"):
            await anext(left)
        ended = await left.completion()
        assert ended.finish_reason is FinishReason.CANCELLED


@pytest.mark.cllm_server([{"status": 429, "retry_after_s": 7}])
async def test_a_full_queue_is_the_error_of_an_engine(cllm_server: FakeServer) -> None:
    async with AsyncClient(cllm_server.url) as client:
        with pytest.raises(QueueFullError) as caught:
            await client.generate("Hi")
    assert caught.value.retry_after_s == 7.0
    assert len(cllm_server.asked) == 1


@pytest.mark.cllm_server([{"times": 2, "status": 503}, {"text": "Hello!"}])
async def test_a_server_that_starts_or_ends_is_asked_again(cllm_server: FakeServer) -> None:
    async with AsyncClient(cllm_server.url) as client:
        completion = await client.generate("Hi")
    assert (completion.text, completion.timings.n_moves) == ("Hello!", 0)


async def test_nobody_who_answers_is_an_error_in_time() -> None:
    async with AsyncClient("http://127.0.0.1:1", patience_s=0.2) as client:
        with pytest.raises(ServerError, match="does not answer"):
            await client.generate("Hi")
        with pytest.raises(ServerError, match="does not answer"):
            await client.embed(["Hi"])


async def test_a_request_that_nobody_answers_ends_when_its_time_is_over() -> None:
    async with AsyncClient("http://127.0.0.1:1", patience_s=600) as client:
        ended = await client.generate("Hi", timeout=0.01)
    assert (ended.finish_reason, ended.token_ids) == (FinishReason.DEADLINE, ())


@pytest.mark.parametrize("field", ["api_key", "session_id"])
@pytest.mark.parametrize("value", ["", "a\nb", "ü", 5])
def test_what_no_header_can_have_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        AsyncClient("http://127.0.0.1:1", **{field: value})


def test_an_id_that_a_server_would_not_take_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        AsyncClient("http://127.0.0.1:1").stream("Hi", request_id="a b")


# --- Failures --------------------------------------------------------------------------------------
TOKEN = {"text": "a", "token_ids": [97], "finish_reason": None}
FAILED = {"text": "", "token_ids": [], "finish_reason": "error"}
LAST = {"text": "b", "token_ids": [98], "finish_reason": "stop"}


def answer_of(*events: Any) -> bytes:
    """A whole answer over HTTP with these events."""
    data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
        len(data), data,
    )  # fmt: skip


@contextmanager
def canned(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives one of these after another; its address, and what it was asked."""
    asked: list[bytes] = []

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                data = connection.recv(1 << 16)
                length = int(re.findall(rb"content-length: (\d+)", data.lower())[0])
                while len(data.partition(b"\r\n\r\n")[2]) < length:
                    data += connection.recv(1 << 16)
                asked.append(data)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join()


async def test_a_generation_that_fails_on_its_way_is_an_error_with_what_there_is() -> None:
    error = {"error": {"message": "no token is left", "code": "generation_failed"}}
    with canned(answer_of(TOKEN, FAILED, error)) as (url, _):
        async with AsyncClient(url) as client:
            stream = client.stream("Hi")
            with pytest.raises(GenerationError, match="no token is left") as caught:
                await stream.completion()
            with pytest.raises(GenerationError, match="no token is left"):
                await stream.completion()
            with pytest.raises(GenerationError, match="no token is left"):
                await anext(stream)
    assert caught.value.completion is not None
    assert caught.value.completion.token_ids == (97,)
    assert stream.n_moves == 0


async def test_of_a_server_whose_engine_is_gone_it_goes_on_elsewhere() -> None:
    error = {"error": {"message": "the engine has stopped", "code": "unavailable"}}
    with canned(answer_of(TOKEN, FAILED, error), answer_of(LAST)) as (url, asked):
        async with AsyncClient(url, api_key="mine") as client:
            completion = await client.generate("Hi")
    assert (completion.text, completion.token_ids) == ("ab", (97, 98))
    assert completion.timings.n_moves == 1
    assert b'"generated":[97]' in asked[1]
    heads = [each.partition(b"\r\n\r\n")[0].lower() for each in asked]
    assert all(b"accept-encoding: identity" in head for head in heads)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": []},
        {**TOKEN, "text": 5},
        {**TOKEN, "token_ids": ["a"]},
        {**TOKEN, "token_ids": [math.inf]},
        {**TOKEN, "token_ids": "12"},
        {**TOKEN, "tool_calls": [{"index": 0, "arguments": None}]},
        {**LAST, "usage": [1]},
        {**LAST, "timings": {"queued_ms": "soon"}},
        {**LAST, "prompt_token_ids": 5},
    ],
    ids=lambda event: str(event)[-60:],
)
async def test_what_is_not_cllms_is_an_error_that_names_the_server(event: dict[str, Any]) -> None:
    with canned(answer_of(event)) as (url, _):
        async with AsyncClient(url) as client:
            with pytest.raises(GenerationError, match="does not answer like cllm"):
                await client.generate("Hi")


async def test_json_that_is_nested_without_end_is_an_error_that_names_the_server() -> None:
    data = b"data: " + b"[" * 100_000 + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(data)
    with canned(head + data) as (url, _):
        async with AsyncClient(url) as client:
            with pytest.raises(GenerationError, match="does not answer like cllm"):
                await client.generate("Hi")


async def test_the_error_of_another_server_is_its_text() -> None:
    with canned(answer_of({"error": "boom"})) as (url, _):
        async with AsyncClient(url) as client:
            with pytest.raises(GenerationError, match="boom"):
                await client.generate("Hi")


async def test_a_last_event_without_an_account_is_an_answer_all_the_same() -> None:
    bare = {**LAST, "usage": None, "timings": None, "prompt_token_ids": None, "tool_calls": None}
    with canned(answer_of(TOKEN, bare)) as (url, _):
        async with AsyncClient(url) as client:
            assert (await client.generate("Hi")).text == "ab"


# httpx leaves its own generator to trio.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <async_generator object Response.aiter_raw"
)
async def test_an_answer_that_cannot_be_unpacked_is_an_error_of_the_server() -> None:
    body = b"not gzip"
    head = (
        b"HTTP/1.1 %b\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    )
    answers = [head % (status, len(body)) + body for status in (b"200 OK", b"500 E", b"500 E")]
    with canned(*answers) as (url, _):
        async with AsyncClient(url, patience_s=0) as client:
            for call in (client.embed(["Hi"]), client.embed(["Hi"]), client.generate("Hi")):
                with pytest.raises(ServerError):
                    await call


async def test_vectors_and_scores_have_a_deadline_when_the_server_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_client, "GRACE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with AsyncClient(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
            for call in (client.embed(["a"], timeout=0.05), client.score("a", "b", timeout=0.05)):
                with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
                    await call


async def test_a_server_is_avoided_for_longer_after_each_failure_that_follows_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now))
    url = "http://127.0.0.1:1"
    several = Replicas([url, "http://127.0.0.1:2"], {}, patience_s=0)
    seconds = []
    for _ in range(2000):
        for _ in range(50):  # all requests that the server had fail at once
            several._avoid(url)
        seconds.append(several._avoided[url] - now)
        now = several._avoided[url]
    assert seconds[:7] == [2, 4, 8, 16, 32, 60, 60]
    assert seconds[-1] == 60
    await several.aclose()


@pytest.mark.parametrize("url", ["http://xn--:80", "http://127.0.0.1:1/\ud800", 5])
def test_what_is_no_address_is_rejected_by_name(url: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^base_url is"):
        AsyncClient(url)


async def test_a_generation_that_cannot_begin_is_the_error_of_an_engine(exact: Server) -> None:
    banned = dict.fromkeys(range(260), -math.inf)
    async with AsyncClient(exact.url) as client:
        with pytest.raises(GenerationError):
            await client.generate("1+1=", logit_bias=banned)


async def test_what_json_has_not_is_refused_before_anybody_is_asked() -> None:
    async with AsyncClient("http://127.0.0.1:1", patience_s=600) as client:
        for messages in (
            [{"role": "user", "content": "\ud800"}],
            [{"role": "user", "content": {1}}],
        ):
            with pytest.raises(InvalidRequestError):
                await client.chat(messages)


async def test_a_closed_client_says_so() -> None:
    client = AsyncClient("http://127.0.0.1:1")
    await client.aclose()
    with pytest.raises(ClosedError):
        await client.generate("Hi")


async def test_a_burst_that_begins_alike_is_spread(three: list[FakeServer]) -> None:
    urls = [server.url for server in three]
    async with AsyncClient(urls) as client, anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(client.generate, "river " * 100)
    counts = sorted(len(server.asked) for server in three)
    assert sum(counts) == 40
    assert counts[0] >= 5


# --- Cut off ----------------------------------------------------------------------------------------
async def the_same_with_cuts(url: str, make: Any, whole: Completion, steps: int) -> list[int]:
    """Cut an answer at so many places, and compare; how often each has moved."""
    with cutting(url) as proxy:
        async with AsyncClient(proxy.url) as client:
            await make(client).completion()
        n_bytes = proxy.n_answered
        moved = []
        for cut in range(0, n_bytes, max(1, n_bytes // steps)):
            proxy.cuts.append(cut)
            async with AsyncClient(proxy.url) as client:
                stream: AnswerStream = make(client)
                deltas = [delta async for delta in stream]
                completion = await stream.completion()
            assert told(completion) == told(whole), cut
            assert joined(deltas) == (whole.text, whole.token_ids, whole.reasoning), cut
            assert completion.timings.n_moves == stream.n_moves <= 1
            moved.append(stream.n_moves)
    return moved


@pytest.mark.cllm_server([RULE])
@pytest.mark.parametrize("n_cuts", [12, pytest.param(50, marks=pytest.mark.full)])
async def test_a_chat_that_is_cut_anywhere_goes_on_without_a_gap_and_never_twice(
    cllm_server: FakeServer, n_cuts: int
) -> None:
    def make(client: AsyncClient) -> AnswerStream:
        return client.stream_chat(CHAT, tools=TOOLS, request_id="cut")

    async with AsyncClient(cllm_server.url) as client:
        whole = await make(client).completion()
    assert whole.text == RULE["text"]
    assert whole.reasoning == RULE["reasoning"]
    assert [call.name for call in whole.tool_calls] == ["get_weather"] * 2
    moved = await the_same_with_cuts(cllm_server.url, make, whole, n_cuts)
    assert sum(moved) > len(moved) / 2


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_whatever_samples_or_constrains_it_the_tokens_are_the_same(
    exact: Server, name: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 1, **SAMPLINGS[name]}

    def make(client: AsyncClient) -> AnswerStream:
        return client.stream(PROMPTS[0], request_id="cut", **options)

    async with AsyncClient(exact.url) as client:
        whole = await make(client).completion()
    moved = await the_same_with_cuts(exact.url, make, whole, 12)
    assert sum(moved)


async def test_what_is_drawn_without_a_seed_goes_on_too(exact: Server) -> None:
    with cutting(exact.url) as proxy:
        proxy.cuts.append(1500)
        async with AsyncClient(proxy.url) as client:
            stream = client.stream(PROMPTS[0], max_tokens=30, ignore_eos=True, temperature=1.5)
            completion = await stream.completion()
    assert stream.n_moves == 1
    assert len(completion.token_ids) == 30


@pytest.mark.cllm_server([{"text": "a b c d e f g h", "disconnect_after": 1}])
async def test_an_answer_that_ends_every_server_ends_itself(cllm_server: FakeServer) -> None:
    async with AsyncClient(cllm_server.url) as client:
        with pytest.raises(GenerationError, match="cut off 9 times") as caught:
            await client.generate("Hi")
    assert caught.value.completion is not None
    assert caught.value.completion.finish_reason is FinishReason.ERROR
    assert len(caught.value.completion.token_ids) == 9
    assert len(cllm_server.asked) == 9


@pytest.mark.cllm_server([{"text": "It is warm."}])
async def test_a_step_that_is_cancelled_after_the_last_delta_has_come_loses_nothing(
    cllm_server: FakeServer,
) -> None:
    async with AsyncClient(cllm_server.url) as client, client.stream("Hi") as stream:
        while not stream._events:  # until the last event is there, too
            stream._events += stream._reader.feed(await anext(stream._chunks))  # type: ignore[arg-type]
        deltas: list[TokenDelta] = []
        while not deltas or deltas[-1].finish_reason is None:
            with anyio.CancelScope() as scope:
                scope.cancel()
                deltas.append(await anext(stream))
            if scope.cancelled_caught:
                deltas.append(await anext(stream))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert "".join(delta.text for delta in deltas) == (await stream.completion()).text


@pytest.mark.full
async def test_a_timeout_around_one_step_leaves_a_stream_usable(exact: Server) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 3, "temperature": 1.0}
    n_cancelled = 0
    async with AsyncClient(exact.url) as client:
        whole = await client.generate("Tell me", **options)
        async with client.stream("Tell me", **options) as stream:
            deltas: list[TokenDelta] = []
            while not deltas or deltas[-1].finish_reason is None:
                with anyio.CancelScope() as scope:
                    if len(deltas) % 4 == n_cancelled % 2:
                        scope.cancel()
                    deltas.append(await anext(stream))
                if scope.cancelled_caught:
                    n_cancelled += 1
                    deltas.append(await anext(stream))
            completion = await stream.completion()
        assert stream.n_moves == 0, "no server has failed"
    assert n_cancelled > 0
    assert told(completion) == told(whole)
    assert [i for delta in deltas for i in delta.token_ids] == list(whole.token_ids)


@pytest.mark.full
async def test_a_stream_whose_server_is_killed_goes_on_on_another(tmp_path: Path) -> None:
    options = ("--n-ctx", "8192", "--n-batch", "64")
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
    with (
        running(tmp_path / "a", *options) as first,
        running(tmp_path / "b", *options) as second,
    ):
        async with AsyncClient([first.url, second.url]) as client:
            streams = [client.stream(f"{LONG} {i}", **asked) for i in range(6)]
            texts = ["" for _ in streams]
            for i, stream in enumerate(streams):
                texts[i] += (await anext(stream)).text
            first.kill()
            for i, stream in enumerate(streams):
                async for delta in stream:
                    texts[i] += delta.text
            ended = [await stream.completion() for stream in streams]
            assert 0 < sum(stream.n_moves > 0 for stream in streams) < 6
            alone = [await client.generate(f"{LONG} {i}", **asked) for i in range(6)]
    assert [one.text for one in ended] == texts
    assert [len(one.token_ids) for one in ended] == [400] * 6
    assert [one.text for one in ended] == [one.text for one in alone]


@pytest.mark.full
async def test_a_server_that_drains_hands_its_streams_on(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}
    options = ("--n-ctx", "8192", "--drain-timeout", "0")
    with running(tmp_path / "a", *options) as first, running(tmp_path / "b", *options) as second:
        async with AsyncClient([first.url, second.url]) as client:
            streams = [client.stream(f"{LONG} {i}", **asked) for i in range(4)]
            for stream in streams:
                await anext(stream)
            assert first.stop() == 0
            ended = [await stream.completion() for stream in streams]
            assert any(stream.n_moves for stream in streams)
            alone = [await client.generate(f"{LONG} {i}", **asked) for i in range(4)]
    assert [one.token_ids for one in ended] == [one.token_ids for one in alone]


# --- Several servers --------------------------------------------------------------------------------
@pytest.fixture
def three() -> Iterator[list[FakeServer]]:
    """Servers, made where no event loop runs: each has its own."""
    with ExitStack() as stack:
        yield [stack.enter_context(fake_server([{"text": "Yes."}])) for _ in range(3)]


async def test_what_begins_alike_goes_to_the_same_server(three: list[FakeServer]) -> None:
    urls = [server.url for server in three]
    async with AsyncClient(urls) as client:
        for _ in range(3):
            for head in ("river " * 100, "sea " * 100, "rain " * 100):
                await client.generate(head + "and more")
    heads = [{asked.body["prompt"][:4] for asked in server.asked} for server in three]
    assert sorted(map(len, heads)) == [1, 1, 1]
    async with AsyncClient(urls, session_id="mine") as client:
        before = [len(server.asked) for server in three]
        for i in range(5):
            await client.generate(f"{i} something else")
    grown = [len(s.asked) - n for s, n in zip(three, before, strict=True)]
    assert sorted(grown) == [0, 0, 5]
    (last,) = [s.asked[-1] for s, n in zip(three, grown, strict=True) if n]
    assert last.headers["x-session-id"] == "mine"


async def test_the_continuations_of_one_prompt_are_scored_by_the_server_that_has_computed_it(
    three: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = Replicas._ask

    async def ask(replicas: Replicas, url: str, *rest: Any) -> Any:
        asked.append(url)
        return await real(replicas, url, *rest)

    async with AsyncClient([server.url for server in three]) as client:
        await client.generate("river " * 100)
        (computed,) = [server.url for server in three if server.asked]
        monkeypatch.setattr(Replicas, "_ask", ask)
        for word in "abcd":
            assert (await client.score("river " * 100, word)).token_ids
    assert asked == [computed] * 4


async def test_events_are_whole_whatever_is_in_them_and_what_is_none_is_refused() -> None:
    reader = EventReader()
    assert [*reader.feed(b'data: {"a": "\xe2\x80\xa8"}\n\nda')] == [b'{"a": "\xe2\x80\xa8"}']
    assert [*reader.feed(b"ta: [DONE]\n\n: comment\n\n")] == [b"[DONE]"]
    assert object_of(b'{"a": 1}') == {"a": 1}
    for data in (b"[]", b"{"):
        with pytest.raises(ValueError, match=r"the event is not a JSON object of cllm|Expecting"):
            object_of(data)
    with pytest.raises(KeyError):
        delta_of({"text": "a"})
    logprob = {"token_id": 1, "text": "a", "bytes": [97], "logprob": -9999.0, "top": []}
    delta = delta_of({"text": "", "token_ids": [1], "finish_reason": None, "logprobs": [logprob]})
    assert delta.logprobs is not None
    assert delta.logprobs[0].logprob == -math.inf


# --- Images ----------------------------------------------------------------------------------------
def picture(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with a projector."""
    mmproj = str(make_projector.ensure("embedded"))
    options = ("--deterministic", "--n-ctx", str(N_CTX), "--mmproj", mmproj)
    with running(tmp_path_factory.mktemp("seeing") / "log", *options) as server:
        yield server


async def test_images_are_sent_to_servers_and_give_what_an_engine_gives(
    seeing: Server, tmp_path: Path
) -> None:
    written = io.BytesIO()
    Pillow.fromarray(picture(2)).save(written, "PNG")
    path = tmp_path / "image.png"
    path.write_bytes(written.getvalue())
    images = [Image(picture(1)), Image(written.getvalue()), Image(path)]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def parts(image: Image) -> list[dict[str, Any]]:
        text = {"type": "text", "text": "a"}
        return [text, {"type": "image", "image": image}, text, text]

    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    async with (
        AsyncClient(seeing.url) as client,
        Engine(
            deterministic=True, n_ctx=N_CTX, mmproj=make_projector.ensure("embedded"), **QUIET
        ) as engine,
    ):
        for image in images:
            mine = await client.generate(["a", image, "b"], **options)
            assert told(mine) == told(await engine.generate(["a", image, "b"], **options))
            assert mine.usage.n_image_tokens == 64
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": parts(image)},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": parts(image)},
            ]
            chats = [messages[:1], messages]
            for chat in chats:
                mine = await client.chat(chat, **options)
                assert told(mine) == told(await engine.chat(chat, **options))
                assert mine.usage.n_image_tokens == 64 * len(chat[::2])
        with pytest.raises(InvalidRequestError, match="can be read") as caught:
            await client.generate(["a", Image(tmp_path / "none.png")], **options)
        assert caught.value.field == "prompt[1]"


async def test_audio_is_sent_to_servers_and_gives_what_an_engine_gives(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, mmproj = make_model.ensure("tiny-llama"), make_projector.ensure("ultravox")
    sound = Audio(np.sin(np.arange(4_000) / 7).astype(np.float32), sample_rate=8_000)
    given = ("--deterministic", "--n-ctx", str(N_CTX), "-m", str(model), "--mmproj", str(mmproj))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    prompt: list[Any] = ["a", sound, "b"]
    messages: list[Any] = [{"role": "user", "content": [{"type": "audio", "audio": sound}]}]
    with running(tmp_path_factory.mktemp("hearing") / "log", *given) as server:
        async with (
            AsyncClient(server.url) as client,
            Engine(model, deterministic=True, n_ctx=N_CTX, mmproj=mmproj, **QUIET) as engine,
        ):
            mine = await client.generate(prompt, **options)
            assert told(mine) == told(await engine.generate(prompt, **options))
            assert (mine.usage.n_audio_tokens, mine.usage.n_image_tokens) == (50, 0)
            mine = await client.chat(messages, **options)
            assert told(mine) == told(await engine.chat(messages, **options))
            broken: list[Any] = ["a", Audio(b"no audio")]
            with pytest.raises(InvalidRequestError, match="an intact WAV") as caught:
                await client.generate(broken, **options)
            assert caught.value.field == "prompt[1]"


async def test_a_stream_with_an_image_moves_to_another_server(
    seeing: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: list[Any] = ["count: ", Image(picture(3))]
    threads: list[threading.Thread] = []
    data_url = Image.data_url

    def in_a_thread(image: Image) -> str:
        threads.append(threading.current_thread())
        return data_url(image)

    monkeypatch.setattr(Image, "data_url", in_a_thread)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with cutting(seeing.url) as proxy:
        proxy.cuts.append(2000)
        async with AsyncClient(seeing.url) as direct, AsyncClient(proxy.url) as client:
            expected = await direct.generate(prompt, **options)
            async with client.stream(prompt, **options) as stream:
                moved = await stream.completion()
    assert stream.n_moves >= 1
    assert moved.token_ids == expected.token_ids
    # Files are read and encoded once for each request, and not in the event loop.
    assert len(threads) == 2
    assert threading.current_thread() not in threads
