"""The server without a model: what clients get of it, in time or not, and what a test learns of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cllm.testing.fake_server import FakeServer, fake_server, questions_of
from tests.server.conftest import running

WEATHER = [
    {"when": "weather", "role": "user", "tool_calls": [["get_weather", {"city": "Oslo"}]]},
    {"role": "tool", "when": ".*", "text": "It is {0} in Oslo."},
]
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]


@pytest.fixture
def client(cllm_server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=cllm_server.base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=list(messages), **options)


@pytest.mark.cllm_server(WEATHER)
def test_an_agent_s_loop_is_answered_turn_by_turn(
    client: openai.OpenAI, cllm_server: FakeServer
) -> None:
    question: Any = {"role": "user", "content": "What is the weather?"}
    first = ask(client, question, tools=TOOLS).choices[0].message
    (call,) = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "20 C"}
    last = ask(client, question, first, result, tools=TOOLS)
    assert last.choices[0].message.content == "It is 20 C in Oslo."
    assert [each.path for each in cllm_server.asked] == ["/v1/chat/completions"] * 2
    assert cllm_server.asked[0].body["tools"] == TOOLS
    assert cllm_server.asked[0].headers["authorization"] == "Bearer none"


@pytest.mark.cllm_server(rules=[{"when": "say (.*)", "text": "you said {1}"}, {"text": "Hi!"}])
def test_rules_may_be_given_by_name_and_prompts_in_any_form(
    client: openai.OpenAI, cllm_server: FakeServer
) -> None:
    prompts: list[Any] = ["say a", ["say a", "say a"], list(b"say b"), [list(b"say c")]]
    texts = [
        [choice.text for choice in client.completions.create(model="m", prompt=prompt).choices]
        for prompt in prompts
    ]
    assert texts == [
        ["you said a"], ["you said a"] * 2, ["you said b"], ["you said c"],
    ]  # fmt: skip
    wrongs: list[Any] = [5, True, {}, [5]]
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError):
            ask(client, {"role": "user", "content": wrong})


@pytest.mark.cllm_server([{"times": 1, "status": 429, "retry_after_s": 7}, {"text": "Hello!"}])
def test_an_error_comes_as_often_as_a_rule_says(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client, {"role": "user", "content": "Hi"})
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.code == "scripted"
    assert ask(client, {"role": "user", "content": "Hi"}).choices[0].message.content == "Hello!"


@pytest.mark.cllm_server(
    [
        {"when": "long", "text": "a long answer", "disconnect_after": 3},
        {"when": "short", "text": "a", "disconnect_after": 3},
    ]
)
@pytest.mark.parametrize("question", ["long", "short"])
def test_a_connection_is_closed_after_so_many_events(
    cllm_server: FakeServer, question: str
) -> None:
    asked = {"messages": [{"role": "user", "content": question}], "stream": True}
    events = list[str]()  # `extend` keeps those before the error
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{cllm_server.base_url}/chat/completions", json=asked) as response,
    ):
        events.extend(line for line in response.iter_lines() if line.startswith("data: "))
    assert len(events) == 3
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{cllm_server.base_url}/chat/completions", json={**asked, "stream": False})


@pytest.mark.cllm_server([{"text": "abc", "first_token_s": 0.05, "token_s": 0.02}])
def test_an_answer_takes_its_time(cllm_server: FakeServer) -> None:
    started = time.perf_counter()
    with httpx.stream(
        "POST", f"{cllm_server.url}/generate", json={"prompt": "a", "stream": True}
    ) as response:
        text = "".join(response.iter_text())
    assert "abc" in "".join(
        json.loads(x[6:]).get("text", "") for x in text.split("\n\n") if x.startswith("data: {")
    )
    # At least: sleeps are never shorter.  The end and [DONE] are events, too.
    assert time.perf_counter() - started >= 0.05 + 5 * 0.02


@pytest.mark.cllm_server({"1+1=": "2"})
def test_a_question_without_a_rule_is_refused_and_says_so(cllm_server: FakeServer) -> None:
    answer = httpx.post(f"{cllm_server.url}/generate", json={"prompt": "1+1="})
    assert answer.json()["text"] == "2"
    refused = httpx.post(f"{cllm_server.url}/generate", json={"prompt": "2+2="})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "no rule is for '2+2='"


def test_questions_are_found_in_the_bodies_of_every_api() -> None:
    result = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "20 C"}]}
    ]
    for body, expected in [
        ({"prompt": "a", "n": 3}, (["a"], "user")),
        ({"prompt": ["a", "b"]}, (["a", "b"], "user")),
        ({"input": "a"}, (["a"], "user")),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "20 C"}]},
            (["20 C"], "tool"),
        ),
        ({"messages": [{"role": "user", "content": result}]}, (["20 C"], "tool")),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            (["a"], "user"),
        ),
        ({"messages": [{"role": "tool", "content": None}]}, ([""], "tool")),
        (
            {"messages": [{"role": "user", "content": [*result, {"type": "text", "text": "so?"}]}]},
            (["so?"], "user"),
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}
                ]
            },
            (["a\nb"], "user"),
        ),
        (None, ([""], "user")),
        ({"messages": [1]}, ([""], "user")),
    ]:
        assert questions_of(body) == expected, body


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": PARTS}


@pytest.mark.cllm_server([{"times": 1, "text": "yes"}, {"text": "another rule"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": PARTS}], "n": 2}),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c", "content": PARTS},
                ],
                "tools": TOOLS,
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                ],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": PARTS}]}),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [USED]},
                    {"role": "user", "content": [RESULT, *PARTS]},
                ]
            },
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ),
        ("/completion", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ],
)  # fmt: skip
def test_a_rule_that_matches_answers_whatever_the_shape_of_the_request(
    cllm_server: FakeServer, path: str, body: dict[str, Any]
) -> None:
    asked = {"model": "m", "max_tokens": 20, **body}
    headers = {"x-request-id": "mine"}
    answer = httpx.post(f"{cllm_server.url}{path}", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "yes" in answer.text
    assert "another" not in answer.text
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.cllm_server([{"times": 1, "first_token_s": 3600, "text": "slow"}, {"text": "fast"}])
def test_a_client_that_leaves_and_asks_again_gets_the_next_rule(cllm_server: FakeServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cllm_server.url}/generate", json={"prompt": "a"}, timeout=0.3)
    again = httpx.post(f"{cllm_server.url}/generate", json={"prompt": "a"})
    assert again.json()["text"] == "fast"


@pytest.mark.cllm_server([{"times": 1, "status": 503}, {"text": "fast"}])
def test_a_request_after_a_scripted_error_gets_the_next_rule(cllm_server: FakeServer) -> None:
    answers = [httpx.post(f"{cllm_server.url}/generate", json={"prompt": "a"}) for _ in range(2)]
    assert answers[0].status_code == 503
    assert answers[1].json()["text"] == "fast"


@pytest.mark.cllm_server([{"when": "b", "text": "yes"}])
def test_scores_need_no_rule(cllm_server: FakeServer) -> None:
    asked = {"prompt": "a", "continuation": "c"}
    assert httpx.post(f"{cllm_server.url}/generate/score", json=asked).status_code == 200


def test_servers_of_two_tests_at_once_know_nothing_of_each_other() -> None:
    with fake_server({"a": "1"}) as first, fake_server({"a": "2"}) as second:
        texts = [
            httpx.post(f"{server.url}/generate", json={"prompt": "a"}).json()["text"]
            for server in (first, second)
        ]
        assert texts == ["1", "2"]
        assert len(first.asked) == len(second.asked) == 1


def test_the_command_serves_rules_of_a_file_and_says_what_is_wrong_with_one(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {when: Hi, text: Hello!}\n- {when: '', status: 503, message: too early}\n")
    with running(tmp_path / "log", "--fake", str(rules)) as server:
        with server.client() as client:
            asked = {"messages": [{"role": "user", "content": "Hi"}], "model": "m"}
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello!"
            refused = client.post("/generate", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, "too early")
            assert client.get("/health").json()["model"] == "fake"
        assert "rules.yaml at http" in server.log


@pytest.mark.anyio
async def test_a_server_may_be_started_from_any_event_loop() -> None:
    with fake_server([{"text": "Hi"}]) as server:
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{server.url}/generate", json={"prompt": "?"})
    assert answer.json()["text"] == "Hi"
