"""Render the messages of a chat as the text that a model was trained on.  Needs jinja2.

The text is what transformers renders from the same messages and the same template.  Three
things are added.  An error of a template is an `InvalidRequestError` that names the field.  Templates
are rendered in a child process, within 2 s and 512 MiB (`template_child`).  Control tokens that callers
spell stay text (`control_tokens`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from cllm.checks import MAX_TEMPLATE_BYTES, check_bool
from cllm.engine.chat.control_tokens import ControlTokens, Guard, Piece
from cllm.engine.chat.message_checks import Copier, check_messages, check_tools, with_reasoning
from cllm.engine.child_process import EndedError, JsonChild, TooSlowError
from cllm.errors import InvalidRequestError, RequestError

MAX_SHOWN = 300
RENDER_S = 2.0
MEMORY_BYTES = 512 << 20
MODULE = "cllm.engine.chat.template_child"

T = TypeVar("T")


def template_child() -> JsonChild:
    """Return the child process that renders templates; the first rendering starts it."""
    return JsonChild(MODULE, str(MEMORY_BYTES))


class TemplateLimitError(InvalidRequestError):
    """A template needs more time or memory than it may have; on a busy machine the next try may succeed."""


def unless_rejected(render: Callable[[], T]) -> T | None:
    """Return what `render` returns; None if the template rejects the messages.

    Raises
    ------
    TemplateLimitError
        The template needed too much time or memory, which says nothing about the messages.
    """
    try:
        return render()
    except TemplateLimitError:
        raise
    except InvalidRequestError:
        return None


class ChatTemplate:
    """A chat template.

    Parameters
    ----------
    source : str
        Jinja, as in `tokenizer.chat_template` of a GGUF file; at most 256 KiB.
    bos_token, eos_token : str
        Values of the template's variables of these names.
    control_names : iterable of str
        Spelling of every control token of the vocabulary.
    child : JsonChild
        Process that renders the template: `template_child()`.

    Raises
    ------
    InvalidRequestError
        The template is too long, the control names share too many prefixes, or jinja2 is missing.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        control_names: Iterable[str],
        child: JsonChild,
    ) -> None:
        if len(source.encode(errors="surrogatepass")) > MAX_TEMPLATE_BYTES:
            limit = f"at most {MAX_TEMPLATE_BYTES} bytes"
            raise InvalidRequestError("chat_template", source, limit)
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if importlib.util.find_spec("jinja2") is None:
            limit = "a prompt: chat templates need the extra 'chat' (pip install 'cllm[chat]')"
            raise InvalidRequestError("messages", "a chat", limit)
        self._child = child
        try:
            self._names = ControlTokens(control_names)
        except (RecursionError, re.error):
            value = "names that begin with each other"
            raise InvalidRequestError("control_names", value, "fewer names") from None

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Piece]:
        """Return a chat as text, in the pieces that are tokenized separately.

        Parameters
        ----------
        messages, tools : object
            Arguments of `check_messages` and `check_tools`.
        add_generation_prompt : bool
            True if the text ends with the beginning of the assistant's next message.
        template_kwargs : mapping, optional
            More variables for the template, such as `enable_thinking`.

        Returns
        -------
        list of Piece
            Pieces whose concatenation is the text.  There is one piece, unless the arguments spell
            a control token.

        Raises
        ------
        InvalidRequestError
            An argument is invalid; or the template rejects the messages, does not compile, fails,
            or exceeds the limits of time, memory or output.
        ClosedError
            The child process was closed.
        """
        check_bool("add_generation_prompt", add_generation_prompt, InvalidRequestError)
        return self.render_checked(
            check_messages(messages),
            check_tools(tools),
            add_generation_prompt,
            {} if template_kwargs is None else template_kwargs,
        )

    def render_checked(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object],
    ) -> list[Piece]:
        """Return the pieces of a chat as `render` does; messages and tools must be checked already."""
        chat = [with_reasoning(message) for message in messages]
        given = {**self._check_kwargs(template_kwargs), "messages": chat, "tools": tools}
        guard = self._names.guard(given, "\n".join((self._source, *self._tokens.values())))
        variables = {
            "documents": None,  # transformers always passes them
            **guard.marked(given),
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
        }
        return guard.pieces(self._run(variables, [message["role"] for message in chat], guard))

    def _check_kwargs(self, template_kwargs: object) -> dict[str, Any]:
        kwargs = Copier("chat_template_kwargs").mapping("chat_template_kwargs", template_kwargs)
        for name in ("messages", "tools", "add_generation_prompt", *self._tokens):
            if name in kwargs:
                field = f"chat_template_kwargs.{name}"
                raise InvalidRequestError(field, kwargs[name], "an argument of its own")
        return kwargs

    def _run(self, variables: dict[str, Any], roles: list[str], guard: Guard) -> str:
        now = datetime.now().isoformat()
        request = {"source": self._source, "variables": variables, "now": now}
        try:
            answer = self._child.ask(request, RENDER_S)
        except TooSlowError:
            answer = {"kind": "limit", "error": f"a template that renders within {RENDER_S:g} s"}
        except EndedError:
            limit = f"a template that renders within {MEMORY_BYTES >> 20} MiB"
            answer = {"kind": "limit", "error": limit}
        except OSError as error:
            raise RequestError(
                f"the process that renders chats cannot be started: {error}"
            ) from None
        if (text := answer.get("text")) is not None:
            return str(text)
        shown = guard.unmarked(answer["error"])
        shown = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."
        match answer["kind"]:
            case "limit":
                raise TemplateLimitError("chat_template", self._source, shown)
            case "compile":
                limit = f"a chat template that compiles: {shown}"
                raise InvalidRequestError("chat_template", self._source, limit)
            case "refused":
                limit = f"messages that the chat template accepts: {shown}"
            case _:
                limit = f"messages that the chat template can render: {shown}"
        raise InvalidRequestError("messages", roles, limit)
