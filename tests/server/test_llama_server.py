"""`POST /completion` and `POST /infill` take what llama-server's clients send, and answer as it does."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cllm import FimTokens, TokenDelta
from cllm.server import create_app, state
from cllm.server.answers.infill import Gap, infill_prompt
from cllm.server.routes.llama_server import Lines
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio
FIM = FimTokens(prefix=1, suffix=2, middle=3, repository=4, file=5)
CODE = "def f():\n    a\n    b\nc\n"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that writes the same code after every prompt."""
    return FakeEngine(lambda _: CODE, n_ctx=256)


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def test_a_completion_says_what_llama_server_says(http: httpx.AsyncClient) -> None:
    body = {"prompt": "go", "n_predict": 5, "return_tokens": True, "n_probs": 2, "model": None}
    said = (await http.post("/completion", json=body)).json()
    assert (said["content"], said["tokens"]) == (CODE[:5], list(CODE[:5].encode()))
    assert (said["stop"], said["stop_type"], said["stopping_word"]) == (True, "limit", "")
    assert (said["tokens_predicted"], said["tokens_evaluated"], said["truncated"]) == (5, 2, False)
    assert (said["prompt"], said["model"], said["id_slot"]) == ("go", "cllm-tiny", -1)
    assert said["generation_settings"]["max_tokens"] == 5
    timings = said["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (2, 5)
    (first, *_) = said["completion_probabilities"]
    assert (first["id"], first["token"], len(first["top_logprobs"])) == (ord("d"), "d", 2)


@pytest.mark.parametrize(("more", "stop_type", "word"), [
    ({}, "eos", ""), ({"stop": ["    b"]}, "word", "    b"), ({"n_predict": 3}, "limit", ""),
])  # fmt: skip
async def test_the_kind_of_the_end_is_said(
    more: dict[str, Any], stop_type: str, word: str, http: httpx.AsyncClient
) -> None:
    said = (await http.post("/completion", json={"prompt": "go", **more})).json()
    assert (said["stop_type"], said["stopping_word"]) == (stop_type, word)


async def test_a_stream_has_the_parts_and_then_the_account(http: httpx.AsyncClient) -> None:
    response = await http.post("/completion", json={"prompt": "go", "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    *parts, last = events
    assert "".join(part["content"] for part in parts) == CODE
    assert [token for part in parts for token in part["tokens"]][: len(CODE)] == [*CODE.encode()]
    assert not any(part["stop"] for part in parts)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")


@pytest.mark.parametrize(("prompt", "n_evaluated"), [
    ("abc", [3]), ([1, 2], [2]), ([1, "bc", 2], [4]), (["abc", "d"], [3, 1]), ([[1, "bc"], "d"], [3, 1]),
    ({"prompt_string": "abc"}, [3]), (["abc", {"prompt_string": "d"}, [7]], [3, 1, 1]), (["a", 98], [2]),
])  # fmt: skip
async def test_a_prompt_may_have_any_of_llama_servers_forms(
    prompt: Any, n_evaluated: list[int], http: httpx.AsyncClient
) -> None:
    response = await http.post("/completion", json={"prompt": prompt, "n_predict": 1})
    said = response.json() if len(n_evaluated) > 1 else [response.json()]
    assert [one["tokens_evaluated"] for one in said] == n_evaluated
    assert [one["index"] for one in said] == list(range(len(said)))


async def test_several_outputs_of_a_prompt_are_a_list(http: httpx.AsyncClient) -> None:
    response = await http.post("/completion", json={"prompt": "a", "n_cmpl": 2, "n_predict": 2})
    assert [one["content"] for one in response.json()] == ["de", "de"]


async def test_a_prompt_alone_is_evaluated_and_nothing_is_said(http: httpx.AsyncClient) -> None:
    body = {"prompt": "go", "n_predict": 0, "samplers": [], "response_fields": [""]}
    assert (await http.post("/completion", json=body)).json() == {}
    said = (await http.post("/completion", json={"prompt": "go", "n_predict": 0})).json()
    assert (said["content"], said["tokens_predicted"], said["tokens_evaluated"]) == ("", 0, 2)


async def test_fields_of_the_answer_can_be_picked_by_path(http: httpx.AsyncClient) -> None:
    paths = ["content", "timings/predicted_n", "truncated", "nothing/x", "timings/x"]
    body = {"prompt": "go", "n_predict": 2, "response_fields": paths}
    said = (await http.post("/completion", json=body)).json()
    assert said == {"content": "de", "timings/predicted_n": 2, "truncated": False}


async def test_an_output_ends_before_a_line_that_is_indented_less(http: httpx.AsyncClient) -> None:
    for is_streamed in (False, True):
        body = {"prompt": "go", "n_indent": 4, "stream": is_streamed}
        response = await http.post("/completion", json=body)
        if is_streamed:
            events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
            text, last = "".join(event["content"] for event in events), events[-1]
        else:
            last = response.json()
            text = last["content"]
        assert text == "def f():\n    a\n    b\n"
        assert last["stop_type"] == "limit"


async def test_tokens_and_probabilities_are_those_of_the_text(http: httpx.AsyncClient) -> None:
    """The engine generates some more until an output that is over is cancelled."""
    body = {"prompt": "go", "return_tokens": True, "n_probs": 1}
    cut = (await http.post("/completion", json={**body, "n_indent": 4})).json()
    streamed = await http.post("/completion", json={**body, "n_indent": 4, "stream": True})
    parts = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
    assert cut["tokens"] == [token for part in parts for token in part["tokens"]]
    n = len("def f():\n    a\n    b\n") + 1  # and the token that shows the end
    assert [len(cut[name]) for name in ("tokens", "completion_probabilities")] == [n, n]
    assert cut["tokens_predicted"] == n
    none = (await http.post("/completion", json={**body, "n_predict": 0})).json()
    assert [none[name] for name in ("tokens", "completion_probabilities")] == [[], []]


def test_an_output_ends_with_a_line_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lines = Lines(0, 1.0)
    ends = []
    for now, text in ((5.0, "a\n"), (6.0, "b\n"), (6.5, "c"), (6.6, "d\ne")):  # noqa: B007
        lines.add(TokenDelta(text, (1,)))
        ends.append(lines.is_over)
    assert ends == [False, False, False, True]


def test_white_space_that_may_go_on_ends_nothing() -> None:
    lines = Lines(4, 0.0)
    kept = [
        lines.add(TokenDelta(text, (1,))) for text in ("a\n", "  ", "  b", "\n\t", "  ", "c", "x")
    ]
    assert (lines.is_over, "".join(kept)) == (True, "a\n    b\n\t  ")
    lines = Lines(4, 0.0)
    assert lines.add(TokenDelta("a\n    b\nc\n    d", (1,))) == "a\n    b\n"


@pytest.mark.parametrize(("body", "field"), [
    ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "multimodal_data"),
    ({"prompt": [{}]}, "prompt"), ({"prompt": "a", "n_cmpl": 0}, "n_cmpl"), ({"prompt": [1.5, "a"]}, "prompt"),
    ({"prompt": "a", "n_predict": "x"}, "n_predict"), ({"n_predict": 1}, "prompt"),
    ({"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"), ({"prompt": "a", "nn": 1}, "nn"),
    ({"prompt": "a", "samplers": ["none"]}, "samplers"), ({"prompt": ["a"] * 1000}, "prompt"),
    ({"prompt": "a", "response_fields": ["content"] * 257}, "response_fields"),
])  # fmt: skip
async def test_what_is_wrong_is_named(
    body: dict[str, Any], field: str, http: httpx.AsyncClient
) -> None:
    response = await http.post("/completion", json=body)
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


# What llama.vim sends, and llama.vscode but for `id_slot`.
EDITOR = {
    "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\n# end\n", "prompt": "    ",
    "input_extra": [{"filename": "g.py", "text": "g = 1\n"}], "n_predict": 128, "stop": [], "n_indent": 4,
    "top_k": 40, "top_p": 0.9, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 60_000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_per_second", "truncated",
                        "tokens_cached"],
}  # fmt: skip


async def test_an_editor_gets_what_is_in_the_gap(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    model = replace(engine.model, fim=FIM)
    monkeypatch.setattr(FakeEngine, "model", property(lambda _: model))
    said = (await http.post("/infill", json=EDITOR)).json()
    assert said.keys() == set(EDITOR["response_fields"])  # type: ignore[call-overload]
    assert said["content"] == "def f():\n    a\n    b\n"
    whole = (await http.post("/infill", json={**EDITOR, "response_fields": None})).json()
    assert whole["prompt"] == (
        "\4myproject\n\5g.py\ng = 1\n\5filename\n\1def f():\n    \2\n# end\n\3"
    )
    for name, value in (("input_prefix", None), ("input_extra", [{"filename": "x"}])):
        response = await http.post("/infill", json={**EDITOR, name: value})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]


async def test_a_model_without_tokens_for_it_fills_nothing_in(http: httpx.AsyncClient) -> None:
    response = await http.post("/infill", json=EDITOR)
    assert response.status_code == 501
    assert "not supported by this model" in response.json()["error"]["message"]


@pytest.mark.parametrize("n_max", [6, 7, 20, 61, 200])
async def test_a_long_text_around_a_gap_is_cut_far_from_it(n_max: int) -> None:
    async def tokenize(text: str) -> list[int]:
        return list(text.encode())

    gap = Gap("a" * 50 + "p", "s" + "b" * 50, [("x", "far"), ("y", "near")], "m")
    for fim in (FIM, replace(FIM, repository=None, file=None, begin=9)):
        prompt = await infill_prompt(gap, fim, tokenize, n_max)
        assert len(prompt) <= n_max
        assert prompt[-1] == fim.middle
        before, after = prompt.index(fim.prefix), prompt.index(fim.suffix)
        assert before < after
        assert prompt[after - 1] == ord("m")
        if n_max >= 20:
            assert (prompt[after - 2], prompt[after + 1]) == (ord("p"), ord("s"))
        if n_max == 200:
            assert b"near" in bytes(prompt)
            assert prompt.count(ord("b")) == 50


async def test_a_text_around_a_gap_is_cut_before_it_is_tokenized() -> None:
    read: list[str] = []

    async def tokenize(text: str) -> list[int]:
        read.append(text)
        return list(text.encode())

    n_max, n_many = 61, 100_000
    files = [(f"{n}" * 100, "f" * 1000) for n in range(100)]
    gap = Gap("a" * n_many + "p", "s" + "b" * n_many, [*files, ("y", "x" * n_many)], "m")
    prompt = await infill_prompt(gap, FIM, tokenize, n_max)
    assert sum(map(len, read)) < 4 * 64 * n_max
    near = Gap(gap.prefix[-n_max:], gap.suffix[:n_max], gap.extra[-1:], "m")
    assert prompt == await infill_prompt(near, FIM, tokenize, n_max)
    prompt = await infill_prompt(Gap("p", "s", files, "m"), FIM, tokenize, 2000)
    assert prompt == await infill_prompt(Gap("p", "s", files[-3:], "m"), FIM, tokenize, 2000)


@pytest.mark.parametrize(
    "body",
    [{"prompt": ["a" * 64 * 256, "b", 1]}, {"prompt": [["a", 1]] * 1000}],
    ids=["long texts", "many prompts"],
)
async def test_mixed_prompts_that_are_too_long_are_not_tokenized(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient
) -> None:
    async def tokenize(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(FakeEngine, "tokenize", tokenize)
    response = await http.post("/completion", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"


CHAT = {"messages": [{"role": "user", "content": "a"}]}
TOKENIZED: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "a"}, "/detokenize": {"tokens": [1]}, "/apply-template": CHAT,
    "/v1/chat/completions/input_tokens": CHAT, "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages/count_tokens": CHAT, "/completion": {"prompt": ["a", 1]}, "/infill": EDITOR,
    "/api/generate": {"model": "m", "prompt": "a", "suffix": "b"},
}  # fmt: skip


@pytest.mark.parametrize("path", TOKENIZED)
async def test_a_text_that_is_only_tokenized_waits_for_its_turn(
    path: str, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, http: httpx.AsyncClient
) -> None:
    model = replace(engine.model, fim=FIM)
    monkeypatch.setattr(FakeEngine, "model", property(lambda _: model))
    assert (await http.post(path, json=TOKENIZED[path])).status_code == 200
    monkeypatch.setattr(state, "MAX_WAITING", 0)
    assert (await http.post(path, json=TOKENIZED[path])).status_code == 429
