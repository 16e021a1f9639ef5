"""RankPrompt: the tokens of a query and a document for a reranker, by a template."""

from __future__ import annotations

import re
from functools import cached_property

from cllm.engine.chat.control_tokens import ControlTokens, tokens_of
from cllm.engine.vocabulary import RankVocabulary
from cllm.errors import InvalidRequestError

# Name of the template among the chat templates of a model's file.
RANK_TEMPLATE = "rerank"
# Template that Qwen3-Reranker was trained with; older files of the model do not have one.
QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PLACES = re.compile(r"\{(query|document)\}")


class RankPrompt:
    """Template with `{query}` and `{document}`; names of control tokens in these two stay text.

    Parameters
    ----------
    template : str

    Raises
    ------
    InvalidRequestError
        The template lacks `{query}` or `{document}`.
    """

    def __init__(self, template: str, vocabulary: RankVocabulary) -> None:
        if set(PLACES.findall(template)) != {"query", "document"}:
            limit = "a text with {query} and {document} in it"
            raise InvalidRequestError("template", template[:60], limit)
        self._template = template
        self._vocabulary = vocabulary

    @cached_property
    def _names(self) -> ControlTokens:
        return ControlTokens(self._vocabulary.control_names())

    def tokens(self, query: str, document: str, n_most: int | None = None) -> list[int]:
        """Return the tokens of a query with a document.

        Parameters
        ----------
        n_most : int, optional
            Limit for the tokens: the end of the document is left out.  The result may still
            be longer if the query alone is too long.

        Raises
        ------
        InvalidRequestError
            The texts leave no private-use character to mark the names of control tokens with.
        """
        tokens = self._of(query, document)
        if n_most is None or len(tokens) <= n_most:
            return tokens
        vocabulary = self._vocabulary
        own = vocabulary.tokenize_inside(document)
        # The shortened text may have one or two tokens more than expected.
        while len(tokens) > n_most and own:
            del own[max(0, len(own) - (len(tokens) - n_most)) :]
            tokens = self._of(query, vocabulary.join(own).decode("utf-8", "ignore"))
        return tokens

    def _of(self, query: str, document: str) -> list[int]:
        given = {"query": query, "document": document}
        guard = self._names.guard(given, self._template)
        marked = guard.marked(given)
        text = PLACES.sub(lambda place: marked[place[1]], self._template)
        return tokens_of(guard.pieces(text), self._vocabulary)
