"""`--tools FILE.py`: the functions of a Python file as tools that a model may call.

Each public function or coroutine function that the file defines is a tool.  Its description is the first
paragraph of the docstring, and its parameters follow the annotations.  The file is imported as a module.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

import anyio.to_thread

from cllm import CllmError, ToolCall

MODULE = "_cllm_tool_file"
KINDS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """Function of the user, and its description for a model."""

    function: Callable[..., Any]
    definition: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the tool for the model."""
        name: str = self.definition["function"]["name"]
        return name


def load_tools(path: Path) -> dict[str, FunctionTool]:
    """Return the tools of a file, by name.

    Raises
    ------
    CllmError
        The file is not a Python file, raises an error, or defines no public function.
    """
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise CllmError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses look up their annotations there
    try:
        spec.loader.exec_module(module)
        functions = [
            value
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]
        tools = [FunctionTool(function, definition_of(function)) for function in functions]
    except Exception as error:  # an annotation may be wrong too
        del sys.modules[MODULE]
        raise CllmError(f"{path} cannot be run: {error!r}") from error
    if not tools:
        raise CllmError(f"{path} defines no public function")
    return {tool.name: tool for tool in tools}


def definition_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the definition of a function as a tool, in OpenAI's form."""
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = schema_of(hints.get(name, str))
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; an unknown annotation allows anything."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in KINDS:
        return KINDS[kind]
    if origin is Literal:
        kinds = {type(value) for value in inner}
        return {**(KINDS.get(kinds.pop(), {}) if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one) for one in inner]}
    if origin is list or kind is list:
        return {"type": "array", **({"items": schema_of(inner[0])} if inner else {})}
    return {"type": "object"} if origin is dict or kind is dict else {}


async def run_tool(tools: Mapping[str, FunctionTool], call: ToolCall) -> str:
    """Return the result of a call as text for the model; an error of the tool is returned as text too."""
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}"
    try:
        arguments = json.loads(call.arguments)
        function = tools[call.name].function
        if inspect.iscoroutinefunction(function):
            result = await function(**arguments)
        else:
            result = await anyio.to_thread.run_sync(lambda: function(**arguments))
        return result if isinstance(result, str) else json.dumps(result, default=str)
    except Exception as error:
        return f"error: {error!r}"
