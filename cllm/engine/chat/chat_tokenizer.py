"""ChatTokenizer: render messages to the tokens of a prompt, and find out how the answer is parsed.

Text of callers stays text: a control token that it spells is tokenized as ordinary text.
Use it on the tokenizer's thread only, except for `ChatTokenizer.close`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any

from cllm.engine.chat.call_grammar import CallGrammar, RoutedCallGrammar
from cllm.engine.chat.chat_prompt import TOOL_CHOICES, ChatPrompt
from cllm.engine.chat.chat_template import (
    ChatTemplate,
    TemplateLimitError,
    template_child,
    unless_rejected,
)
from cllm.engine.chat.control_tokens import Piece, tokens_of
from cllm.engine.chat.conversation import mended, mended_tools, plain_tools
from cllm.engine.chat.format_detection import QUESTION, detect_format
from cllm.engine.chat.message_checks import with_reasoning
from cllm.engine.chat.named_formats import DEFAULT_CALLS
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.output_parser import CallIds, OutputParser
from cllm.engine.chat.template_abilities import TemplateAbilities, find_abilities
from cllm.engine.chat.tool_schema import ToolParameters, parameters_of
from cllm.engine.json_schema import say_ignored
from cllm.engine.request import Thinking
from cllm.engine.vocabulary import ChatVocabulary
from cllm.errors import InvalidRequestError

# Marks for the end of a message that the answer continues: the template's text after it is cut off.
SENTINELS = tuple(map(chr, range(0xE0C0, 0xE0C8)))


N_LIMITS = 2  # test messages of a template that may fail at its limits, perhaps on a busy machine


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answer to one chat is parsed.

    Attributes
    ----------
    prefix : str
        Markers at the end of the prompt, which the parser reads before the answer.
    spelled : mapping of int to bytes
        Names of the control tokens that are markers, by id; in the answer they are text.
    grammar : str or None
        Grammar of the answer in Lark; None if calls do not constrain it.
    thinking : Thinking or None
        Thought before the answer; None if the model does not think, or `grammar` has the thought.
    allows_several : bool
        False if the answer has one call at most.
    """

    output_format: OutputFormat
    tools: tuple[ToolParameters, ...]
    prefix: str
    spelled: Mapping[int, bytes]
    grammar: str | None = None
    thinking: Thinking | None = None
    allows_several: bool = True

    def parser(self, seed: str, told_ids: Sequence[str] = ()) -> OutputParser:
        """Return a parser for a new answer; see `CallIds` for the ids of its calls."""
        return OutputParser(
            self.output_format,
            self.tools,
            prefix=self.prefix,
            call_ids=CallIds(seed, told_ids),
            allows_several=self.allows_several,
        )


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Text of a chat, in pieces from the template and from callers, and the format of its answer.

    Attributes
    ----------
    answer : AnswerFormat or None
        Format of the answer; None if the whole answer is content.
    """

    pieces: list[Piece]
    answer: AnswerFormat | None


class ChatTokenizer:
    """Renders and tokenizes chats for one model.

    Parameters
    ----------
    vocabulary : ChatVocabulary
    template, tool_template : str or None
        Chat template of the model, and its separate template for chats with tools; None if it has none.
    """

    def __init__(
        self, vocabulary: ChatVocabulary, template: str | None, tool_template: str | None
    ) -> None:
        self._vocabulary = vocabulary
        self._child = template_child()
        self.close: Callable[[], None] = self._child.close  # any thread; a running `render` fails
        self._source = template
        self._tool_source = tool_template

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        """Return the text of a chat, and the format of its answer.

        Raises
        ------
        InvalidRequestError
            The model has no template, the template rejects the chat, or it does not support an option.
        ClosedError
            The tokenizer was closed.
        """
        own = self._for_tools if prompt.tools and self._tool_source else self._plain
        return own.render(prompt)

    @property
    def abilities(self) -> TemplateAbilities:
        """Return the abilities of the template for tools if the model has one, else of its chat template."""
        return (self._for_tools if self._tool_source else self._plain).abilities

    @property
    def output_format(self) -> OutputFormat:
        """Return the output format that is detected from the same template as `abilities`."""
        return (self._for_tools if self._tool_source else self._plain).output_format

    def tokenize(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the tokens of pieces, with a beginning-of-sequence token if the model wants one."""
        vocabulary, tokens = self._vocabulary, tokens_of(pieces, self._vocabulary)
        if vocabulary.adds_bos and vocabulary.bos is not None and tokens[:1] != [vocabulary.bos]:
            tokens.insert(0, vocabulary.bos)
        return tokens

    def tokenize_inside(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the tokens of pieces behind an image."""
        vocabulary, tokens = self._vocabulary, list[int]()
        for piece in pieces:
            tokens += vocabulary.tokenize_inside(piece.text, parse_special=piece.is_template)
        return tokens

    @cached_property
    def _plain(self) -> _KnownTemplate:
        if self._source is None:
            raise InvalidRequestError("messages", "a chat", "a prompt: the model has no template")
        return self._compile(self._source)

    @cached_property
    def _for_tools(self) -> _KnownTemplate:
        assert self._tool_source is not None
        return self._compile(self._tool_source)

    @cached_property
    def _control_names(self) -> list[str]:
        return self._vocabulary.control_names()

    def _compile(self, source: str) -> _KnownTemplate:
        vocabulary = self._vocabulary
        template = ChatTemplate(
            source,
            bos_token="" if vocabulary.bos is None else vocabulary.text(vocabulary.bos),
            eos_token="" if vocabulary.eos is None else vocabulary.text(vocabulary.eos),
            control_names=self._control_names,
            child=self._child,
        )
        return _KnownTemplate(source, template, self._spelled, self._marker_tokens)

    def _marker_tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._vocabulary.tokenize_inside(text, parse_special=True))

    def _spelled(self, output_format: OutputFormat) -> dict[int, bytes]:
        """Return the names of the control tokens that occur in the format's markers, by their ids."""
        markers = "\n".join(output_format.markers)
        found: dict[int, bytes] = {}
        for name in self._control_names:
            if name and name in markers:
                tokens = self._vocabulary.tokenize(name, add_special=False, parse_special=True)
                if len(tokens) == 1:
                    found[tokens[0]] = name.encode()
        return found


class _KnownTemplate:
    """Chat template, and its properties, which are found by rendering test messages once."""

    def __init__(
        self,
        source: str,
        template: ChatTemplate,
        spelled: Callable[[OutputFormat], dict[int, bytes]],
        tokenize: Callable[[str], tuple[int, ...]],
    ) -> None:
        self._tokenize = tokenize
        self._source = source
        self._template = template
        self._find_spelled = spelled
        self._n_limits = 0

    @cached_property
    def output_format(self) -> OutputFormat:
        return detect_format(self._source, self._probe)

    @cached_property
    def abilities(self) -> TemplateAbilities:
        found = self.output_format
        thinking = found.reasoning is not None or found.turn is not None
        return find_abilities(self._source, self._probe, thinking=thinking)

    def _probe(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **template_kwargs: object,
    ) -> str:
        with self._limited():
            pieces = self._pieces(messages, tools, add_generation_prompt, template_kwargs)
        return "".join(piece.text for piece in pieces)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Let the first `N_LIMITS` test messages that need too much fail the request; later ones count as rejected."""
        try:
            yield
        except TemplateLimitError as error:
            self._n_limits += 1
            if self._n_limits <= N_LIMITS:
                raise
            raise InvalidRequestError(error.field, error.value, error.limit) from None

    def _pieces(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object],
    ) -> list[Piece]:
        """Render messages, with the variables that the template expects."""
        if self._needs == "functions":
            listed = json.dumps(tools or [], indent=4, ensure_ascii=False)
            today = datetime.now().strftime("%b %d %Y")
            template_kwargs = {"functions": listed, "datetime": today, **template_kwargs}
        if self._needs:
            tools = tools or []
        return self._template.render_checked(
            messages, tools, add_generation_prompt, template_kwargs
        )

    @cached_property
    def _needs(self) -> str:
        """Return the variable that the template requires: "tools" or "functions"; "" if neither.

        llama.cpp's jinja treats a missing variable as an empty list; jinja2 fails.
        """
        ways: dict[str, tuple[list[dict[str, Any]] | None, dict[str, object]]] = {
            "": (None, {}),
            "tools": ([], {}),
            "functions": ([], {"functions": "[]", "datetime": ""}),
        }
        for name, (tools, kwargs) in ways.items():
            render = partial(self._template.render_checked, [QUESTION], tools, True, kwargs)
            if unless_rejected(render) is not None:
                return name
        return ""

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        kwargs = {**self._effort(prompt.reasoning_effort), **prompt.template_kwargs}
        tools = mended_tools(prompt.tools)
        messages = mended(prompt.messages, tools, self.abilities, self.output_format.calls)
        sentinel = ""
        if prompt.continue_final_message:
            sentinel = _unused(self._source, messages, tools, kwargs)
            messages[-1] = _marked_end(with_reasoning(messages[-1]), sentinel)
        begins_answer = prompt.add_generation_prompt and not sentinel
        try:
            pieces = self._pieces(messages, tools, begins_answer, kwargs)
        except InvalidRequestError as error:
            if not tools or isinstance(error, TemplateLimitError):
                raise
            try:
                pieces = self._pieces(messages, plain_tools(tools), begins_answer, kwargs)
            except InvalidRequestError:
                raise error from None
        if sentinel:
            pieces = _cut_at(pieces, sentinel)
        text = "".join(piece.text for piece in pieces)
        return RenderedChat(pieces, self._answer(prompt, text))

    def _effort(self, effort: str | None) -> dict[str, object]:
        """Return the template's variables for an effort; `InvalidRequestError` if the template uses none."""
        if effort is None:
            return {}
        abilities = self.abilities
        if not (abilities.thinking_switch or abilities.reasoning_effort):
            if effort == "none" and not abilities.thinking:
                return {}
            limit = "left out: the chat template does not use it"
            raise InvalidRequestError("reasoning_effort", effort, limit)
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}

    def _answer(self, prompt: ChatPrompt, text: str) -> AnswerFormat | None:
        found = self.output_format
        if found.turn is None:
            calls = (found.calls or DEFAULT_CALLS) if prompt.tools else None
            found = replace(found, calls=calls)
        if prompt.reasoning_budget is not None and found.thought is None:
            limit = "left out: the chat template does not support thinking"
            raise InvalidRequestError("reasoning_budget", prompt.reasoning_budget, limit)
        if not found.markers:
            return None
        prefix = found.opening(text)
        if prompt.continue_final_message and found.turn is None and found.reasoning:
            continues_thought = _ends_in_thought(with_reasoning(prompt.messages[-1]))
            prefix = found.reasoning[0] if continues_thought else ""
            if not (continues_thought or found.reasoning[0]):
                found = replace(found, reasoning=None)  # reasoning would begin without a marker
        return AnswerFormat(
            found,
            tuple(parameters_of(prompt.tools or ())),
            prefix,
            self._spelled,
            grammar := self._grammar(prompt, found),
            self._thinking(prompt, found, prefix, has_grammar=grammar is not None),
            prompt.parallel_tool_calls,
        )

    def _grammar(self, prompt: ChatPrompt, found: OutputFormat) -> str | None:
        """Return the grammar of the answer if its calls are required or constrained; None otherwise."""
        tools, choice = parameters_of(prompt.tools or ()), prompt.tool_choice
        several = prompt.parallel_tool_calls
        if choice not in TOOL_CHOICES:
            tools, several = [tool for tool in tools if tool.name == choice], False
        is_strict = any(tool.is_strict for tool in tools)
        if not tools or (choice == "auto" and not is_strict and prompt.json_schema is None):
            return None
        grammar: CallGrammar | RoutedCallGrammar
        if found.turn is not None:
            grammar = RoutedCallGrammar(
                found.turn, tools, several, self._spelled, prompt.continue_final_message
            )
        else:
            assert found.calls is not None
            grammar = CallGrammar(found.calls, tools, several, self._spelled)
        try:
            if choice != "auto":
                written = grammar.required()
            elif prompt.json_schema is None:
                written = grammar.strict()
            else:
                written = grammar.or_else(prompt.json_schema)
        except RecursionError:
            names = [tool.name for tool in tools]
            raise InvalidRequestError("tools", names, "schemas with less nesting") from None
        for tool in tools:
            say_ignored(tool.field, tool.document.ignored)
        return written

    def _thinking(
        self, prompt: ChatPrompt, found: OutputFormat, prefix: str, *, has_grammar: bool
    ) -> Thinking | None:
        is_inside = found.turn is not None and has_grammar  # the grammar has the thought in it
        if is_inside and prompt.reasoning_budget is not None:
            limit = "left out: calls of this model are constrained together with its thought"
            raise InvalidRequestError("reasoning_budget", prompt.reasoning_budget, limit)
        if (thought := found.thought) is None or is_inside:
            return None
        start, ends, written = thought
        return Thinking(
            start=start.encode(),
            ends=tuple(end.encode() for end in ends),
            is_open=bool(prefix) if found.turn is None else True,
            budget=prompt.reasoning_budget,
            ending=self._tokenize(written),
        )

    @cached_property
    def _spelled(self) -> dict[int, bytes]:
        return self._find_spelled(self.output_format)


def _unused(*values: object) -> str:
    """Return a character of `SENTINELS` that no value contains; `InvalidRequestError` if all are used."""
    said = repr(values)
    for sentinel in SENTINELS:
        if sentinel not in said and ascii(sentinel)[1:-1] not in said:
            return sentinel
    raise InvalidRequestError("messages", "private-use characters", "text without them")


def _marked_end(message: dict[str, Any], sentinel: str) -> dict[str, Any]:
    """Return the message with a mark after the text that the answer continues."""
    if _ends_in_thought(message):
        thought = message["reasoning_content"] + sentinel
        return {**message, "reasoning_content": thought, "thinking": thought}
    return {**message, "content": message["content"] + sentinel}


def _ends_in_thought(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) and not message.get("content")


def _cut_at(pieces: list[Piece], sentinel: str) -> list[Piece]:
    kept: list[Piece] = []
    for piece in pieces:
        before, found, _ = piece.text.partition(sentinel)
        kept.append(Piece(before, piece.is_template))
        if found:
            return [piece for piece in kept if piece.text]
    limit = "left out: the chat template does not show the end of that message"
    raise InvalidRequestError("continue_final_message", True, limit)
