"""What operators and tools ask: tokens, slots, metrics, health, documentation, request ids, logs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import cllm
from cllm import EngineConfig, EngineStatus, Health, SamplingOptions
from cllm.server.app import create_app
from cllm.server.bodies.schemas import CHAT_OPTIONS
from cllm.server.config import ServerConfig
from cllm.testing import FakeEngine
from tests.conftest import QUIET
from tests.server.conftest import Server, ask, refusal_of, samples_of, streaming, wait_until


def test_texts_and_tokens_go_both_ways(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "é🙂"}).json()["tokens"]
    assert tokens == list("é🙂".encode())
    text = client.post("/detokenize", json={"tokens": tokens}).json()
    assert text == {"content": "é🙂", "prompt": "é🙂"}
    special = client.post("/tokenize", json={"content": "a", "add_special": True}).json()
    assert special["tokens"][1:] == [97]


def test_texts_and_tokens_go_both_ways_as_in_vllm(client: httpx.Client) -> None:
    plain = client.post("/tokenize", json={"prompt": "abc", "add_special_tokens": False}).json()
    n_ctx = client.get("/props").json()["default_generation_settings"]["n_ctx"]
    assert plain == {"tokens": list(b"abc"), "count": 3, "max_model_len": n_ctx}
    assert client.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 4
    info = client.get("/tokenizer_info").json()
    props = client.get("/props").json()
    for name in ("bos_token", "eos_token", "chat_template"):
        assert info[name] == props[name]
    special = client.post("/tokenize", json={"content": info["eos_token"]}).json()["tokens"]
    assert len(special) == 1


@pytest.mark.parametrize(
    ("body", "field"), [({}, "content"), ({"content": "a", "prompt": "a"}, "prompt")]
)
def test_a_text_to_tokenize_is_given_once(
    client: httpx.Client, body: dict[str, str], field: str
) -> None:
    assert refusal_of(client.post("/tokenize", json=body))["param"] == field


def test_pieces_are_text_or_the_bytes_that_are_none(client: httpx.Client) -> None:
    """As in llama-server."""
    pieces = client.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()
    assert pieces["tokens"][0] == {"id": 97, "piece": "a"}

    assert pieces["tokens"][1:] == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]


@pytest.mark.parametrize("tokens", [[-1], [260], [2**31], [2**63], ["a"], "a", None])
def test_what_is_no_token_is_not_detokenized(client: httpx.Client, tokens: Any) -> None:
    error = refusal_of(client.post("/detokenize", json={"tokens": tokens}))
    assert error["param"] == "tokens"


def test_slots_show_every_seq_id_and_who_holds_it(server: Server) -> None:
    with server.client(headers={"X-Request-ID": "watched"}) as client, streaming(client):
        slots = server.get("/slots").json()
    assert [slot["seq_id"] for slot in slots] == list(range(len(slots)))
    assert len(slots) >= 16
    (slot,) = [slot for slot in slots if slot["request_id"] == "watched"]
    assert slot["state"] == "decode"
    assert slot["n_computed"] >= slot["n_prompt"]
    server.wait_idle()


def test_metrics_move_with_the_requests(client: httpx.Client) -> None:
    before = samples_of(client.get("/metrics").text)
    ask(client, "repeat:metrics")
    client.post("/generate", json={})
    after = samples_of(client.get("/metrics").text)
    moved = {name: after[name] - before.get(name, 0) for name in after}
    assert moved["cllm_requests_finished_total{reason=stop}"] == 1
    assert moved["cllm_output_tokens_total"] == len("metrics") + 2
    assert moved["cllm_time_to_first_token_seconds_count"] == 1
    assert moved["cllm_queue_time_seconds_count"] == 1
    assert moved["cllm_request_duration_seconds_count"] == 1
    assert moved["cllm_inter_token_latency_seconds_count"] >= 1
    assert moved["cllm_tick_seconds_total{stage=decode}"] > 0
    assert moved["cllm_http_responses_total{route=/generate,status=200}"] == 1
    assert moved["cllm_http_responses_total{route=/generate,status=400}"] == 1


def test_health_is_ok_while_the_heart_beats(client: httpx.Client) -> None:
    response = client.get("/health")
    assert response.status_code == 200
    assert response.json()["status"] == "ok"
    assert response.json()["model"] == "cllm-tiny"
    assert response.json()["version"] == cllm.__version__
    assert response.json()["heartbeat_age_s"] >= 0
    assert response.json()["ping_interval_s"] == 15


@pytest.mark.parametrize("path", ["/readyz", "/healthz", "/livez"])
def test_the_probes_of_kubernetes_are_200_while_the_engine_is_ready(
    client: httpx.Client, path: str
) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.json()["model"] == "cllm-tiny"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "is_alive"),
    [
        (EngineStatus.READY, True),
        (EngineStatus.RESTARTING, True),
        (EngineStatus.DRAINING, True),
        (EngineStatus.STALLED, False),  # it has no process that is replaced
        (EngineStatus.FAILED, False),
        (EngineStatus.CLOSED, False),
    ],
)
async def test_a_server_is_dead_only_if_a_restart_helps(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, status: EngineStatus, is_alive: bool
) -> None:
    async with FakeEngine() as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            monkeypatch.setattr(engine, "health", lambda: Health(status, 0.0))
            assert (await client.get("/livez")).status_code == (200 if is_alive else 503)
            is_ready = status is EngineStatus.READY
            for path in ("/readyz", "/healthz", "/health"):
                assert (await client.get(path)).status_code == (200 if is_ready else 503)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/readyz", "/healthz", "/livez"])
async def test_probes_need_no_key_and_a_loading_server_is_alive(path: str) -> None:
    app = create_app(EngineConfig(**QUIET), ServerConfig(api_key="right"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get(path)).status_code == (200 if path == "/livez" else 503)


def test_the_documentation_names_every_route_and_sampling_field(client: httpx.Client) -> None:
    assert client.get("/docs").status_code == 200
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/generate", "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/livez", "/metrics", "/live", "/slots",
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}",
        "/v1/chat/completions/input_tokens", "/v1/responses", "/v1/responses/input_tokens",
        "/v1/messages", "/v1/messages/count_tokens", "/apply-template", "/props",
        "/v1/embeddings", "/embedding", "/v1/rerank", "/classify", "/lora-adapters",
        "/slots/{seq_id}", "/generate/score", "/completion", "/infill", "/v1/audio/transcriptions",
        "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/version", "/api/tags", "/api/ps",
        "/api/show", "/api/pull", "/admin/reload",
    }  # fmt: skip
    for path in document["paths"].values():
        for operation in path.values():
            assert set(operation["responses"]) == {"200", "4XX", "503"}
    fields = document["components"]["schemas"]["GenerateBody"]["properties"]
    others = {
        "model", "prompt", "messages", "generated", "stream", "timeout", "priority", "tenant", "lora",
        "return_prompt_token_ids", "parse_special", *CHAT_OPTIONS,
    }  # fmt: skip
    assert {*SamplingOptions.__annotations__, *others} == set(fields)


def test_a_request_id_goes_in_and_out(client: httpx.Client) -> None:
    response = client.post(
        "/generate", json={"prompt": "1+1="}, headers={"X-Request-ID": "mine:1.a-b_c"}
    )
    assert response.headers["X-Request-ID"] == response.json()["id"] == "mine:1.a-b_c"
    assert client.get("/health", headers={"X-Request-ID": "h"}).headers["X-Request-ID"] == "h"
    made = [client.get("/nowhere").headers["X-Request-ID"] for _ in range(2)]
    assert made[0] != made[1]


@pytest.mark.parametrize("given", ["a b", "x" * 129, "é", '"', ""])
def test_a_request_id_that_could_hurt_a_log_is_replaced(client: httpx.Client, given: str) -> None:
    sent = {b"X-Request-ID": given.encode("latin-1")}
    response = client.get("/health", headers=sent)
    assert response.status_code == 200
    assert re.fullmatch("[0-9a-f]{16}", response.headers["X-Request-ID"])


def test_requests_may_have_one_request_id_at_once(server: Server) -> None:
    """A gateway gives everything that one of its own requests causes the same."""
    with server.client(headers={"X-Request-ID": "twice"}) as client, streaming(client):
        answer = server.get("/slots").json()
        assert [slot["request_id"] for slot in answer if slot["state"] == "decode"] == ["twice"]
        again = ask(client)
        assert (again.json()["text"], again.json()["id"]) == ("2", "twice")
        assert again.headers["X-Request-ID"] == "twice"
    server.wait_idle()


def test_who_leaves_counts_in_the_durations(server: Server) -> None:
    """Or the slowest would be the ones that nobody sees."""
    before = server.metrics()
    with server.client() as client, streaming(client):
        pass
    server.wait_idle()
    name = "cllm_request_duration_seconds_count"
    wait_until(lambda: server.metrics()[name] == before[name] + 1, "it is counted")


@pytest.mark.full
def test_those_who_want_tokens_do_not_keep_prompts_waiting(server: Server) -> None:
    """Forty texts of a megabyte: whoever leaves is given up, and the others take turns."""
    body = json.dumps({"content": "x" * (1 << 20)}).encode()
    begun_at = time.monotonic()
    httpx.post(server.url + "/tokenize", content=body, timeout=60).raise_for_status()
    one_ms = 1000 * (time.monotonic() - begun_at)
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
    answer = server.generate("repeat:" + "a" * 100, max_tokens=1)
    assert answer.json()["timings"]["total_ms"] < 20 * one_ms
    statuses = [
        response.status_code
        for response in _at_once(
            [
                lambda: httpx.post(server.url + "/tokenize", content=body, timeout=60)
                for _ in range(3)
            ]
        )
    ]
    assert statuses == [200] * 3


def _at_once(calls: Sequence[Callable[[], httpx.Response]]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def test_the_log_tells_the_life_of_each_request_but_no_prompt(server: Server) -> None:
    with server.client(headers={"X-Request-ID": "told"}) as client:
        ask(client, "repeat:private")
    wait_until(lambda: "told: cleared KV cache" in server.log, "the last line of the request")
    life = [line for line in server.log.splitlines() if "request told: " in line]
    said = [re.sub(r".*request told: ", "", line) for line in life]
    for first, later in [("new", "prefill"), ("prefill", "finished"), ("prefill", "cleared")]:
        at = [
            next(i for i, line in enumerate(said) if line.startswith(word))
            for word in (first, later)
        ]
        assert at == sorted(at), said
    assert "private" not in server.log
