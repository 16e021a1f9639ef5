"""What the `openai` client raises, and that it names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import running, streaming
from tests.server.test_openai import ASK, MODEL, api

__all__ = ["api"]  # the fixture

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def refused(kind: type[openai.APIStatusError], call: Any, **fields: Any) -> openai.APIStatusError:
    """The error that the client raises for this call."""
    with pytest.raises(kind) as caught:
        call(model=MODEL, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "x"), ("best_of", 3), ("t_max_predict_ms", 5), ("include_stop_str_in_output", True),
     ("prompt_logprobs", 1)],
)  # fmt: skip
def test_what_would_change_the_answer_elsewhere_is_refused(
    api: openai.OpenAI, name: str, value: Any
) -> None:
    fields = {name: value}
    error = refused(openai.BadRequestError, api.completions.create, prompt="x", extra_body=fields)
    assert error.param == name
    neutral = {"suffix": None, "best_of": 1, "t_max_predict_ms": -1, "modalities": ["text"]}
    done = api.completions.create(model=MODEL, prompt="1+1=", temperature=0, extra_body=neutral)
    assert done.choices[0].text == "2"


def test_a_format_beside_a_schema_is_refused(api: openai.OpenAI) -> None:
    error = refused(
        openai.BadRequestError, api.chat.completions.create, messages=ASK,
        response_format={"type": "json_object"}, extra_body={"json_schema": {}},
    )  # fmt: skip
    assert error.param == "json_schema"


def test_a_stream_that_fails_ends_with_its_error_alone(api: openai.OpenAI) -> None:
    ban = {str(token): -100.0 for token in range(260)}
    options: Any = {"extra_body": {"logit_bias": dict.fromkeys(ban, False)}, "stream": True}
    chunks: list[Any] = []
    with pytest.raises(openai.APIError):
        chunks.extend(api.completions.create(model=MODEL, prompt="1+1=", **options))
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)


def test_a_call_is_made_where_one_is_required(api: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    choices: list[Any] = ["required", named]
    for choice in choices:
        done = api.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0, tools=[TOOL], tool_choice=choice,
            parallel_tool_calls=False,
        )  # fmt: skip
        assert done.choices[0].finish_reason == "tool_calls"
        calls: list[Any] = list(done.choices[0].message.tool_calls or ())
        (call,) = calls
        assert call.function.name == "add"
        json.loads(call.function.arguments)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL] * 300}, "tools"),
        ({"tools": [TOOL], "tool_choice": "subtract"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "hammer"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "regex": "a"}, "regex"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"reasoning_budget": -1}, "reasoning_budget"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"n_predict": 5}, "n_predict"),
    ],
)
def test_what_cannot_be_asked_of_a_chat_is_named(
    api: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    error = refused(
        openai.BadRequestError, api.chat.completions.create, messages=ASK, extra_body=fields
    )
    assert error.param == param


def test_messages_of_a_loop_that_cannot_be_are_named(api: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_2", "content": "3"}
    huge = {**call, "function": {"name": "add", "arguments": '{"a": "' + "x" * 1_100_000 + '"}'}}
    for messages, param in (
        ([*ASK, said, result], "messages[2].tool_call_id"),
        ([*ASK, {**said, "tool_calls": [{"id": "call_1"}]}], "messages[1].tool_calls[0].function"),
        ([*ASK, {**said, "tool_calls": [huge]}], "messages"),
    ):
        error = refused(
            openai.BadRequestError, api.chat.completions.create, messages=messages, tools=[TOOL]
        )
        assert error.param == param, messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            "chat_template_kwargs.messages",
        ),
    ],
)
def test_bad_requests_name_their_field(
    api: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    fields = {"messages": ASK, **fields}
    error = refused(openai.BadRequestError, api.chat.completions.create, **fields)
    assert (error.status_code, error.param, error.type) == (400, param, "invalid_request_error")


def test_a_prompt_that_is_too_long_has_openai_s_code(api: openai.OpenAI) -> None:
    error = refused(openai.BadRequestError, api.completions.create, prompt="x" * 10_000)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    messages = [{"role": "user", "content": "x" * 10_000}]
    error = refused(openai.BadRequestError, api.chat.completions.create, messages=messages)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


def test_what_is_not_there_is_not_found(api: openai.OpenAI) -> None:
    error = refused(openai.NotFoundError, api.images.generate, prompt="text")
    assert error.type == "not_found_error"


@pytest.mark.full
def test_keys_and_queues_are_the_client_s_errors(tmp_path: Path) -> None:
    options = ("--api-key", "right", "--n-seq-max", "1", "--max-queue", "1")
    with running(tmp_path / "log", *options) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as api:
            error = refused(openai.AuthenticationError, api.completions.create, prompt="1+1=")
            assert error.type == "authentication_error"
        headers = {"Authorization": "Bearer right"}
        with (
            openai.OpenAI(base_url=url, api_key="right", max_retries=0) as api,
            server.client(headers=headers) as first,
            server.client(headers=headers) as second,
            streaming(first),
        ):
            assert api.models.list().data[0].id == MODEL
            # Two more: one waits, the other is refused.
            error = refused(
                openai.RateLimitError, api.completions.create, prompt="1+1=", n=2, temperature=0
            )
            assert error.code == "queue_full"
            assert int(error.response.headers["Retry-After"]) >= 1
            assert second.get("/health").status_code == 200
