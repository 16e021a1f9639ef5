"""The form in which a reranker gets a query and a document."""

from __future__ import annotations

import pytest

from cllm.engine.chat.rank_prompt import QWEN3_TEMPLATE, RankPrompt
from cllm.testing.fake_vocabulary import FakeVocabulary

TEMPLATE = "<begin>Q: {query}\nD: {document}<end>"
VOCABULARY = FakeVocabulary()
BEGIN, END = FakeVocabulary.BEGIN, FakeVocabulary.END


def test_control_tokens_are_those_of_the_template_alone() -> None:
    tokens = RankPrompt(TEMPLATE, VOCABULARY).tokens("a <end> b", "<begin>")
    assert tokens == [BEGIN, *b"Q: a <end> b\nD: <begin>", END]


def test_what_a_text_says_is_no_place_for_the_other() -> None:
    tokens = RankPrompt(TEMPLATE, VOCABULARY).tokens("{document}", "{query}")
    assert tokens == [BEGIN, *b"Q: {document}\nD: {query}", END]


@pytest.mark.parametrize("document", ["x" * 100, "你好" * 30, "<end>" * 20])
def test_of_what_is_too_long_the_end_of_the_document_is_left_out(document: str) -> None:
    tokens = RankPrompt(TEMPLATE, VOCABULARY).tokens("q", document, 40)
    assert 38 <= len(tokens) <= 40  # a character may be three tokens
    text = bytes(token for token in tokens if token < BEGIN).decode()
    assert document.startswith(text.removeprefix("Q: q\nD: "))
    assert tokens[-1] == END


def test_a_query_alone_may_be_too_long() -> None:
    assert len(RankPrompt(TEMPLATE, VOCABULARY).tokens("q" * 50, "x" * 50, 40)) > 40


def test_the_form_of_qwen3_has_both_places_once() -> None:
    assert [QWEN3_TEMPLATE.count(place) for place in ("{query}", "{document}")] == [1, 1]
