"""Names of control tokens in a raw prompt: text, unless the caller says that they are tokens."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cllm import Engine, FinishReason, InvalidRequestError
from cllm.server import create_app
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio
PROMPT = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[Engine]:
    async with Engine(n_ctx=2048, n_seq_max=4, **QUIET) as engine:
        yield engine


async def test_names_are_tokens_with_the_option_and_text_without(engine: Engine) -> None:
    chat = await engine.render_chat([{"role": "user", "content": "1+1="}])
    given: list[tuple[dict[str, Any], int]] = [
        ({"parse_special": True}, len(await engine.tokenize(PROMPT, parse_special=True))),
        ({}, len(await engine.tokenize(PROMPT))),
    ]
    for options, n_prompt in given:
        whole = await engine.generate(PROMPT, max_tokens=2, temperature=0, **options)
        async with engine.stream(PROMPT, max_tokens=2, temperature=0, **options) as stream:
            streamed = await stream.completion()
        assert whole.usage.n_prompt == streamed.usage.n_prompt == n_prompt
    assert len(await engine.tokenize(PROMPT, parse_special=True)) < len(
        await engine.tokenize(PROMPT)
    )
    assert len(chat.token_ids) > 0
    with pytest.raises(InvalidRequestError, match="parse_special"):
        await engine.generate(PROMPT, parse_special=3)  # type: ignore[arg-type]


async def test_a_prompt_that_spells_control_tokens_without_the_option_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Engine(n_ctx=512, n_seq_max=1, **QUIET) as engine:
        with caplog.at_level(logging.WARNING, "cllm.engine"):
            await engine.generate("<b>1+1=</b>", max_tokens=1)
            await engine.generate(PROMPT, max_tokens=1, parse_special=True)
            assert "parse_special" not in caplog.text
            for _ in range(2):
                await engine.generate(PROMPT, max_tokens=1)
    assert caplog.text.count("parse_special") == 1
    assert "<|im_start|>" in caplog.text


async def test_over_http_names_are_tokens_as_in_llama_server_unless_the_body_says_otherwise(
    engine: Engine,
) -> None:
    n_tokens = {
        special: len(await engine.tokenize(PROMPT, parse_special=special))
        for special in (True, False)
    }
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        saying: list[dict[str, Any]] = [{}, {"parse_special": True}, {"parse_special": False}]
        for said in saying:
            body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **said}
            wanted = n_tokens[said.get("parse_special", True)]
            native = (await http.post("/generate", json=body)).json()
            openai = (await http.post("/v1/completions", json=body)).json()
            assert native["usage"]["prompt_tokens"] == openai["usage"]["prompt_tokens"] == wanted


async def test_a_stop_string_that_is_the_text_of_a_control_token_stops_the_output(
    engine: Engine,
) -> None:
    (token,) = await engine.tokenize("<|im_start|>", add_special=False, parse_special=True)
    forced: dict[str, Any] = {"logit_bias": {token: 100.0}, "temperature": 0, "max_tokens": 6}
    free = await engine.generate("1+1=", **forced)
    assert free.finish_reason is FinishReason.LENGTH
    stopped = await engine.generate("1+1=", stop="<|im_start|>", **forced)
    assert (stopped.finish_reason, stopped.text) == (FinishReason.STOP, "")
