"""The checked options of a chat.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cllm.checks import INT32_MAX, check_bool, check_int
from cllm.engine.chat.media_marks import MediaMarks
from cllm.engine.chat.message_checks import check_messages, check_tools
from cllm.errors import InvalidRequestError

TOOL_CHOICES = ("auto", "none", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, and how to render them.

    Attributes
    ----------
    tools : list of mapping or None
        Tools that the model may call; None if there are none.
    tool_choice : str
        "auto", "none", "required", or the name of one of the tools.
    parallel_tool_calls : bool
        True if the model may call several tools in one turn.
    add_generation_prompt : bool
        True if the prompt ends with the beginning of an answer.
    continue_final_message : bool
        True if the last message is the beginning of the answer.
    reasoning_effort : str or None
        One of `EFFORTS`; None: the default of the template.
    reasoning_budget : int or None
        Tokens of reasoning at most; None: no limit.
    json_schema : str or None
        JSON text of the schema for an answer that is not a call.
    template_kwargs : mapping
        Additional variables for the template.
    marks : MediaMarks or None
        Images and audio of the messages; None without any.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    reasoning_effort: str | None
    reasoning_budget: int | None
    template_kwargs: Mapping[str, Any]
    json_schema: str | None = None
    marks: MediaMarks | None = None

    @classmethod
    def of(
        cls,
        messages: object,
        *,
        tools: object = None,
        tool_choice: object = "auto",
        parallel_tool_calls: object = True,
        add_generation_prompt: object = True,
        continue_final_message: object = False,
        reasoning_effort: object = None,
        reasoning_budget: object = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Return a checked copy of the options; only the values in `template_kwargs` are not copied.

        Raises
        ------
        InvalidRequestError
            An option is invalid; the error names the field, such as `messages[3].role`.
        """
        error = InvalidRequestError
        if not isinstance(template_kwargs, Mapping | None):
            raise error("chat_template_kwargs", template_kwargs, "a mapping")
        if reasoning_effort is not None and reasoning_effort not in EFFORTS:
            limit = f"one of {', '.join(EFFORTS)}"
            raise error("reasoning_effort", reasoning_effort, limit)
        marks = MediaMarks()
        chat, offered = check_messages(messages, marks), check_tools(tools)
        continues = check_bool("continue_final_message", continue_final_message, error)
        if continues:
            _check_continued(chat)
        choice = _checked_choice(tool_choice, offered)
        return cls(
            messages=chat,
            tools=None if choice == "none" else offered,
            tool_choice=choice,
            parallel_tool_calls=check_bool("parallel_tool_calls", parallel_tool_calls, error),
            add_generation_prompt=check_bool("add_generation_prompt", add_generation_prompt, error),
            continue_final_message=continues,
            reasoning_effort=None if reasoning_effort is None else str(reasoning_effort),
            reasoning_budget=_checked_budget(reasoning_budget),
            template_kwargs=dict(template_kwargs or {}),
            marks=marks if marks.media else None,
        )


def _checked_budget(budget: object) -> int | None:
    if budget is None:
        return None
    return check_int("reasoning_budget", budget, 0, INT32_MAX, InvalidRequestError)


def _checked_choice(tool_choice: object, tools: list[dict[str, Any]] | None) -> str:
    names = [tool["function"]["name"] for tool in tools or ()]
    if not isinstance(tool_choice, str) or tool_choice not in (*TOOL_CHOICES, *names):
        limit = f"one of {', '.join(TOOL_CHOICES)}, or the name of one of the tools"
        raise InvalidRequestError("tool_choice", tool_choice, limit)
    if tool_choice not in ("auto", "none") and not tools:
        raise InvalidRequestError("tool_choice", tool_choice, "left out where there are no tools")
    return tool_choice


def _check_continued(chat: list[dict[str, Any]]) -> None:
    last = chat[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        given = "calls of tools" if last.get("tool_calls") else f"a message of {last['role']}"
        limit = "only for a last message of the assistant, without calls"
        raise InvalidRequestError("continue_final_message", given, limit)
