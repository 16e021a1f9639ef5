"""Chat: messages to the tokens of a prompt, by the model's own template.

What callers say stays text: a control token that they spell out is tokenized as its letters.
Tokenizer's thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cllm.checks import check_bool
from cllm.engine.chat.chat_template import ChatTemplate, template_child
from cllm.engine.chat.control_tokens import Piece
from cllm.engine.chat.messages import check_messages, check_tools
from cllm.engine.vocabulary import ChatVocabulary
from cllm.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, and how to render them.

    Attributes
    ----------
    tools : sequence of mapping, optional
        In the template's context; calling them is the caller's.
    add_generation_prompt : bool
        End with the beginning of an answer.
    template_kwargs : mapping
        More of the template's variables.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    template_kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        messages: object,
        tools: object,
        add_generation_prompt: object,
        template_kwargs: Mapping[str, Any] | None,
    ) -> ChatPrompt:
        """Checked, and copied so that nobody changes it any more.

        Raises
        ------
        InvalidRequestError
            Names the message and the field.
        """
        if not isinstance(template_kwargs, Mapping | None):
            raise InvalidRequestError("chat_template_kwargs", template_kwargs, "a mapping")
        return cls(
            check_messages(messages),
            check_tools(tools),
            check_bool("add_generation_prompt", add_generation_prompt, InvalidRequestError),
            dict(template_kwargs or {}),
        )


class ChatTokenizer:
    """Renders and tokenizes chats for one model.

    Parameters
    ----------
    vocabulary : ChatVocabulary
    template, tool_template : str or None
        The model's own, and the one that it has for chats with tools, if it has another.
    """

    def __init__(
        self, vocabulary: ChatVocabulary, template: str | None, tool_template: str | None
    ) -> None:
        self._vocabulary = vocabulary
        self._child = template_child()
        self.close = self._child.close  # any thread: ends what is rendered
        self._source = template
        self._tool_source = tool_template

    def render(self, prompt: ChatPrompt) -> list[Piece]:
        """The text of a chat, in pieces that differ in who wrote them."""
        is_tool_chat = prompt.tools is not None and self._tool_source is not None
        template = self._tool_template if is_tool_chat else self._template
        return template.render(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            template_kwargs=prompt.template_kwargs,
        )

    def tokenize(self, pieces: Sequence[Piece]) -> list[int]:
        """Their tokens, from the beginning-of-sequence token on if the model wants it."""
        vocabulary, tokens = self._vocabulary, list[int]()
        for piece in pieces:
            tokens += self._tokenize(piece.text, piece.is_template, is_first=not tokens)
        if vocabulary.adds_bos and vocabulary.bos is not None and tokens[:1] != [vocabulary.bos]:
            tokens.insert(0, vocabulary.bos)
        return tokens

    def _tokenize(self, text: str, parse_special: bool, *, is_first: bool) -> list[int]:
        if is_first:
            return self._vocabulary.tokenize(text, add_special=False, parse_special=parse_special)
        return self._vocabulary.tokenize_inside(text, parse_special=parse_special)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._source is None:
            raise InvalidRequestError("messages", "a chat", "a prompt: the model has no template")
        return self._compile(self._source)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        assert self._tool_source is not None
        return self._compile(self._tool_source)

    def _compile(self, source: str) -> ChatTemplate:
        vocabulary = self._vocabulary
        return ChatTemplate(
            source,
            bos_token="" if vocabulary.bos is None else vocabulary.text(vocabulary.bos),
            eos_token="" if vocabulary.eos is None else vocabulary.text(vocabulary.eos),
            control_names=vocabulary.control_names(),
            child=self._child,
        )
