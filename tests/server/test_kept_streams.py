"""A client that lost its connection takes its answer up again where it was."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import (
    LONG,
    LONG_ANSWER,
    Server,
    hasty,
    refusal_of,
    running,
    wait_until,
)

KEY = {"Authorization": "Bearer secret"}
COUNT: dict[str, Any] = {"prompt": LONG, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps answers for a minute."""
    options = ("--resume-window", "60")
    with running(tmp_path_factory.mktemp("keeper") / "log", *options) as server:
        yield server


def events_in(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number and data of each event."""
    number = 0
    for line in lines:
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line.startswith("data: "):
            yield number, line.removeprefix("data: ")


def texts_of(events: list[tuple[int, str]]) -> str:
    return "".join(json.loads(data)["text"] for _, data in events if data != "[DONE]")


def first_events(
    client: httpx.Client, request_id: str, n: int, **fields: Any
) -> list[tuple[int, str]]:
    """The first events of a stream whose connection is then closed."""
    found = []
    headers = {"X-Request-ID": request_id}
    with client.stream("POST", "/generate", json={**COUNT, **fields}, headers=headers) as response:
        assert response.status_code == 200
        for event in events_in(response.iter_lines()):
            found.append(event)
            if len(found) == n:
                break
    return found


def rest_after(client: httpx.Client, request_id: str, number: int) -> list[tuple[int, str]]:
    headers = {"Last-Event-ID": str(number)}
    with client.stream("GET", f"/v1/streams/{request_id}", headers=headers) as response:
        assert response.status_code == 200, response.read()
        return list(events_in(response.iter_lines()))


@pytest.mark.parametrize("n_read", [1, 7, 100])
def test_the_rest_comes_once_and_whole(keeper: Server, n_read: int) -> None:
    with keeper.client() as client:
        first = first_events(client, f"rest-{n_read}", n_read)
        assert [number for number, _ in first] == list(range(1, n_read + 1))
        rest = rest_after(client, f"rest-{n_read}", first[-1][0])
    assert rest[0][0] == n_read + 1
    assert rest[-1][1] == "[DONE]"
    assert texts_of(first + rest) == LONG_ANSWER
    keeper.wait_idle()


def test_what_was_sent_and_never_arrived_is_sent_again(keeper: Server) -> None:
    with keeper.client() as client:
        first = first_events(client, "again", 10)
        assert texts_of(first[:4] + rest_after(client, "again", 4)) == LONG_ANSWER


def test_an_answer_in_one_piece_can_be_taken_up_too(keeper: Server) -> None:
    with keeper.client() as client:
        body = {**COUNT, "stream": False}
        with pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json=body, headers={"X-Request-ID": "whole"}, timeout=0.001)
        wait_until(lambda: "whole" in keeper.log, "the request has come")
        assert client.get("/v1/streams/whole").json()["text"] == LONG_ANSWER


def test_who_takes_it_up_ends_who_read_it_before(keeper: Server) -> None:
    headers = {"X-Request-ID": "two"}
    endless = {**COUNT, "ignore_eos": True}
    with keeper.client() as client, keeper.client() as other:
        with client.stream("POST", "/generate", json=endless, headers=headers) as response:
            lines = events_in(response.iter_lines())
            next(lines)
            with other.stream("GET", "/v1/streams/two") as taken:
                assert next(events_in(taken.iter_lines()))[0] == 1
                with contextlib.suppress(httpx.TransportError):  # it is cut in its midst
                    assert all(data != "[DONE]" for _, data in lines)
        assert other.delete("/v1/streams/two").status_code == 200
    keeper.wait_idle()


def test_who_reads_what_is_given_up_hears_of_its_end(keeper: Server) -> None:
    endless = {**COUNT, "ignore_eos": True}
    headers = {"X-Request-ID": "given-up"}
    with (
        keeper.client() as client,
        keeper.client() as other,
        client.stream("POST", "/generate", json=endless, headers=headers) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert other.delete("/v1/streams/given-up").status_code == 200
        with contextlib.suppress(httpx.TransportError):  # it is cut in its midst
            for _ in lines:
                pass
    keeper.wait_idle()


def test_without_an_id_an_answer_ends_with_its_connection(keeper: Server) -> None:
    endless = {**COUNT, "ignore_eos": True}
    with keeper.client() as client, client.stream("POST", "/generate", json=endless) as response:
        assert "id: " not in next(response.iter_lines())
    keeper.wait_idle()


def test_a_reader_that_stays_away_pauses_its_stream(keeper: Server) -> None:
    with keeper.client() as client:
        first_events(client, "paused", 1, ignore_eos=True)
        wait_until(
            lambda: any(slot["state"] == "paused" for slot in keeper.get("/slots").json()),
            "its stream pauses",
        )
        assert client.delete("/v1/streams/paused").status_code == 200
    keeper.wait_idle()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/streams/nobody", {}, 404),
        ("/v1/streams/there", {"Last-Event-ID": "x"}, 400),
        ("/v1/streams/there", {"Last-Event-ID": "99999"}, 400),
        ("/v1/streams/there", {"Authorization": "Bearer other"}, 404),
    ],
)
def test_what_cannot_be_taken_up_is_refused_by_name(
    keeper: Server, path: str, headers: dict[str, str], status: int
) -> None:
    with keeper.client() as client:
        first_events(client, "there", 3, ignore_eos=True)
        try:
            assert refusal_of(client.get(path, headers=headers), status)["param"]
        finally:
            assert client.delete("/v1/streams/there").status_code == 200
    keeper.wait_idle()


def test_a_refusal_is_what_it_is_without_and_is_told_again(keeper: Server) -> None:
    with keeper.client() as client:
        refused = client.post(
            "/generate", json={"prompt": "x", "regex": "("}, headers={"X-Request-ID": "refused"}
        )
        assert refusal_of(refused)["param"] == "regex"
        assert refusal_of(client.get("/v1/streams/refused"))["param"] == "regex"


def test_it_is_given_up_when_the_time_is_over(tmp_path: Path) -> None:
    with hasty(tmp_path / "log", resume_window_s=0.2) as server, server.client() as client:
        first_events(client, "late", 1, ignore_eos=True)
        server.wait_idle()
        wait_until(lambda: client.get("/v1/streams/late").status_code == 404, "nobody can have it")


def test_a_server_that_stops_does_not_wait_for_who_may_come_back(tmp_path: Path) -> None:
    with hasty(tmp_path / "log", resume_window_s=600.0, drain_timeout_s=1.0) as server:
        with server.client() as client:
            first_events(client, "left", 1, ignore_eos=True)
        assert server.stop() == 0


def test_openais_client_reads_a_kept_stream(keeper: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{keeper.url}/v1", api_key="none")
    stream = client.completions.create(
        model="m", prompt=LONG, temperature=0, max_tokens=20, stream=True,
        extra_headers={"X-Request-ID": "openai"},
    )  # fmt: skip
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert re.match(r"1 2 3 4", text)
