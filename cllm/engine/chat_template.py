"""From the messages of a chat to the text that a model was trained on.  Pure; needs jinja2.

The text is what transformers renders from the same messages and the same template.  Three things
are added: whatever is wrong is an `InvalidRequestError` that names the field, a template cannot
take more time or memory than it is given (`template_sandbox`), and text of callers never becomes a
control token (`control_names`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cllm.checks import MAX_TEXT_BYTES, check_bool
from cllm.engine.control_names import ControlNames, Guard, Piece
from cllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from cllm.engine.template_sandbox import Program

__all__ = ("ChatTemplate", "Piece", "check_messages", "check_tools")

# Many templates write `<|` + role + `|>`: any other text there would forge a control token.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_DEPTH = 32
MAX_INTEGER_BITS = 1024
MAX_TEMPLATE_BYTES = 256 << 10
MAX_SHOWN = 300
# So many bytes count for any value, so that a limit on text limits the number of values as well.
BYTES_PER_VALUE = 4
# Where a message's reasoning may be; transformers fills the first from the others.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of OpenAI-style messages, of plain dicts, lists and scalars, fit for a template.

    Text parts of a content become one string, a line each.  Arguments of tool calls become a
    mapping where they are one in JSON.

    Raises
    ------
    InvalidRequestError
        Names the field with its index: `messages[3].role`.
    """
    sequence = _sequence("messages", messages)
    if not 1 <= len(sequence) <= MAX_MESSAGES:
        raise InvalidRequestError("messages", f"{len(sequence)} messages", f"1 to {MAX_MESSAGES}")
    copier = _Copier("messages")
    return [_message(f"messages[{i}]", message, copier) for i, message in enumerate(sequence)]


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """A copy of tool definitions, each a mapping; None if there are none.

    Raises
    ------
    InvalidRequestError
    """
    if tools is None:
        return None
    sequence = _sequence("tools", tools)
    if len(sequence) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(sequence)} tools", f"at most {MAX_TOOLS}")
    copier = _Copier("tools")
    # Templates ask `tools is not none` before they announce tools: an empty list has none.
    return [copier.mapping(f"tools[{i}]", tool) for i, tool in enumerate(sequence)] or None


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source : str
        Jinja, as in `tokenizer.chat_template` of a GGUF file; at most 256 KiB.
    bos_token, eos_token : str
        What the template knows by these names.
    control_names : iterable of str
        Spelling of every control token of the vocabulary.
    clock : callable
        Seconds; templates are stopped after two.

    Raises
    ------
    InvalidRequestError
        The template does not compile, or jinja2 is not installed.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        control_names: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(source.encode(errors="surrogatepass")) > MAX_TEMPLATE_BYTES:
            limit = f"at most {MAX_TEMPLATE_BYTES} bytes"
            raise InvalidRequestError("chat_template", source, limit)
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._program = _compile(source)
        self._clock = clock
        try:
            self._names = ControlNames(control_names)
        except (RecursionError, re.error):
            value = "names that begin with each other"
            raise InvalidRequestError("control_names", value, "fewer of them") from None

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Piece]:
        """The chat as text, in the pieces in which it is to be tokenized.

        Parameters
        ----------
        messages, tools : object
            As `check_messages` and `check_tools` take them.
        add_generation_prompt : bool
            End with the beginning of the assistant's next message.
        template_kwargs : mapping, optional
            More variables for the template, such as `enable_thinking`.

        Returns
        -------
        list of Piece
            Their concatenation is the text.  One piece, unless a name of a control token occurs
            in what the caller gave.

        Raises
        ------
        InvalidRequestError
            For the arguments, for what the template itself refuses, and for a template that fails
            or goes on too long.
        """
        chat = [_with_reasoning(message) for message in check_messages(messages)]
        given = {
            **self._check_kwargs({} if template_kwargs is None else template_kwargs),
            "messages": chat,
            "tools": check_tools(tools),
        }
        check_bool("add_generation_prompt", add_generation_prompt, InvalidRequestError)
        guard = self._names.guard(given, "\n".join((self._source, *self._tokens.values())))
        variables = {
            "documents": None,  # transformers always passes them
            **guard.marked(given),
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
        }
        return guard.pieces(self._run(variables, [message["role"] for message in chat], guard))

    def _check_kwargs(self, template_kwargs: object) -> dict[str, Any]:
        kwargs = _Copier("chat_template_kwargs").mapping("chat_template_kwargs", template_kwargs)
        for name in ("messages", "tools", "add_generation_prompt", *self._tokens):
            if name in kwargs:
                field = f"chat_template_kwargs.{name}"
                raise InvalidRequestError(field, kwargs[name], "an argument of its own")
        return kwargs

    def _run(self, variables: dict[str, Any], roles: list[str], guard: Guard) -> str:
        from cllm.engine.template_sandbox import LimitError, RefusedError

        try:
            return self._program.run(variables, self._clock)
        except RefusedError as error:
            limit = f"what the chat template accepts: {_shown(error, guard)}"
            raise InvalidRequestError("messages", roles, limit) from None
        except LimitError as error:
            raise InvalidRequestError("chat_template", self._source, str(error)) from None
        except Exception as error:  # whatever a template can make Python raise
            limit = f"what the chat template can render: {_shown(error, guard)}"
            raise InvalidRequestError("messages", roles, limit) from None


class _Copier:
    """Copies JSON-like values into plain ones and counts their text."""

    def __init__(self, whole: str) -> None:
        self._whole = whole
        self._room = MAX_TEXT_BYTES

    def mapping(self, field: str, value: object) -> dict[str, Any]:
        """A copy of a mapping."""
        if not isinstance(value, Mapping):
            raise InvalidRequestError(field, value, "a mapping")
        copy: dict[str, Any] = self.copy(field, value)
        return copy

    def copy(self, field: str, value: object, depth: int = 0) -> Any:
        """A copy of a value; `field` is its name."""
        self._count(BYTES_PER_VALUE)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(field, value)
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                value = f"a number of {value.bit_length()} bits"
                raise InvalidRequestError(field, value, f"at most {MAX_INTEGER_BITS} bits")
            return int(value)
        if isinstance(value, float):
            return float(value)
        if depth >= MAX_DEPTH:
            raise InvalidRequestError(field, "nested deeper", f"at most {MAX_DEPTH} levels deep")
        if isinstance(value, Mapping):
            return {
                self._text(field, key): self.copy(f"{field}.{key!s:.40}", item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [self.copy(f"{field}[{i}]", item, depth + 1) for i, item in enumerate(value)]
        raise InvalidRequestError(field, value, "a JSON value")

    def _text(self, field: str, text: object) -> str:
        if not isinstance(text, str):
            raise InvalidRequestError(field, text, "a mapping with string keys")
        try:
            self._count(len(text) if text.isascii() else len(text.encode()))
        except UnicodeEncodeError as error:
            lone = text[error.start : error.start + 1]
            raise InvalidRequestError(field, lone, "text without lone surrogates") from None
        return str.__str__(text)  # of a subclass only the text

    def _count(self, n_bytes: int) -> None:
        self._room -= n_bytes
        if self._room < 0:
            limit = f"at most {MAX_TEXT_BYTES} bytes of text"
            raise InvalidRequestError(self._whole, f"more than {MAX_TEXT_BYTES} bytes", limit)


def _sequence(field: str, value: object) -> Sequence[object]:
    """The value if it is a list of something, and not a text."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise InvalidRequestError(field, value, "a list of mappings")
    return value


def _message(field: str, value: object, copier: _Copier) -> dict[str, Any]:
    message = copier.mapping(field, value)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    _parse_arguments(f"{field}.tool_calls", message)
    content = message.get("content")
    if isinstance(content, list):
        parts = enumerate(content)
        message["content"] = "\n".join(_text_part(f"{field}.content[{i}]", p) for i, p in parts)
    elif content is None:
        if role != "assistant" or "tool_calls" not in message:
            raise InvalidRequestError(f"{field}.content", content, "text, or there are tool_calls")
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{field}.content", content, "text or a list of text parts")
    return message


def _text_part(field: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind != "text":
        raise InvalidRequestError(f"{field}.type", kind, '"text"; others are not supported yet')
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.text", text, "a string")
    return text


def _parse_arguments(field: str, message: dict[str, Any]) -> None:
    """Make a mapping of the arguments of tool calls, which OpenAI's clients send as JSON text.

    transformers passes on what it gets, and documents a mapping; templates that write `tojson`
    would quote the text once more, others fail.  vLLM parses it, takes empty text for no arguments,
    and drops empty `tool_calls`, so that templates that only ask for the key do not see a call.
    """
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list):
        raise InvalidRequestError(field, calls, "a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        text = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(text, str):
            continue
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            name = f"{field}[{i}].function.arguments"
            # Copied once more: text in JSON can have lone surrogates, and be nested deep.
            function["arguments"] = _Copier(name).copy(name, arguments)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, as in transformers."""
    values = (message[field] for field in REASONING_FIELDS if message.get(field) is not None)
    reasoning = next(values, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _compile(source: str) -> Program:
    try:
        from cllm.engine.template_sandbox import Program
    except ModuleNotFoundError:
        limit = "rendered with jinja2: pip install 'cllm[chat]'"
        raise InvalidRequestError("messages", "a chat", limit) from None
    try:
        return Program(source)
    except Exception as error:  # the parser, the generator and Python's compiler
        limit = f"a chat template that compiles: {_shown(error)}"
        raise InvalidRequestError("chat_template", source, limit) from None


def _shown(error: Exception, guard: Guard | None = None) -> str:
    """What an error says, short; its type if it is one of Python's."""
    text = str(error)
    if type(error).__module__ == "builtins":
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    elif (line := getattr(error, "lineno", None)) is not None:  # of a jinja2.TemplateSyntaxError
        text = f"line {line}: {getattr(error, 'message', text)}"
    text = text if guard is None else guard.unmarked(text)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
