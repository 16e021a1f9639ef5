"""The client that counts tokens and times."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.side_by_side import (
    http_load,
)
from benchmarks.side_by_side.http_client import Answer, Connection, read_answer
from benchmarks.side_by_side.records import (
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LLAMA_SERVER,
    PYTHON_SERVER,
)
from cllm.bindings import Model
from tools import make_model

pytestmark = pytest.mark.full

# Text that looks like what is counted, were its quotes not escaped, and what no event is.
TRICKY = '"choices" data: [DONE]\n\n "error" 0\r\n\r\n 好'
DONE, PING = "data: [DONE]\n\n", ":\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def event(text: str, **fields: Any) -> str:
    """An event with a token."""
    choice = {"text": text, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice], **fields}, ensure_ascii=False)}\n\n"


def last_event(n_tokens: int | None = None, reason: str = "length") -> str:
    """The event that tells the end."""
    usage = {} if n_tokens is None else {"usage": {"completion_tokens": n_tokens}}
    choice = {"text": "", "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], **usage}, separators=(',', ':'))}\n\n"


def chunk(text: str) -> bytes:
    """A part of a body, framed."""
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def body(*parts: str) -> bytes:
    """A body to its end, a chunk for each part."""
    return b"".join(map(chunk, parts)) + LAST_CHUNK


async def read(pieces: Sequence[bytes], clock: Callable[[], float] = lambda: 0.0) -> Answer:
    """What the client makes of a body that comes in pieces."""
    reader, answer = asyncio.StreamReader(), Answer(status=200)
    reading = asyncio.ensure_future(read_answer(reader, answer, clock))
    for piece in pieces:
        reader.feed_data(piece)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    reader.feed_eof()
    await reading
    return answer


BODY = body(event(TRICKY), PING, event("b") + event(TRICKY), event("d"), last_event(5), DONE)


@given(st.sets(st.integers(1, len(BODY) - 1)))
@settings(deadline=None)
def test_events_are_counted_wherever_the_bytes_are_cut(cuts: set[int]) -> None:
    pieces = [BODY[a:b] for a, b in itertools.pairwise([0, *sorted(cuts), len(BODY)])]
    answer = asyncio.run(read(pieces))
    assert (answer.failure, answer.finish_reason) == ("", "length")
    assert (answer.n_events, answer.n_tokens) == (4, 5)
    assert 1 <= len(answer.arrivals) <= 4


def test_every_byte_alone_makes_four_arrivals() -> None:
    answer = asyncio.run(read([BODY[i : i + 1] for i in range(len(BODY))]))
    assert len(answer.arrivals) == answer.n_events == 4


def test_times_are_those_of_arrivals_and_the_end_is_none() -> None:
    parts = [event("a"), PING, event("b"), event("c") + event("d"), last_event(), DONE]
    times = iter([10.5, 10.75, 11.75, 11.875])
    pieces = [chunk(part) for part in parts] + [LAST_CHUNK]
    answer = asyncio.run(read(pieces, lambda: next(times)))
    answer.sent_at = 10.0
    assert answer.ttft_s == 0.5
    assert answer.gaps_s() == [0.25, 1.0]
    assert answer.gaps_s(since=10.75) == [1.0]
    assert answer.gaps_s(until=10.625) == [0.25]
    assert answer.n_tokens is None


def test_a_last_token_that_comes_together_with_the_end_has_its_arrival() -> None:
    pieces = [chunk(event("a")), chunk(event("b")) + chunk(last_event(2)) + LAST_CHUNK]
    answer = asyncio.run(read(pieces))
    assert len(answer.arrivals) == answer.n_events == 2


def test_the_only_arrival_is_the_first_token_even_if_it_is_the_end() -> None:
    answer = asyncio.run(read([body(event("a"), last_event(1), DONE)], lambda: 3.0))
    assert (answer.arrivals, answer.n_events) == ([3.0], 1)
    held_back = asyncio.run(read([body(last_event(1), DONE)], lambda: 3.0))
    assert (held_back.arrivals, held_back.n_events, held_back.n_tokens) == ([3.0], 0, 1)


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ([event("a"), 'data: {"error":{"message":"full"}}\n\n'], '"error":{"message":"full"}}'),
        ([event("a"), DONE], "ended without a reason"),
        ([], "ended without a reason"),
    ],
)
def test_an_answer_that_says_no_end_is_a_failure(parts: list[str], failure: str) -> None:
    data = body(*parts)
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        answer = asyncio.run(read(pieces))
        assert not answer.is_complete
        assert answer.failure == failure


def test_an_error_is_told_though_the_connection_was_closed_after_it() -> None:
    answer = asyncio.run(read([chunk(event("a")), chunk('data: {"error":"gone"}\n\n')]))
    assert answer.failure == '"error":"gone"}'


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def stand_in(*handlers: Handler) -> AsyncIterator[int]:
    """The port of a server that treats each connection as told, and closes it."""
    left, handling = list(handlers), []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handling.append(asyncio.current_task())
        await left.pop(0)(reader, writer)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*filter(None, handling))
    assert not left, "a connection that was not made"


class Requests(list[Any]):
    """Bodies of the requests that came."""

    async def take(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
        n_bytes = int(head.lower().partition(b"content-length:")[2].split()[0])
        self.append(json.loads(await reader.readexactly(n_bytes)))

    def answering(self, *responses: bytes) -> Handler:
        """Answer so many requests on one connection."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for response in responses:
                await self.take(reader)
                writer.write(response)
                await writer.drain()

        return handle


ANSWER = HEAD + body(event("a"), last_event(1), DONE)


def ask(*handlers: Handler, n: int = 1, **options: Any) -> list[Answer]:
    """Ask the stand-in, `n` times on one connection that is kept alive."""

    async def run() -> list[Answer]:
        async with stand_in(*handlers) as port:
            connection = Connection(port, **options)
            answers = []
            for number in range(n):
                answers.append(await connection.stream({"number": number}))
                await asyncio.sleep(0.01 * (number < n - 1))
            connection.close()
            return answers

    return asyncio.run(run())


def test_a_connection_is_kept_alive() -> None:
    requests = Requests()
    assert all(a.is_complete for a in ask(requests.answering(ANSWER, ANSWER), n=2))
    assert requests == [{"number": 0}, {"number": 1}]


def test_a_closed_idle_connection_is_opened_again_and_the_request_taken_once() -> None:
    requests = Requests()
    once = requests.answering(ANSWER)
    first, second, third = ask(once, once, once, n=3)
    assert first.is_complete
    assert second.is_complete
    assert third.is_complete
    assert requests == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_a_request_that_a_new_connection_loses_is_not_sent_again() -> None:
    requests = Requests()
    (answer,) = ask(requests.answering(b""))
    assert "IncompleteReadError" in answer.failure
    assert requests == [{"number": 0}]


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 5\r\n\r\nlater", "status 429: later"),
        (HEAD + chunk(event("a")), "EOFError('the connection was closed within an answer')"),
        (HEAD[:10], "IncompleteReadError('10 bytes read on a total of undefined expected bytes')"),
    ],
)
def test_a_status_or_an_early_close_is_a_failure_even_on_a_used_connection(
    response: bytes, failure: str
) -> None:
    requests = Requests()
    first, second = ask(requests.answering(ANSWER, response), n=2)
    assert first.is_complete
    assert second.failure == failure
    assert not second.is_complete
    assert second.ended_at >= second.sent_at > 0
    assert len(requests) == 2


def test_silence_is_a_failure_and_its_connection_not_used_again() -> None:
    requests = Requests()

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await requests.take(reader)
        await reader.read()  # until the client leaves

    first, second = ask(be_silent, requests.answering(ANSWER), n=2, timeout_s=0.3)
    assert first.failure == "TimeoutError()"
    assert second.is_complete


def test_each_peer_is_asked_for_all_tokens_in_its_own_words() -> None:
    common = {"model": "model", "prompt": [1], "max_tokens": 2, "temperature": 0, "stream": True}
    for peer in (CLLM_SERVE, CLLM_SERVE_THREAD, LLAMA_SERVER):
        asked = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        assert http_load.body_for(peer, [1], 2) == common | asked
    banned = {"logit_bias": {str(token): -100.0 for token in http_load.END_TOKENS}}
    assert http_load.body_for(PYTHON_SERVER, [1], 2) == common | banned


def test_the_tokens_that_are_banned_are_those_that_end_a_generation(llama_cpp_source: Path) -> None:
    path = llama_cpp_source / "models" / make_model.VOCABULARY_NAME
    with Model(path, vocab_only=True) as model:
        ends = [token for token in range(model.vocab.n_tokens) if model.vocab.is_eog(token)]
    assert tuple(ends) == http_load.END_TOKENS


def test_tokens_are_those_the_server_counts_or_the_length_it_ended_by() -> None:
    assert http_load.n_tokens_of(Answer(n_tokens=7, n_events=3, finish_reason="stop"), 32) == 7
    assert http_load.n_tokens_of(Answer(n_events=30, finish_reason="length"), 32) == 32
    assert http_load.n_tokens_of(Answer(n_events=30, finish_reason="stop"), 32) == 30
