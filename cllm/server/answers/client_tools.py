"""Conversion of tools that a client runs to functions for the model, and of their calls back.  Pure.

Functions, members of a `namespace`, `custom` tools, OpenAI's `local_shell`, `shell`, `apply_patch` and
`tool_search`, and Anthropic's `bash_*`, `text_editor_*`, `memory_*` and `computer_*` run at the client.
Tools that run at a provider are left out, and a warning is logged once for each type.

The inputs are those of openai 3.57 (`openai.types.responses`) and anthropic 2.14
(`anthropic.types.beta`).  Anthropic's SDK has no schemas of `bash`, `text_editor` and `computer`: these are
from its documentation ("Tool use": bash tool, text editor tool, computer use tool).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cllm.log_once import log_once
from cllm.server.http.problems import invalid

logger: logging.Logger = logging.getLogger("cllm.server")

Schema = dict[str, Any]
# Tools of this namespace keep their plain names for the model: Codex wraps all its tools in it.
DEFAULT_NAMESPACE = "functions"
FUNCTION, CUSTOM = "function", "custom"
LEFT_OUT = "tools of the type %s run elsewhere and are left out"
FIELDS = ("name", "description", "parameters", "strict")


def _object(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


def _text(description: str, *choices: str) -> Schema:
    return {
        "type": "string",
        "description": description,
        **({"enum": list(choices)} if choices else {}),
    }


def _number(description: str) -> Schema:
    return {"type": "integer", "description": description}


def _numbers(description: str, n: int) -> Schema:
    exactly = {"minItems": n, "maxItems": n}
    return {"type": "array", "items": {"type": "integer"}, "description": description, **exactly}


_TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
_PATH = _text("Absolute path of the file or directory")
_OPENAI: dict[str, tuple[str, Schema]] = {
    "local_shell": (
        "Run a command on the user's computer.",
        _object(
            "command",
            command={**_TEXTS, "description": "The program and its arguments"},
            working_directory=_text("Where it runs"),
            timeout_ms=_number("Milliseconds that it may take"),
            env={"type": "object", "additionalProperties": {"type": "string"}},
        ),
    ),
    "shell": (
        "Run shell commands on the user's computer, one after another.",
        _object(
            "commands",
            commands={**_TEXTS, "description": "Lines for the shell"},
            timeout_ms=_number("Milliseconds that each may take"),
            max_output_length=_number("Characters of output that are wanted"),
        ),
    ),
    "apply_patch": (
        "Create, change or delete one file.  A diff has a line for each line of the file: '+' begins one "
        "that is added, '-' one that is removed, ' ' one that stays; '@@' begins a part that is changed.",
        _object(
            "type path",
            type=_text("What is done", "create_file", "update_file", "delete_file"),
            path=_text("The file"),
            diff=_text("The lines, for a file that is created or changed"),
        ),
    ),
    "tool_search": (
        "Look for more tools.", _object("query", query=_text("What the tool is to do")),
    ),
}  # fmt: skip
_EDITS = {
    "file_text": _text("The whole text, for `create`"),
    "old_str": _text("What is replaced, for `str_replace`; it must be in the file once"),
    "new_str": _text("What it is replaced by, for `str_replace`"),
    "insert_line": _number(
        "The line behind which text is inserted, for `insert`; 0 is the beginning"
    ),
    "view_range": _numbers("First and last line that are shown, for `view`; -1 is the end", 2),
}
_OLD_INSERT = {"new_str": _text("What replaces `old_str`, or is inserted, for `insert`")}
_INSERT = {"insert_text": _text("What is inserted, for `insert`")}
_EDITOR = ("view", "create", "str_replace", "insert")
_CLICKS = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
    "double_click", "screenshot", "cursor_position",
)  # fmt: skip
_ACTIONS = (
    *_CLICKS,
    "left_mouse_down",
    "left_mouse_up",
    "scroll",
    "hold_key",
    "wait",
    "triple_click",
)
_POINT = {
    "coordinate": _numbers("x and y of the pixel", 2),
    "text": _text("What is typed, or the keys that are pressed or held"),
}
_SCROLL = {
    "start_coordinate": _numbers("Where a drag begins", 2),
    "scroll_direction": _text("For `scroll`", "up", "down", "left", "right"),
    "scroll_amount": _number("Notches of the wheel, for `scroll`"),
    "duration": _number("Seconds, for `hold_key` and `wait`"),
}


def _editor(name: str, *commands: str, **more: Schema) -> tuple[str, str, Schema]:
    fields = {"command": _text("What is done", *commands), "path": _PATH, **_EDITS, **more}
    return name, "View and edit files.", _object("command path", **fields)


def _computer(*actions: str, **more: Schema) -> tuple[str, str, Schema]:
    schema = _object("action", action=_text("What is done", *actions), **_POINT, **more)
    return "computer", "Use the screen, the keyboard and the mouse of a computer.", schema


_BASH = (
    "bash", "Run a command in a shell that stays open.",
    _object("", command=_text("The command, unless the shell is restarted"),
            restart={"type": "boolean", "description": "Start the shell anew"}),
)  # fmt: skip
_OLD_NAME, _NEW_NAME = "str_replace_editor", "str_replace_based_edit_tool"
_ANTHROPIC: dict[str, tuple[str, str, Schema]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _editor(_OLD_NAME, *_EDITOR, "undo_edit", **_OLD_INSERT),
    "text_editor_20250124": _editor(_OLD_NAME, *_EDITOR, "undo_edit", **_OLD_INSERT),
    "text_editor_20250429": _editor(_NEW_NAME, *_EDITOR, **_INSERT),
    "text_editor_20250728": _editor(_NEW_NAME, *_EDITOR, **_INSERT),
    "memory_20250818": (
        "memory", "Read and write notes that are kept, below `/memories`.",
        _object("command", command=_text("What is done", *_EDITOR, "delete", "rename"),
                path=_text("A path below /memories"), **_EDITS, **_INSERT,
                old_path=_text("For `rename`"), new_path=_text("For `rename`")),
    ),
    "computer_20241022": _computer(*_CLICKS),
    "computer_20250124": _computer(*_ACTIONS, **_SCROLL),
    "computer_20251124": _computer(
        *_ACTIONS, "zoom", **_SCROLL, region=_numbers("x1, y1, x2, y2 of what is shown, for `zoom`", 4)
    ),
}  # fmt: skip
# Prefixes of types of tools that run at the client: one that is not in `_ANTHROPIC` is rejected.
_UNKNOWN_CLIENT_TOOLS = (
    "computer_toolset_",
    "browser_toolset_",
    "computer_",
    "text_editor_",
    "bash_",
    "memory_",
)


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One tool, as its client knows it.

    Attributes
    ----------
    kind : str
        `function`, `custom`, or a type of `_OPENAI`, whose calls are items of their own type.
    name : str
    namespace : str or None
    """

    kind: str
    name: str
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """Name of the tool for the model, different for each tool."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


@dataclass(slots=True)
class ClientTools:
    """The tools of one request.

    Attributes
    ----------
    functions : list of mapping
        Definitions for the model, in the form of `tools` of chat completions.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    _fields: list[str] = field(default_factory=list)  # of the body, one for each of `functions`
    _known: dict[str, ClientTool] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)  # in `functions`, by name
    _withdrawn: set[str] = field(default_factory=set)  # names

    def add(self, tools: Iterable[object], where: str = "tools") -> None:
        """Add the tools of a request, or of an item of its input.

        Raises
        ------
        Problem
            400: a tool or a namespace is malformed; names it.
        """
        left_out: set[str] = set()
        for i, tool in enumerate(tools):
            name = f"{where}[{i}]"
            if not isinstance(tool, Mapping):
                raise invalid(name, "must be an object")
            kind = tool.get("type") or FUNCTION
            if kind == "namespace":
                self._add_namespace(name, tool)
            elif not self._add(name, str(kind), tool, None):
                left_out.add(str(kind))
        for kind in sorted(left_out):
            log_once(logger, LEFT_OUT, kind)

    def _add_namespace(self, where: str, tool: Mapping[str, Any]) -> None:
        name, members = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(members, list):
            raise invalid(where, "must be a namespace with a name and a list of tools")
        space = None if name == DEFAULT_NAMESPACE else name
        for k, member in enumerate(members):
            kind = (member.get("type") or FUNCTION) if isinstance(member, Mapping) else ""
            if kind not in (FUNCTION, CUSTOM):
                raise invalid(f"{where}.tools[{k}].type", "must be function or custom")
            self._add(f"{where}.tools[{k}]", kind, member, space)

    def _add(self, where: str, kind: str, tool: Mapping[str, Any], space: str | None) -> bool:
        """Add one tool and return True; return False if it does not run at the client."""
        inner = tool.get(kind)
        said = inner if isinstance(inner, Mapping) else tool  # of Chat Completions or of Responses
        name = said.get("name")
        if kind == FUNCTION:
            function = {key: said[key] for key in FIELDS if said.get(key) is not None}
        elif kind == CUSTOM:
            function = {"name": name, **_custom(said)}
        elif kind in _OPENAI and _runs_at_the_client(kind, tool):
            name, (description, schema) = kind, _OPENAI[kind]
            if kind == "tool_search":
                description = str(tool.get("description") or description)
                schema = tool.get("parameters") or schema
            function = {"name": kind, "description": description, "parameters": schema}
        else:
            return False
        shown = ClientTool(kind, str(name or ""), space)
        if isinstance(name, str):
            function["name"] = shown.flat_name
        self._put(shown.flat_name, function, f"{where}.{kind}" if said is inner else where)
        self._known[shown.flat_name] = shown
        return True

    def _put(self, name: str, function: dict[str, Any], where: str) -> None:
        made = {"type": "function", "function": function}
        place = self._places.setdefault(name, len(self.functions))
        # A tool of the history was found again: its last definition counts.
        if place < len(self.functions) and not where.startswith("tools"):
            self.functions[place], self._fields[place] = made, where
        else:
            self.functions.append(made)
            self._fields.append(where)
        self._withdrawn.discard(name)

    def add_anthropic(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """Add the tools of `/v1/messages`; raise `Problem` for an unknown version of a client's tool."""
        for i, tool in enumerate(tools):
            self._add_anthropic(f"tools[{i}]", tool)

    def _add_anthropic(self, where: str, tool: Mapping[str, Any]) -> None:
        kind = tool.get("type")
        if kind in (None, CUSTOM):
            function = {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
                "strict": tool.get("strict") is True,
            }
        elif isinstance(kind, str) and kind in _ANTHROPIC:
            name, description, schema = _ANTHROPIC[kind]
            if kind == "computer_20251124" and tool.get("enable_zoom") is not True:
                _, _, schema = _ANTHROPIC["computer_20250124"]
            sizes = [tool.get(f"display_{side}_px") for side in ("width", "height")]
            if all(isinstance(size, int) for size in sizes):
                description += f" The screen has {sizes[0]} by {sizes[1]} pixels."
            function = {"name": name, "description": description, "parameters": schema}
        elif str(kind).startswith(_UNKNOWN_CLIENT_TOOLS):
            known = ", ".join(_ANTHROPIC)
            raise invalid(f"{where}.type", f"is {str(kind)[:40]!r}, must be one of {known}")
        else:
            log_once(logger, LEFT_OUT, kind)
            return
        self._put(str(function["name"] or ""), function, where)

    def change(self, where: str, block: Mapping[str, Any]) -> None:
        """Offer or withdraw the tool of a `tool_addition` or `tool_removal` in a message of `/v1/messages`.

        A reference to a tool of MCP changes nothing: it runs elsewhere.

        Raises
        ------
        Problem
            400: a definition is malformed; names it.
        """
        given = block.get("tool")
        tool = given if isinstance(given, Mapping) else {}
        name, definition = tool.get("name"), tool.get("definition")
        if tool.get("type") == "tool_definition":
            if not isinstance(definition, Mapping):
                raise invalid(f"{where}.tool.definition", "must be an object")
            self._add_anthropic(f"{where}.tool.definition", definition)
        elif tool.get("type") == "tool_reference" and isinstance(name, str):
            if block.get("type") == "tool_removal":
                self._withdrawn.add(name)
            else:
                self._withdrawn.discard(name)

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The functions without those that a message has withdrawn; None without any."""
        names = self._withdrawn
        return [f for f in self.functions if str(f["function"].get("name")) not in names] or None

    def field_of(self, function: object) -> str:
        """Return the field of the body that one of `functions` comes from, such as `tools[1].function`."""
        places = zip(self._fields, self.functions, strict=True)
        return next((place for place, known in places if known is function), "tools")

    def known(self, name: str) -> ClientTool:
        """Return the tool that the model calls by this name; a plain function for an unknown name."""
        return self._known.get(name, ClientTool(FUNCTION, name))

    # --- Calls, forth and back -----------------------------------------------------------------
    def call(self, call_id: object, kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call in the client's history as an item of `tool_calls` of chat completions."""
        arguments: object = item.get("arguments", "")
        name = kind
        if kind in (FUNCTION, CUSTOM):
            space = item.get("namespace")
            space = None if space in (None, DEFAULT_NAMESPACE) else str(space)
            name = ClientTool(kind, str(item.get("name") or ""), space).flat_name
        if kind == CUSTOM:
            arguments = {"input": item.get("input", "")}
        elif kind in ("local_shell", "shell", "computer"):
            action = item.get("action")
            kept = dict(action) if isinstance(action, Mapping) else {}
            arguments = {key: v for key, v in kept.items() if v is not None and key != "type"}
        elif kind == "apply_patch":
            arguments = item.get("operation") or {}
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def choice(self, choice: object) -> tuple[list[dict[str, Any]] | None, str]:
        """Return the tools that may be called, None without any, and `tool_choice` for the engine.

        Raises
        ------
        Problem
            400: the choice has an unknown form.
        """
        tools = self.functions or None
        if choice is None:
            return tools, "auto"
        if isinstance(choice, str):
            return tools, "required" if choice == "any" else choice
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        if isinstance(choice, Mapping) and kind == "allowed_tools":
            given = choice.get("allowed_tools", choice)
            allowed = given.get("tools") if isinstance(given, Mapping) else None
            mode = given.get("mode", "auto") if isinstance(given, Mapping) else None
            if isinstance(allowed, list) and mode in ("auto", "required"):
                names = {_name_of(tool) for tool in allowed}
                # The engine rejects a tool whose name is no text.
                kept = [
                    tool
                    for tool in self.functions
                    if not isinstance(name := tool["function"].get("name"), str) or name in names
                ]
                return kept, str(mode)
        elif (name := _name_of(choice)) is not None:
            return tools, name
        limit = "must be auto, none, required, allowed_tools, or the name of a tool"
        raise invalid("tool_choice", limit)


def _runs_at_the_client(kind: str, tool: Mapping[str, Any]) -> bool:
    where = tool.get("environment")
    if kind == "tool_search":
        return tool.get("execution") == "client"
    return not (isinstance(where, Mapping) and str(where.get("type")).startswith("container"))


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description and the parameters of a custom tool as a function with the argument `input`."""
    form = tool.get("format")
    form = form if isinstance(form, Mapping) else {}
    grammar = form.get("grammar")
    inner = grammar if isinstance(grammar, Mapping) else form
    syntax, definition = inner.get("syntax"), inner.get("definition")
    text: Schema = {"type": "string"}
    description = [str(tool.get("description") or "")]
    if syntax == "regex" and isinstance(definition, str):
        text["pattern"] = f"^(?:{definition.removeprefix('^').removesuffix('$')})$"
    elif isinstance(definition, str):
        description.append(f"The input follows this grammar ({syntax}):\n{definition}")
    parameters = {**_object("input", input=text), "additionalProperties": False}
    return {"description": "\n".join(filter(None, description)), "parameters": parameters}


def _name_of(tool: object) -> str | None:
    """Return the name that the model knows for the tool of a choice; None if the choice has no name."""
    if not isinstance(tool, Mapping):
        return None
    kind = tool.get("type")
    inner = tool.get(kind, tool) if isinstance(kind, str) else tool
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if isinstance(name, str):
        space = tool.get("namespace")
        has_own = isinstance(space, str) and space != DEFAULT_NAMESPACE
        return ClientTool(FUNCTION, name, space if has_own else None).flat_name
    return kind if isinstance(kind, str) and kind in _OPENAI else None


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return the arguments of a call as a dict; None if the text is not a complete JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def text_input_of(arguments: str) -> str:
    """Return the input text of a call of a custom tool; the raw arguments if they are cut off or have none."""
    value = object_of(arguments)
    text = arguments if value is None else value.get("input")
    return text if isinstance(text, str) else arguments


def messages_of(messages: Sequence[Any]) -> list[Any]:
    """Return the messages of a chat with calls of custom tools turned into calls of functions.

    A message's `function_call`, OpenAI's older form, becomes a call too.
    """
    tools = ClientTools()

    def with_functions(message: Any) -> Any:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not calls and isinstance(message, Mapping) and message.get("function_call"):
            call = {"id": "call_0", "type": FUNCTION, FUNCTION: message["function_call"]}
            return {**message, "tool_calls": [call]}
        if not isinstance(calls, list):
            return message
        made = [
            tools.call(call.get("id"), CUSTOM, call[CUSTOM])
            if isinstance(call, Mapping) and isinstance(call.get(CUSTOM), Mapping)
            else call
            for call in calls
        ]
        return {**message, "tool_calls": made}

    return [with_functions(message) for message in messages]
