"""`/generate` and the routes beside it answer as docs/server.md says, asked over a real connection."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import pytest

from cllm import SamplingOptions
from cllm.server.routes.generate import LOWEST
from tests.conftest import some_in_fast
from tests.server.conftest import LONG, LONG_ANSWER, ask, events_of, refusal_of

SAMPLING_FIELDS = tuple(SamplingOptions.__annotations__)
# One value for each field that is not what it has anyway.
SAMPLING: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "top_n_sigma": 2.0,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
    "dynatemp_range": 0.1,
    "dynatemp_exponent": 1.5,
    "repeat_penalty": 1.1,
    "repeat_last_n": 32,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.5,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n"],
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "adaptive_target": 0.3,
    "adaptive_decay": 0.8,
    "logit_bias": {"65": 1.5, "66": False},
    "samplers": ["top_k", "temperature"],
    "min_keep": 1,
    "seed": 0,
    "stop": ["\n"],
    "stop_token_ids": [10],
    "banned_strings": ["zz"],
    "ignore_eos": True,
    "penalize_prompt": False,
    "speculation": False,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "grammar": 'root ::= "2"',
    "lark": 'start: "2"',
    "json_schema": {"type": "integer"},
    "regex": "[0-9]+",
}
NUMBERS = tuple(
    name for name, value in SAMPLING.items() if type(value) in (int, float)
)  # `bool` is none
# The embedded model would fill any JSON with blanks.
NO_BLANKS = dict.fromkeys(("9", "10", "13", "32"), False)
ODD_NUMBERS = ("NaN", "Infinity", "-1", str(2**63), "1e308", '"1"', "true", "null", "[]", "-0.0")


def test_the_reports_request_is_answered_in_the_contract_s_shape(client: httpx.Client) -> None:
    response = client.post("/generate", json={"prompt": "1+1=", "max_tokens": 10, "top_k": 1})
    assert response.status_code == 200
    answer = response.json()
    assert answer["text"] == "2"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", answer["token_ids"][-1])
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) == 2
    assert 0 <= answer["usage"]["cached_tokens"] <= 5
    timings = answer["timings"]
    assert 0 <= timings["queued_ms"] <= timings["ttft_ms"] <= timings["total_ms"]
    assert answer["id"] == response.headers["X-Request-ID"]


def test_a_body_needs_no_content_type(client: httpx.Client) -> None:
    """`curl -d` says that it is a form."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = '{"prompt": "2+2=", "temperature": 0}'
    assert client.post("/generate", content=body, headers=headers).json()["text"] == "4"


def test_the_events_of_a_stream_add_up_to_the_whole_answer(client: httpx.Client) -> None:
    whole = ask(client, "repeat:你好, 🙂!").json()
    response = ask(client, "repeat:你好, 🙂!", stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response)
    assert "".join(event["text"] for event in events) == whole["text"] == "你好, 🙂!"
    assert [t for event in events for t in event["token_ids"]] == whole["token_ids"]
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["finish_reason"] == "stop"


def test_a_prompt_may_be_token_ids(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "3+4=", "add_special": True}).json()
    assert ask(client, tokens["tokens"]).json()["text"] == "7"


@pytest.mark.parametrize("stream", some_in_fast([True, False]))
def test_an_answer_goes_on_after_the_tokens_that_a_client_has(
    client: httpx.Client, stream: bool
) -> None:
    whole = ask(client, LONG, seed=3, temperature=1.0).json()
    cut = whole["token_ids"][:5]
    response = ask(client, LONG, seed=3, temperature=1.0, generated=cut, stream=stream)
    parts = events_of(response) if stream else [response.json()]
    assert [t for part in parts for t in part["token_ids"]] == whole["token_ids"][5:]
    assert whole["text"].endswith("".join(part["text"] for part in parts))


def test_max_tokens_and_stop_end_an_answer_with_their_reason(client: httpx.Client) -> None:
    short = ask(client, LONG, max_tokens=3).json()
    assert (short["finish_reason"], short["stop_reason"]) == ("length", "max_tokens")
    stopped = ask(client, LONG, stop=" 7 ").json()
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", " 7 ")
    assert stopped["text"] == "1 2 3 4 5 6"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_runs_out_of_time_keeps_what_it_has(
    client: httpx.Client, stream: bool
) -> None:
    response = ask(client, LONG, timeout=0.01, stream=stream)
    assert response.status_code == 200
    last = events_of(response)[-1] if stream else response.json()
    assert last["finish_reason"] == "deadline"
    text = "".join(e["text"] for e in events_of(response)) if stream else last["text"]
    assert LONG_ANSWER.startswith(text)
    assert text != LONG_ANSWER


@pytest.mark.parametrize("priority", [-5, 0, 7])
def test_a_priority_changes_no_answer(client: httpx.Client, priority: int) -> None:
    assert ask(client, "37+58=", priority=priority).json()["text"] == "95"


def test_every_sampling_field_has_a_test_value() -> None:
    assert set(SAMPLING) == set(SAMPLING_FIELDS)


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_every_sampling_field_is_taken(client: httpx.Client, name: str) -> None:
    body = {"prompt": "1+1=", "max_tokens": 4, name: SAMPLING[name]}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    null = client.post("/generate", json={"prompt": "1+1=", "max_tokens": 4, name: None})
    assert null.status_code == 200, null.text


def test_to_keep_more_tokens_than_there_are_is_to_keep_all(client: httpx.Client) -> None:
    """The vocabulary has 260."""
    cut = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "top_k": 0, "top_p": 0.01}
    kept = client.post("/generate", json={"prompt": "x", **cut, "min_keep": 1 << 20}).json()
    whole = client.post("/generate", json={"prompt": "x", **cut, "min_keep": 260}).json()
    assert kept["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize("value", [5.0, 5])
def test_an_integer_may_be_written_with_a_point(client: httpx.Client, value: float) -> None:
    answer = client.post("/generate", json={"prompt": [49.0, 43], "max_tokens": value}).json()
    assert len(answer["token_ids"]) <= 5
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("name", ["temprature", "n_predict", "best", "model_path", ""])
def test_an_unknown_field_is_named(client: httpx.Client, name: str) -> None:
    assert refusal_of(ask(client, **{name: 1}))["param"] == name


@pytest.mark.parametrize(
    ("name", "meant"), [("max_tokns", "max_tokens"), ("temprature", "temperature"), ("zzz", None)]
)
def test_an_unknown_field_that_is_similar_to_a_known_one_gets_a_hint(
    client: httpx.Client, name: str, meant: str | None
) -> None:
    message = refusal_of(ask(client, **{name: 1}))["message"]
    assert message.endswith("is not known" if meant is None else f": did you mean {meant}?")


@pytest.mark.parametrize("name", ["cache_prompt", "user", "id_slot"])
def test_what_changes_nothing_is_left_aside(client: httpx.Client, name: str) -> None:
    assert ask(client, **{name: 1}).json()["text"] == "2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", 1),
        ("prompt", None),
        ("prompt", ["1+1="]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [260]),
        ("generated", [260]),
        ("generated", ["a"]),
        ("generated", "text"),
        ("max_tokens", "10"),
        ("max_tokens", 0),
        ("temperature", "hot"),
        ("temperature", [0.5]),
        ("stream", 1),
        ("stream", "yes"),
        ("stop", [1]),
        ("stop", {"a": "b"}),
        ("logit_bias", [1]),
        ("logit_bias", {"one": 1}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", {"1": True}),
        ("samplers", ["magic"]),
        ("samplers", "top_k"),
        ("json_schema", 5),
        ("json_schema", "not json"),
        ("regex", "("),
        ("stop_token_ids", ["a"]),
        ("seed", 2**32 - 1),
        ("priority", 0.5),
        ("timeout", "soon"),
        ("timeout", -1),
        ("ignore_eos", 0),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(
    client: httpx.Client, name: str, value: Any
) -> None:
    error = refusal_of(client.post("/generate", json={"prompt": "1+1=", name: value}))
    assert error["param"] == name
    assert name in error["message"]


def test_a_missing_prompt_is_named(client: httpx.Client) -> None:
    assert refusal_of(client.post("/generate", json={}))["param"] == "prompt"


@pytest.mark.parametrize("name", [*NUMBERS, "timeout", "priority"])
def test_no_number_makes_a_server_error(client: httpx.Client, name: str) -> None:
    for literal in ODD_NUMBERS:
        body = f'{{"prompt": "1+1=", "max_tokens": 2, "{name}": {literal}}}'
        if name == "max_tokens":
            body = f'{{"prompt": "1+1=", "{name}": {literal}}}'
        response = client.post("/generate", content=body)
        assert response.status_code in (200, 400), (literal, response.text)
        if literal in ("NaN", "Infinity", '"1"', "true", "[]"):
            assert response.status_code == 400, literal
    assert ask(client).json()["text"] == "2"


@pytest.mark.parametrize("as_text", [False, True])
def test_a_json_schema_shapes_the_answer(client: httpx.Client, as_text: bool) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 999}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    given = json.dumps(schema) if as_text else schema
    answer = ask(client, json_schema=given, logit_bias=NO_BLANKS, max_tokens=64).json()
    assert answer["finish_reason"] == "stop"
    assert list(json.loads(answer["text"])) == ["sum"]
    assert json.loads(answer["text"])["sum"] <= 999


def test_a_regex_shapes_the_answer(client: httpx.Client) -> None:
    answer = ask(client, regex="[a-f]{3}-[0-9]{2}").json()
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", answer["text"])


def test_two_constraints_at_once_are_refused(client: httpx.Client) -> None:
    assert "json_schema" in refusal_of(ask(client, regex="a", json_schema={}))["message"]


@pytest.mark.parametrize(
    "constraint", [{"grammar": 'root ::= "no " "9" [0-9]'}, {"lark": 'start: "no 9" /[0-9]/'}]
)
def test_a_raw_grammar_is_followed(client: httpx.Client, constraint: dict[str, str]) -> None:
    assert re.fullmatch("no 9[0-9]", ask(client, **constraint).json()["text"])


@pytest.mark.parametrize(
    "constraint", [{"grammar": "root ::= missing"}, {"lark": "start: missing"}]
)
def test_the_error_of_a_raw_grammar_names_its_fault(
    client: httpx.Client, constraint: dict[str, str]
) -> None:
    refused = refusal_of(ask(client, **constraint))
    assert refused["param"] == next(iter(constraint))
    assert "missing" in refused["message"]


def test_log_probabilities_come_with_their_tokens(client: httpx.Client) -> None:
    answer = ask(client, logprobs=3, prompt_logprobs=0).json()
    assert [p["token_id"] for p in answer["logprobs"]] == answer["token_ids"]
    first = answer["logprobs"][0]
    assert (first["text"], bytes(first["bytes"]), len(first["top"])) == ("2", b"2", 3)
    assert first["logprob"] == first["top"][0]["logprob"] <= 0
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_the_score_of_a_long_continuation_is_the_sum_of_its_log_probabilities(
    client: httpx.Client,
) -> None:
    drawn = random.Random(0)
    body = {"prompt": "1+1=", "continuation": [drawn.randrange(97, 123) for _ in range(1800)]}
    told = client.post("/generate/score", json=body).json()
    assert len(told["token_ids"]) == len(told["logprobs"])
    assert told["total"] == pytest.approx(sum(told["logprobs"]))
    assert told["total"] < LOWEST
