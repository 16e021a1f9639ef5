"""A query and a document as one text for a reranker, in the form that its file asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from cllm.engine.chat.control_tokens import ControlTokens, tokens_of
from cllm.engine.vocabulary import ChatVocabulary

# Its name among the chat templates of a model's file.
RANK_TEMPLATE = "rerank"
# As Qwen3-Reranker was trained; the older ones of its files do not say.
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PLACES = re.compile(r"\{(query|document)\}")


class RankPrompt:
    """A template with `{query}` and `{document}`; in those, the names of control tokens stay text.

    Parameters
    ----------
    template : str
    """

    def __init__(self, template: str, vocabulary: ChatVocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary

    @cached_property
    def _names(self) -> ControlTokens:
        return ControlTokens(self._vocabulary.control_names())

    def tokens(self, query: str, documents: Sequence[str]) -> list[list[int]]:
        """Of the query with each document.

        Raises
        ------
        InvalidRequestError
            A text that leaves no character which could keep it apart from control tokens.
        """
        return [self._of({"query": query, "document": document}) for document in documents]

    def _of(self, given: dict[str, str]) -> list[int]:
        guard = self._names.guard(given, self._template)
        marked = guard.marked(given)
        text = PLACES.sub(lambda place: marked[place[1]], self._template)
        return tokens_of(guard.pieces(text), self._vocabulary)
