"""An overflow is known as one by each client, which then compacts its history by itself."""

from __future__ import annotations

from typing import Any

import pytest

for module in ("anthropic", "langchain_anthropic", "langchain_openai", "litellm", "openai"):
    pytest.importorskip(
        module, reason="the clients are in an environment of their own: make test-clients"
    )

import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

LONG = "x " * 20_000  # more than the 16,384 tokens of the server
ASK: Any = {"role": "user", "content": LONG}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchains_openai_knows_an_overflow(
    uses_responses: bool, is_streamed: bool, base_url: str
) -> None:
    chat = ChatOpenAI(
        model="m", base_url=f"{base_url}/v1", api_key="none", max_retries=0,  # type: ignore[arg-type]
        use_responses_api=uses_responses,
    )  # fmt: skip
    if uses_responses and is_streamed:
        # The event that Codex needs: langchain tells of it as an error with the code.
        with pytest.raises(ValueError, match="context_length_exceeded"):
            list(chat.stream(LONG))
        return
    with pytest.raises(ContextOverflowError):
        list(chat.stream(LONG)) if is_streamed else chat.invoke(LONG)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_langchains_anthropic_knows_an_overflow(is_streamed: bool, base_url: str) -> None:
    ways: Any = {"model": "m", "base_url": base_url, "api_key": "none", "max_retries": 0}
    chat = ChatAnthropic(**ways)
    with pytest.raises(ContextOverflowError):
        list(chat.stream(LONG)) if is_streamed else chat.invoke(LONG)


def test_litellm_knows_an_overflow(base_url: str) -> None:
    for model, base in (("openai/m", f"{base_url}/v1"), ("anthropic/m", base_url)):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                model=model, api_base=base, api_key="none", messages=[ASK], max_tokens=9
            )


def test_openai_and_anthropic_have_its_code_and_its_numbers(base_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai.OpenAI(base_url=f"{base_url}/v1", api_key="none").chat.completions.create(
            model="m", messages=[ASK]
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 16384 maximum"
    ):
        anthropic.Anthropic(base_url=base_url, api_key="none").messages.create(
            model="m", messages=[ASK], max_tokens=9
        )
