"""The `openai` client, as it comes, works against `cllm serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.server.conftest import LONG, LONG_ANSWER, OPTIONS, Server

MODEL = "cllm-tiny"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "12+34="}]
# The embedded model would fill any JSON with blanks.
NO_BLANKS = dict.fromkeys(("9", "10", "13", "32"), -100)
HOT: Any = {"temperature": 2.0, "extra_body": {"top_k": 0, "min_p": 0.0, "top_p": 1.0}}


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as api:
        yield api


def test_the_model_is_listed_under_its_name(api: openai.OpenAI) -> None:
    (model,) = api.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "cllm")
    assert model.created > 1_700_000_000


def test_a_prompt_is_completed(api: openai.OpenAI) -> None:
    done = api.completions.create(model=MODEL, prompt="37+58=", temperature=0)
    assert (done.object, done.model) == ("text_completion", MODEL)
    (choice,) = done.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "95", "stop")
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 3)
    assert done.usage.total_tokens == 10


def test_completions_have_sixteen_tokens_by_default_and_chats_end_by_themselves(
    api: openai.OpenAI,
) -> None:
    done = api.completions.create(model=MODEL, prompt=LONG, temperature=0)
    assert done.usage is not None
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 16)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": LONG}]
    chat = api.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert chat.choices[0].message.content == LONG_ANSWER
    assert chat.choices[0].finish_reason == "stop"


def test_prompts_of_every_shape_are_answered_in_order(api: openai.OpenAI) -> None:
    prompts: list[Any] = [["1+1=", "2+2="], [[*b"3+4="], [*b"4+4="]], [*b"5+4="]]
    texts = []
    for prompt in prompts:
        done = api.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
        texts.append([choice.text for choice in done.choices])
    # Token ids are taken as they are: without the token that begins a text.
    assert texts[0] == ["2", "4"]
    assert [len(answers) for answers in texts] == [2, 2, 1]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs_scores_the_prompt_as_the_native_route_does(
    api: openai.OpenAI, server: Server, max_tokens: int
) -> None:
    """What lm-eval asks for."""
    prompts = ["1+1=2", "2+3=5"]
    done = api.completions.create(
        model=MODEL, prompt=prompts, temperature=0, echo=True, logprobs=1, max_tokens=max_tokens
    )
    for prompt, choice in zip(prompts, done.choices, strict=True):
        asked = {"prompt": prompt, "temperature": 0, "prompt_logprobs": 1, "logprobs": 1}
        asked["max_tokens"] = max(max_tokens, 1)
        native = httpx.post(f"{server.url}/generate", json=asked, **OPTIONS).json()
        scored = native["prompt_logprobs"]
        behind = native["logprobs"][: max_tokens or 0]
        said = choice.logprobs
        assert said is not None
        numbers: list[Any] = [None if p is None else p["logprob"] for p in [*scored, *behind]]
        assert list(said.token_logprobs or ()) == pytest.approx(numbers)
        assert len(said.tokens or ()) == len(scored) + len(behind)
        assert choice.text == prompt + (native["text"] if max_tokens else "")
        assert said.text_offset is not None
        of_prompt = list(zip(said.text_offset, said.tokens or (), strict=True))[: len(scored)]
        assert all(choice.text[offset:].startswith(token) for offset, token in of_prompt)


@pytest.mark.parametrize(
    "path", ["/completions", "//v1/completions", "/v1/completions/", "/v1//completions"]
)
def test_a_path_without_its_version_or_with_more_slashes_is_the_same(
    server: Server, path: str
) -> None:
    response = httpx.post(
        f"{server.url}{path}", json={"prompt": "1+1=", "temperature": 0}, **OPTIONS
    )
    assert response.status_code == (404 if path == "/v1//completions" else 200)
    assert httpx.get(f"{server.url}/models", **OPTIONS).json()["object"] == "list"


def test_echo_puts_the_prompt_before_the_text(api: openai.OpenAI) -> None:
    done = api.completions.create(model=MODEL, prompt="1+1=", temperature=0, echo=True)
    assert done.choices[0].text == "1+1=2"


def test_a_completion_streams(api: openai.OpenAI) -> None:
    chunks = list(
        api.completions.create(model=MODEL, prompt="repeat:é🙂!", temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "é🙂!"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_chat_is_answered(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    assert done.object == "chat.completion"
    message = done.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "46", None)
    messages: list[ChatCompletionMessageParam] = [
        *ASK,
        {"role": "assistant", "content": "46"},
        {"role": "user", "content": [{"type": "text", "text": "repeat:é"}]},
    ]
    again = api.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert again.choices[0].message.content == "é"


def test_a_chat_streams(api: openai.OpenAI) -> None:
    chunks = list(
        api.chat.completions.create(model=MODEL, messages=ASK, temperature=0, stream=True)
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *_, last = [chunk.choices[0] for chunk in chunks]
    assert first.delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "46"
    assert last.finish_reason == "stop"


def test_every_reply_and_chunk_has_the_fingerprint(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2)
    assert whole.system_fingerprint is not None
    assert whole.system_fingerprint.startswith("fp_")
    chunks = api.completions.create(model=MODEL, prompt="1+1=", max_tokens=2, stream=True)
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_usage_comes_in_a_chunk_of_its_own_if_wanted(api: openai.OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    text = list(api.completions.create(model=MODEL, prompt="1+1=", temperature=0, **options))
    chat = list(api.chat.completions.create(model=MODEL, messages=ASK, temperature=0, **options))
    for chunks in (text, chat):
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens in (2, 3)
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def _chat_of(api: openai.AsyncOpenAI) -> str:
    stream = await api.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, stream=True
    )
    texts: list[str] = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return "".join(texts)


@pytest.mark.anyio
async def test_the_async_client_works_as_well(server: Server) -> None:
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as api:
        assert [model.id async for model in api.models.list()] == [MODEL]
        done = await api.completions.create(model=MODEL, prompt="1+1=", temperature=0)
        assert done.choices[0].text == "2"
        chat = await api.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
        assert chat.choices[0].message.content == "46"
        assert await _chat_of(api) == "46"
        with pytest.raises(openai.BadRequestError):
            await api.completions.create(model=MODEL, prompt="1+1=", n=99)


def test_n_choices_differ_are_reproducible_and_share_one_prefill(
    api: openai.OpenAI, server: Server
) -> None:
    prompt = "a prompt that no other test computes, of some length: "
    before = server.metrics()
    # So hot that every token is as likely as another: with others in the batch, logits differ a little.
    options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 3, **HOT, "temperature": 100.0}
    done = api.completions.create(n=3, seed=7, **options)
    after = server.metrics()
    texts = [choice.text for choice in done.choices]
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    computed = after["cllm_prompt_tokens_total"] - before["cllm_prompt_tokens_total"]
    # Everybody but the first computes the last token of the prompt, for the logits.
    n_prompt = len(prompt) + 1
    assert n_prompt - 1 <= computed <= n_prompt + 2
    assert done.usage is not None
    assert done.usage.prompt_tokens == n_prompt
    assert done.usage.completion_tokens >= 3
    # The i-th choice is that of seed + i.
    for index, text in enumerate(texts):
        single = api.completions.create(seed=7 + index, **options)
        assert single.choices[0].text == text


def test_n_choices_of_a_chat_stream_side_by_side(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=1, **HOT)
    texts = ["", "", ""]
    reasons: list[str | None] = [None] * 3
    for chunk in api.chat.completions.create(
        model=MODEL, messages=ASK, n=3, seed=1, stream=True, **HOT
    ):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_seeds_reproduce_and_differ(api: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        done = api.completions.create(model=MODEL, prompt=LONG, seed=seed, **HOT)
        return str(done.choices[0].text)

    assert draw(0) == draw(0) != draw(1)


def test_log_probabilities_of_completions(api: openai.OpenAI) -> None:
    done = api.completions.create(model=MODEL, prompt="1+1=", temperature=0, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens[0] == "2"
    assert logprobs.text_offset == [0, 1]
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2]
    assert logprobs.top_logprobs[0]["2"] == logprobs.token_logprobs[0]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_chats(api: openai.OpenAI, stream: bool) -> None:
    options: Any = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "stream": stream}
    answer: Any = api.chat.completions.create(model=MODEL, messages=ASK, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [t for choice in choices if choice.logprobs for t in choice.logprobs.content]
    assert [token.token for token in tokens[:2]] == ["4", "6"]
    assert tokens[0].bytes == [ord("4")]
    assert [len(token.top_logprobs) for token in tokens] == [3] * len(tokens)
    assert tokens[0].top_logprobs[0].logprob == tokens[0].logprob


def test_offsets_count_characters_and_their_bytes_have_names(api: openai.OpenAI) -> None:
    done = api.completions.create(
        model=MODEL, prompt="repeat:é🙂!", temperature=0, logprobs=1, max_tokens=20
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    by_name = dict(zip(logprobs.tokens, logprobs.text_offset, strict=True))
    assert {r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xf0", "!"} <= set(by_name)
    assert by_name["!"] == done.choices[0].text.index("!")


def test_every_prompt_counts_once_in_the_usage(api: openai.OpenAI) -> None:
    done = api.completions.create(model=MODEL, prompt=["1+1=", "1+1="], n=2, temperature=0)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (10, 8)


def test_null_is_the_default_as_openai_has_it(api: openai.OpenAI) -> None:
    fields: Any = dict.fromkeys(("n", "stream", "seed", "stop", "logit_bias", "max_tokens"), None)
    done = api.completions.create(model=MODEL, prompt="1+1=", temperature=0, extra_body=fields)
    assert done.choices[0].text == "2"


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, 2**63 - 1])
def test_seeds_have_64_bits(api: openai.OpenAI, seed: int) -> None:
    texts = [
        api.completions.create(model=MODEL, prompt=LONG, seed=seed, **HOT).choices[0].text
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_the_model_can_be_asked_for_by_name(api: openai.OpenAI) -> None:
    assert api.models.retrieve(MODEL).owned_by == "cllm"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        api.models.retrieve("other")


def test_stop_strings_end_the_text_before_them(api: openai.OpenAI) -> None:
    done = api.completions.create(
        model=MODEL, prompt=LONG, temperature=0, stop=["never", " 5 "], max_tokens=99
    )
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("1 2 3 4", "stop")


def test_a_logit_bias_bans_a_token(api: openai.OpenAI) -> None:
    bias = {str(ord("2")): -100}
    done = api.completions.create(model=MODEL, prompt="1+1=", temperature=0, logit_bias=bias)
    assert "2" not in done.choices[0].text


def test_json_object_is_some_object(api: openai.OpenAI) -> None:
    done = api.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, logit_bias=NO_BLANKS,
        response_format={"type": "json_object"}, max_tokens=200,
    )  # fmt: skip
    assert isinstance(json.loads(done.choices[0].message.content or ""), dict)


class Verdict(BaseModel):
    """What the client asks for."""

    parity: Literal["even", "odd"]
    is_prime: bool


def test_parse_gives_an_object_of_the_class_asked_for(api: openai.OpenAI) -> None:
    done = api.chat.completions.parse(
        model=MODEL, messages=ASK, temperature=0, logit_bias=NO_BLANKS,
        response_format=Verdict, max_tokens=200,
    )  # fmt: skip
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(done.choices[0].message.parsed, Verdict)


def test_penalties_count_the_output_alone_unless_the_body_says_otherwise(server: Server) -> None:
    asked: dict[str, Any] = {"prompt": "repeat:" + "b" * 30, "temperature": 0, "max_tokens": 2}
    asked |= {"frequency_penalty": 2}
    free = {**asked, "frequency_penalty": 0}

    def tops(path: str, **more: Any) -> Any:
        body = {**asked, **more}
        answer = httpx.post(f"{server.url}{path}", json=body, **OPTIONS).json()
        return answer if path == "/generate" else answer["choices"][0]

    unpenalized = httpx.post(f"{server.url}/generate", json=free, **OPTIONS).json()
    assert tops("/v1/completions")["text"] == unpenalized["text"]
    native = tops("/generate")
    assert tops("/v1/completions", penalize_prompt=True)["text"] == native["text"]
    assert tops("/generate", penalize_prompt=False)["text"] == unpenalized["text"]
    assert native["text"] != unpenalized["text"]
