"""AsyncClient: what `Engine` does, by one server or by several."""

from __future__ import annotations

import base64
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self, Unpack

import httpx
import numpy as np
from numpy.typing import NDArray

from cllm.checks import MAX_SEED
from cllm.client.answer_stream import MAX_MOVES, AnswerStream
from cllm.client.refusals import ServerError
from cllm.client.replicas import Replicas
from cllm.engine.loop.request_call import (
    ChatOptions,
    ChatPromptOptions,
    Prompt,
    call_of,
    chat_prompt_of,
)
from cllm.engine.request import Completion
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import InvalidArgumentError, InvalidRequestError
from cllm.routing.prefix_table import keys_of, prompt_bytes

HEADER_VALUE = re.compile(r"[!-~]([ -~]{0,1022}[!-~])?")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # what a server takes as `X-Request-ID`


class AsyncClient:
    """Requests to servers of one model, with the methods of `Engine`.

    Use it with `async with`.  All methods belong to the event loop (asyncio or trio) in which it was
    entered.

    Parameters
    ----------
    base_url : str or sequence of str
        `http://host:port` of a server, of several, or of what distributes requests to them.  Of several,
        a request goes to the one that has had the longest beginning of its prompt.
    api_key : str, optional
    session_id : str, optional
        The requests of one session go to one server, which has computed their beginnings; whatever
        distributes requests is told of it too (`x-session-id`).
    model : str, optional
        Of a server of several models, which one; or one of its LoRA adapters.
    patience_s : float
        For so long no server may answer, before that is a `ServerError`.

    Raises
    ------
    InvalidArgumentError
        `base_url` is no address, or a header cannot have the key or the session.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        api_key: str | None = None,
        *,
        session_id: str | None = None,
        model: str | None = None,
        patience_s: float = 30.0,
    ) -> None:
        headers = {}
        if api_key is not None:
            headers["authorization"] = f"Bearer {_header_of('api_key', api_key)}"
        if session_id is not None:
            headers["x-session-id"] = _header_of("session_id", session_id)
        self._session = [] if session_id is None else [session_id.encode("utf-8", "replace")]
        urls = [base_url] if isinstance(base_url, str) else _several(base_url)
        self._replicas = Replicas(urls, headers, patience_s=patience_s)
        self._model = {} if model is None else {"model": model}

    async def __aenter__(self) -> Self:
        """Nothing is asked yet."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections: what runs is cancelled."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._replicas.aclose()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        generated: Sequence[int] = (),
        lora: Mapping[str, float] | None = None,
        parse_special: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """The output of one request, token by token; arguments as for `Engine.stream`.

        `prompt_logprobs` cannot be had: they are no part of a stream over HTTP.  What is drawn has a seed, so that a stream that goes on elsewhere draws the same.

        Raises
        ------
        InvalidRequestError
            Names the field, the value and the limit.  What needs the model is raised when the stream is
            entered.
        """
        call = call_of(
            prompt,
            params,
            sampling,
            priority,
            timeout,
            request_id,
            generated,
            lora,
            parse_special=parse_special,
        )
        assert isinstance(call.prompt, str | tuple)
        # Always sent: a server's own default is llama-server's, and not an engine's.
        said = {"prompt": call.prompt, "parse_special": parse_special}
        body = {**said, **_sampling_of(params, sampling)}
        return self._stream(body, call.request_id, priority, timeout, call.generated, lora)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        generated: Sequence[int] = (),
        lora: Mapping[str, float] | None = None,
        parse_special: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The whole output of one request; arguments as for `stream`.

        Raises
        ------
        RequestError
            The request cannot be served; a `GenerationError` carries the partial completion.
        ServerError
            No server answers.
        """
        async with self.stream(
            prompt,
            params,
            priority=priority,
            timeout=timeout,
            request_id=request_id,
            generated=generated,
            lora=lora,
            parse_special=parse_special,
            **sampling,
        ) as stream:
            return await stream.completion()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        generated: Sequence[int] = (),
        lora: Mapping[str, float] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AnswerStream:
        """The answer to a chat, token by token; arguments as for `Engine.stream_chat`."""
        chat = {name: options[name] for name in _CHAT_OPTIONS & options.keys()}  # type: ignore[literal-required]
        prompt, sampling = chat_prompt_of(messages, options)
        call = call_of(prompt, params, sampling, priority, timeout, request_id, generated, lora)
        body = {"messages": [*map(dict, messages)], **chat, **_sampling_of(params, sampling)}
        return self._stream(body, call.request_id, priority, timeout, call.generated, lora)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        generated: Sequence[int] = (),
        lora: Mapping[str, float] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """The whole answer to a chat; arguments as for `stream_chat`, errors as for `generate`."""
        async with self.stream_chat(
            messages,
            params,
            priority=priority,
            timeout=timeout,
            request_id=request_id,
            generated=generated,
            lora=lora,
            **options,
        ) as stream:
            return await stream.completion()

    async def embed(
        self,
        texts: Sequence[Prompt],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        truncate: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """The vectors of texts, float32 `(n, d)`; arguments as for `Engine.embed`.

        Raises
        ------
        RequestError
            The texts cannot be served.
        ServerError
            No server answers.
        """
        body = {
            **self._model,
            "input": [text if isinstance(text, str) else [*text] for text in texts],
            "encoding_format": "base64",
            "normalize": normalize,
            "dimensions": dimensions,
            "truncate": truncate,
            "priority": priority,
            "timeout": timeout,
        }
        url: str | None = None
        for _ in range(MAX_MOVES + 1):
            url, response = await self._replicas.post("/v1/embeddings", body, but=url)
            try:
                await response.aread()
                break
            except httpx.TransportError as error:  # its server has ended: another
                failure = error
            finally:
                await self._replicas.close(url, response)
        else:
            raise ServerError(f"cut off {MAX_MOVES + 1} times, at last: {failure!r}")
        try:
            rows = [base64.b64decode(row["embedding"]) for row in response.json()["data"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{url} does not answer as cllm does: {error!r}") from None
        return np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1)

    def _stream(
        self,
        body: Mapping[str, Any],
        request_id: str,
        priority: int,
        timeout: float | None,
        generated: Sequence[int],
        lora: Mapping[str, float] | None,
    ) -> AnswerStream:
        if not REQUEST_ID.fullmatch(request_id):
            limit = "1 to 128 letters, digits, '.', '_', ':' and '-'"
            raise InvalidRequestError("request_id", request_id, limit)
        body = {**self._model, **body, "priority": priority}
        if lora is not None:
            body["lora"] = dict(lora)
        return AnswerStream(
            self._replicas,
            body,
            request_id=request_id,
            generated=generated,
            timeout=timeout,
            keys=self._session or keys_of(prompt_bytes(body)),
        )


def _header_of(field: str, value: str) -> str:
    """A value that a header can have."""
    if not isinstance(value, str) or not HEADER_VALUE.fullmatch(value):
        raise InvalidArgumentError(field, value, "1 to 1024 letters, digits and signs of ASCII")
    return value


def _several(urls: Sequence[str]) -> list[str]:
    if not isinstance(urls, Sequence):
        raise InvalidArgumentError("base_url", urls, "an address, or several")
    return list(urls)


_CHAT_OPTIONS = ChatPromptOptions.__annotations__.keys()


def _sampling_of(params: SamplingParams | None, sampling: SamplingOptions) -> dict[str, Any]:
    """The sampling fields of a body: what is not given, the model may say."""
    given: dict[str, Any] = dict(sampling)
    if params is not None:
        given = {field.name: getattr(params, field.name) for field in fields(params)}
    if given.get("seed") is None and given.get("temperature") != 0.0:
        given["seed"] = secrets.randbelow(MAX_SEED + 1)
    given["logit_bias"] = {
        str(token): False if bias == -math.inf else bias
        for token, bias in dict(given.get("logit_bias") or {}).items()
    } or None
    return {name: value for name, value in given.items() if value is not None}
