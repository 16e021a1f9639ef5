"""Tools that run at the client, and histories that began with another provider."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cllm.testing import FakeAnswer, FakeEngine
from tests.conftest import some_in_fast
from tests.server.conftest import client_of

ASK = {"role": "user", "content": "Go."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY}
METEO = {"type": "namespace", "name": "mcp__meteo", "description": "Weather.", "tools": [WEATHER]}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}  # fmt: skip
TEXT = '*** Begin Patch\n"quoted" \\ é\n'
# A picture of more than a megabyte, as a browser tool returns it.
PICTURE = "data:image/png;base64," + "A" * (5 << 18)


pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


@asynccontextmanager
async def serving(
    answer: FakeAnswer | str, prompts: list[str] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    def answering(prompt: str) -> FakeAnswer | str:
        if prompts is not None:
            prompts.append(prompt)
        return answer

    async with FakeEngine(answering, n_ctx=16384) as engine, client_of(engine) as http:
        yield http


def calling(name: str, **arguments: Any) -> FakeAnswer:
    return FakeAnswer(tool_calls=[(name, arguments)])


async def items(http: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The output of a response: as one, and by the events of a stream, which say the same."""
    response = await http.post("/v1/responses", json={"input": "Go.", **body})
    assert response.status_code == 200, response.text
    streamed = await http.post("/v1/responses", json={"input": "Go.", "stream": True, **body})
    events = [
        json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    found: list[dict[str, Any]] = response.json()["output"]
    without_ids = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in found]
    assert [
        {k: v for k, v in one.items() if k not in ("id", "call_id")} for one in done
    ] == without_ids
    assert events[-1]["response"]["output"] == done
    return found


async def test_a_tool_of_a_namespace_has_a_joined_name_for_the_model_and_its_own_for_the_client() -> (
    None
):
    async with serving(calling("mcp__meteo__get_weather", city="Oslo")) as http:
        (item,) = await items(http, tools=[METEO])
    assert (item["type"], item["name"], item["namespace"]) == (
        "function_call", "get_weather", "mcp__meteo",
    )  # fmt: skip
    prompts: list[str] = []
    history = [
        ASK,
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "20"},
    ]
    async with serving("It is 20.", prompts) as http:
        await http.post("/v1/responses", json={"input": history, "tools": [METEO]})
    assert "mcp__meteo__get_weather" in prompts[0]


async def test_a_tool_of_the_default_namespace_is_called_by_its_name() -> None:
    more = {
        "type": "additional_tools", "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "tools": [WEATHER]}],
    }  # fmt: skip
    async with serving(calling("get_weather", city="Oslo")) as http:
        (item,) = await items(http, input=[more, ASK])
    assert item["name"] == "get_weather"
    assert "namespace" not in item


async def test_a_custom_tool_is_given_text_and_told_of_by_its_events() -> None:
    async with serving(calling("apply_patch", input=TEXT)) as http:
        (item,) = await items(http, tools=[PATCH])
        body = {"input": "Go.", "tools": [PATCH], "stream": True}
        streamed = await http.post("/v1/responses", json=body)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", TEXT)
    events = [
        json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")
    ]
    kinds = [event["type"] for event in events]
    assert kinds[2:6] == [
        "response.output_item.added", "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done", "response.output_item.done",
    ]  # fmt: skip
    assert (events[2]["item"]["input"], events[3]["delta"], events[4]["input"]) == ("", TEXT, TEXT)
    prompts: list[str] = []
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
    async with serving("Good.", prompts) as http:
        response = await http.post(
            "/v1/responses", json={"input": [ASK, item, output], "tools": [PATCH]}
        )
    assert response.status_code == 200, response.text
    assert "Begin Patch" in prompts[0]
    assert "Done!" in prompts[0]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_custom_tool_of_a_chat_is_told_of_as_one(is_streamed: bool) -> None:
    tool = {"type": "custom", "custom": {"name": "write", "format": {"type": "text"}}}
    choice = {"type": "custom", "custom": {"name": "write"}}
    body = {"messages": [ASK], "tools": [tool], "tool_choice": choice, "stream": is_streamed}
    async with serving(calling("write", input=TEXT)) as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if is_streamed:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line[6:7] == "{"]
        deltas = [event["choices"][0]["delta"].get("tool_calls", [{}])[0] for event in events]
        calls = [delta for delta in deltas if delta]
        assert [call["index"] for call in calls] == [0, 0]
        assert (calls[0]["type"], calls[0]["custom"]) == ("custom", {"name": "write", "input": ""})
        assert calls[1]["custom"] == {"input": TEXT}
        return
    message = response.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "write", "input": TEXT})
    prompts: list[str] = []
    history = [ASK, message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    async with serving("Good.", prompts) as http:
        response = await http.post(
            "/v1/chat/completions", json={"messages": history, "tools": [tool]}
        )
    assert response.status_code == 200, response.text
    assert "Begin Patch" in prompts[0]


OPENAI_TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, Any]] = {
    "local_shell": (
        {"command": ["ls", "-a"], "timeout_ms": 5}, {"type": "local_shell"}, "action",
        {"type": "exec", "command": ["ls", "-a"], "env": {}, "timeout_ms": 5},
    ),
    "shell": (
        {"commands": ["ls"]}, {"type": "shell", "environment": {"type": "local"}}, "action",
        {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
    ),
    "apply_patch": (
        {"type": "create_file", "path": "a", "diff": "+x"}, {"type": "apply_patch"}, "operation",
        {"type": "create_file", "path": "a", "diff": "+x"},
    ),
    "tool_search": (
        {"goal": "weather"},
        {"type": "tool_search", "execution": "client", "description": "Search.",
         "parameters": {"type": "object", "properties": {"goal": {"type": "string"}}}},
        "arguments", {"goal": "weather"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPENAI_TOOLS)
async def test_a_tool_of_openais_that_runs_at_the_client_has_items_of_its_own(name: str) -> None:
    arguments, tool, field, value = OPENAI_TOOLS[name]
    async with serving(calling(name, **arguments)) as http:
        (item,) = await items(http, tools=[tool])
    assert item["type"] == f"{name}_call"
    assert item[field] == value
    outputs: dict[str, Any] = {
        "shell": {"output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit"}}]},
        "tool_search": {"type": "tool_search_output", "tools": [WEATHER]},
        "apply_patch": {"status": "completed", "output": None},
    }
    output = {"type": f"{name}_call_output", "call_id": item["call_id"], "output": "a.txt"}
    output |= outputs.get(name, {})
    prompts: list[str] = []
    async with serving(calling("get_weather", city="Oslo"), prompts) as http:
        response = await http.post(
            "/v1/responses", json={"input": [ASK, item, output], "tools": [tool]}
        )
    assert response.status_code == 200, response.text
    said = {"tool_search": "get_weather", "apply_patch": "completed"}.get(name, "a.txt")
    assert said in prompts[0]
    if name == "tool_search":  # what it has found is offered
        assert prompts[0].count("get_weather") > 1


async def test_a_call_that_is_cut_off_is_an_item_all_the_same() -> None:
    for tool, arguments in (
        ({"type": "local_shell"}, {"command": ["x" * 900]}),
        (PATCH, {"input": "x" * 900}),
    ):
        name = str(tool.get("name", "local_shell"))
        body = {"input": "Go.", "tools": [tool], "max_output_tokens": 400}
        async with serving(calling(name, **arguments)) as http:
            response = await http.post("/v1/responses", json=body)
        assert response.status_code == 200
        item = response.json()["output"][-1]
        assert (response.json()["status"], item["status"]) == ("incomplete", "incomplete")
        assert item["type"] in ("local_shell_call", "custom_tool_call")


ANTHROPIC_TOOLS = {
    "bash_20250124": "bash", "text_editor_20250124": "str_replace_editor",
    "text_editor_20250728": "str_replace_based_edit_tool", "memory_20250818": "memory",
    "computer_20250124": "computer", "computer_20251124": "computer",
}  # fmt: skip


@pytest.mark.parametrize("kind", ANTHROPIC_TOOLS)
async def test_a_tool_of_anthropics_that_runs_at_the_client_is_offered_with_a_schema(
    kind: str,
) -> None:
    name, prompts = ANTHROPIC_TOOLS[kind], list[str]()
    tool = {"type": kind, "name": name, "display_width_px": 640, "display_height_px": 480}
    body = {"messages": [ASK], "max_tokens": 99, "tools": [tool]}
    async with serving(calling(name, command="view"), prompts) as http:
        response = await http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    block = response.json()["content"][0]
    assert (block["type"], block["name"]) == ("tool_use", name)
    assert f'"{name}"' in prompts[0]
    assert ("640 by 480" in prompts[0]) == ("display_width_px" in tool)


async def test_tools_that_run_at_a_provider_are_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts: list[str] = []
    with caplog.at_level(logging.WARNING, "cllm.server"):
        async with serving("Hm.", prompts) as http:
            for kind in ("web_search_of_this_test", "shell"):
                tool = {"type": kind, "environment": {"type": "container_auto"}}
                response = await http.post("/v1/responses", json={"input": "Go.", "tools": [tool]})
                assert response.status_code == 200
                body = {
                    "messages": [ASK],
                    "max_tokens": 9,
                    "tools": [{"type": f"{kind}_1", "name": kind}],
                }
                assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert not any("web_search" in prompt for prompt in prompts)
    assert "web_search_of_this_test" in caplog.text


# --- Results, and items of others ---------------------------------------------------------------
RESULTS: dict[str, tuple[Any, str]] = {
    "a picture": ([{"type": "image_url", "image_url": {"url": PICTURE}}], "an image"),
    "a picture of Anthropic's": (
        [{"type": "image", "source": {"type": "base64", "data": PICTURE}}], "an image",
    ),
    "an input picture": ([{"type": "input_image", "image_url": PICTURE}], "an image"),
    "text and a picture": ([{"type": "text", "text": "Seen:"}, {"type": "image"}], "Seen:"),
    "a document": (
        [{"type": "document", "title": "T", "source": {"type": "text", "data": "the body"}}], "the body",
    ),
    "a document of blocks": (
        [{"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "in it"}]}}],
        "in it",
    ),
    "a PDF": ([{"type": "document", "source": {"type": "base64", "data": PICTURE}}], "a document"),
    "a search result": (
        [{"type": "search_result", "source": "https://e.x", "content": [{"type": "text", "text": "found"}]}],
        "found",
    ),
    "a reference to a tool": ([{"type": "tool_reference", "tool_name": "grep"}], "grep"),
    "nothing": (None, ""), "an object": ({"a": [1, None]}, '"a": [1, null]'), "numbers": ([1, None], "1"),
    "a part of no type": ([{"x": "y"}], "y"), "nested": ([[["deep"]]], "deep"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", some_in_fast(RESULTS))
async def test_no_result_of_a_tool_is_rejected(name: str) -> None:
    content, said = RESULTS[name]
    function = {"name": "look", "arguments": "{}"}
    chat = [
        ASK,
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": content},
    ]  # fmt: skip
    responses = [
        ASK, {"type": "function_call", "call_id": "call_1", **function},
        {"type": "function_call_output", "call_id": "call_1", "output": content},
    ]  # fmt: skip
    blocks = [
        ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": content},
            {"type": "tool_result", "tool_use_id": "call_1", "content": content, "is_error": True}]},
    ]  # fmt: skip
    for path, body in (
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/responses", {"input": responses}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 9}),
    ):
        prompts: list[str] = []
        async with serving("I see.", prompts) as http:
            response = await http.post(path, json=body)
        assert response.status_code == 200, response.text[:500]
        assert said in prompts[0]
        assert "AAAA" not in prompts[0]


FOREIGN_ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "oslo"}}, "oslo"),
    ({"type": "compaction", "encrypted_content": "gAAA"}, "compaction"),
    ({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, ""),
    ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, "hm"),
    ({"type": "mcp_list_tools", "server_label": "d", "tools": []}, "mcp_list_tools"),
    ({"type": "mcp_call", "name": "ask", "arguments": "{}", "output": "forty"}, "forty"),
    ({"type": "code_interpreter_call", "code": "print(1)", "outputs": [{"type": "logs", "logs": "1"}]}, "print(1)"),
    ({"type": "image_generation_call", "result": "AAAA"}, "image_generation_call"),
    ({"type": "item_reference", "id": "msg_1"}, "item_reference"),
    ({"type": "something_of_tomorrow", "text": "new"}, "new"),
    ({"type": "file_search_call", "results": [{"filename": "a", "text": "hit"}]}, "hit"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "said"), FOREIGN_ITEMS, ids=lambda value: str(value)[:40])
async def test_a_session_that_began_elsewhere_goes_on(item: dict[str, Any], said: str) -> None:
    history = [
        ASK, item, {"role": "assistant", "content": [{"type": "output_text", "text": "Found."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"}, ASK,
    ]  # fmt: skip
    prompts: list[str] = []
    async with serving("On.", prompts) as http:
        response = await http.post("/v1/responses", json={"input": history})
    assert response.status_code == 200, response.text
    assert said in prompts[0]
    assert "Found." in prompts[0]
    assert "gAAA" not in prompts[0]


FOREIGN_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "oslo"}}, "oslo"),
    (
        {"type": "web_search_tool_result", "tool_use_id": "s",
         "content": [{"type": "web_search_result", "title": "Norway", "url": "https://e.x"}]}, "Norway",
    ),
    ({"type": "compaction", "content": "What was said before."}, "What was said before."),
    ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "hi"}]}, "hi"),
    ({"type": "code_execution_tool_result", "content": {"type": "code_execution_result", "stdout": "1\n"}}, "1"),
    ({"type": "container_upload", "file_id": "f"}, "a file"),
    ({"type": "fallback", "from": {"model": "a"}}, "fallback"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "said"), FOREIGN_BLOCKS, ids=lambda value: str(value)[:40])
async def test_blocks_of_a_provider_in_the_history_are_said_in_words(
    block: dict[str, Any], said: str
) -> None:
    history = [ASK, {"role": "assistant", "content": [block, {"type": "text", "text": "So."}]}, ASK]
    prompts: list[str] = []
    async with serving("On.", prompts) as http:
        body = {"messages": history, "max_tokens": 9}
        response = await http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert said in prompts[0]
    assert "So." in prompts[0]


BROKEN: list[Any] = [
    "{",
    "[1]",
    '"x"',
    "5",
    "city=Oslo",
    json.dumps('{"city": "Oslo"}'),
    [1],
    5,
    None,
]
Posting = Callable[[Any], dict[str, Any]]


@pytest.mark.parametrize("arguments", BROKEN, ids=repr)
async def test_arguments_in_a_history_that_are_no_object_are_taken(arguments: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    history = [
        ASK, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "wrong arguments"},
    ]  # fmt: skip
    prompts: list[str] = []
    async with serving("Again.", prompts) as http:
        response = await http.post("/v1/chat/completions", json={"messages": history})
    assert response.status_code == 200, response.text
    said = {"null": "{}", "5": "5"}.get(json.dumps(arguments), "")
    assert said in prompts[0]
