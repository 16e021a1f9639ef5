"""From the messages of a chat to the text that a model was trained on.  Pure; needs jinja2.

The text is what transformers renders from the same messages and the same template.  Three things
are added: whatever is wrong is an `InvalidRequestError` that names the field, a template cannot
take more time or memory than it is given (`template_sandbox`), and text of callers never becomes a
control token (`control_tokens`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cllm.checks import check_bool
from cllm.engine.chat.control_tokens import ControlTokens, Guard, Piece
from cllm.engine.chat.messages import Copier, check_messages, check_tools, with_reasoning
from cllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from cllm.engine.chat.template_sandbox import Program

MAX_TEMPLATE_BYTES = 256 << 10
MAX_SHOWN = 300


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
            self._names = ControlTokens(control_names)
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
        chat = [with_reasoning(message) for message in check_messages(messages)]
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
        kwargs = Copier("chat_template_kwargs").mapping("chat_template_kwargs", template_kwargs)
        for name in ("messages", "tools", "add_generation_prompt", *self._tokens):
            if name in kwargs:
                field = f"chat_template_kwargs.{name}"
                raise InvalidRequestError(field, kwargs[name], "an argument of its own")
        return kwargs

    def _run(self, variables: dict[str, Any], roles: list[str], guard: Guard) -> str:
        from cllm.engine.chat.template_sandbox import LimitError, RefusedError

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


def _compile(source: str) -> Program:
    try:
        from cllm.engine.chat.template_sandbox import Program
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
