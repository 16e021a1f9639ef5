"""`cllm chat --tools FILE.py`: functions become tools, and what a model calls is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from cllm import CllmError, SamplingParams, ToolCall
from cllm.cli.chat_session import MAX_ROUNDS, Chat
from cllm.cli.terminal import StandardOutput
from cllm.cli.tool_file import MODULE, load_tools, run_tool, schema_of
from cllm.testing import FakeAnswer, FakeEngine
from tests.cli.children import run_cllm

FILE = '''
"""Tools."""
from __future__ import annotations
import math
from dataclasses import dataclass
from typing import Literal, Optional

def weather(city: str, unit: Literal["c", "f"] = "c", days: int | None = None) -> dict:
    """The weather in
    a city.

    Not for the model.
    """
    return {"city": city, "unit": unit, "days": days}

async def now() -> str:
    return "noon"

def add(a: float, b: float, more: list[int] = [], kind=None, options: dict = {}) -> float:
    return a + b

def fail() -> None:
    raise ValueError("broken")

def shaped(shape: str, *more: int, **others: int) -> object:
    looped = []
    looped.append(looped)
    return {"keys": {(1, 2): 3}, "looped": looped, "point": _Point(1)}[shape]

@dataclass
class _Point:
    x: int

def _private() -> None: ...
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(FILE)
    return path


# --- The file --------------------------------------------------------------------------------
def test_the_public_functions_of_a_file_are_tools_by_their_annotations(path: Path) -> None:
    tools = load_tools(path)
    assert [*tools] == ["weather", "now", "add", "fail", "shaped"]
    function = tools["weather"].definition["function"]
    assert function["description"] == "The weather in a city."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["city"],
    }
    properties = tools["add"].definition["function"]["parameters"]["properties"]
    assert properties["a"] == {"type": "number"}
    assert properties["more"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["options"] == {"type": "object"}
    parameters = tools["shaped"].definition["function"]["parameters"]
    assert (parameters["required"], [*parameters["properties"]]) == (["shape"], ["shape"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "defines no public function"),
        ("def f(:", "cannot be run: SyntaxError"),
        ("import nowhere_at_all", "cannot be run: ModuleNotFoundError"),
        ("def f(x: 'Nothing'): ...", "cannot be run: NameError"),
    ],
)
def test_a_file_that_has_no_tools_says_why(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(text)
    with pytest.raises(CllmError, match=said):
        load_tools(path)


def test_a_file_that_cannot_be_run_leaves_no_module(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("1 / 0")
    with pytest.raises(CllmError, match="ZeroDivisionError"):
        load_tools(path)
    assert MODULE not in sys.modules


def test_a_file_that_is_not_there_is_one_line_of_the_command_line(tmp_path: Path) -> None:
    done = run_cllm("chat", "--tools", str(tmp_path / "missing.py"))
    assert done.returncode in (1, 2)
    assert "missing.py" in done.stderr
    assert "Traceback" not in done.stderr


# --- Calls -----------------------------------------------------------------------------------
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("weather", '{"city":"Oslo"}', '{"city": "Oslo", "unit": "c", "days": null}'),
        ("now", "{}", "noon"),
        ("add", '{"a":1,"b":2}', "3"),
        ("fail", "{}", "error: ValueError('broken')"),
        ("shaped", '{"shape":"point"}', '"_Point(x=1)"'),
        ("shaped", '{"shape":"keys"}', "error: TypeError("),
        ("shaped", '{"shape":"looped"}', "error: ValueError("),
        ("weather", "{}", "error: TypeError("),
        ("weather", '{"city":', "error: JSONDecodeError("),
        ("weather", "[1]", "error: TypeError("),
        ("hammer", "{}", "error: there is no tool 'hammer'"),
    ],
)
async def test_what_a_call_gives_is_text_and_so_is_its_error(
    name: str, arguments: str, result: str, path: Path, anyio_backend: str
) -> None:
    assert (await run_tool(load_tools(path), ToolCall("c", name, arguments))).startswith(result)


class Printed(StandardOutput):
    """Keeps what is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    async def write(self, text: str) -> None:
        self.text += text


def scripted(prompt: str) -> FakeAnswer:
    """Calls `weather`, then says what it gave; calls for ever if asked to."""
    last = prompt.rstrip().splitlines()[-2]
    if last.startswith("tool: "):
        city = json.loads(last.removeprefix("tool: "))["city"]
        if city != "ever":
            return FakeAnswer(f"Sunny in {city}.")
    city = "ever" if "ever" in prompt else "Oslo"
    return FakeAnswer("", "I ask.", [("weather", {"city": city})])


@pytest.mark.anyio
async def test_a_call_is_carried_out_and_the_chat_remembers_it(
    path: Path, anyio_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Printed()
    async with FakeEngine(scripted) as engine:
        chat = Chat(engine, SamplingParams(), None, out, load_tools(path))
        await chat.answer("weather?")
        (turn,) = chat.history.turns
        roles = [message["role"] for message in turn.said]
        assert roles == ["assistant", "tool", "assistant"]
        call: dict[str, Any] = turn.said[0]["tool_calls"][0]
        assert turn.said[1]["tool_call_id"] == call["id"]
        await chat.answer("weather again?")
        assert len(chat.history.turns) == 2
    assert out.text == "Sunny in Oslo.\nSunny in Oslo.\n"
    assert 'weather {"city": "Oslo"} → ' in capsys.readouterr().err


@pytest.mark.anyio
async def test_a_model_that_goes_on_calling_is_stopped(
    path: Path, anyio_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeEngine(scripted, n_ctx=16384) as engine:
        chat = Chat(engine, SamplingParams(), None, Printed(), load_tools(path))
        await chat.answer("for ever")
    said = capsys.readouterr().err
    assert said.count("→") == MAX_ROUNDS
    assert said.endswith(f"stopped after {MAX_ROUNDS} rounds.\n")


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (Literal["c", "f"], {"type": "string", "enum": ["c", "f"]}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal[1, "auto", None], {"enum": [1, "auto", None]}),
    ],
)
def test_a_literal_allows_its_values_whatever_their_type(kind: Any, schema: Any) -> None:
    assert schema_of(kind) == schema
