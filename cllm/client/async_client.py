"""AsyncClient: client of one or several servers, with methods of `Engine`."""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx
import numpy as np
from numpy.typing import NDArray

from cllm.checks import (
    INT32_MAX,
    MAX_SEED,
    check_bool,
    check_int,
    check_several,
    check_tenant,
)
from cllm.client.answer_stream import GRACE_S, MAX_MOVES, AnswerStream
from cllm.client.events import LOWEST
from cllm.client.refusals import UNLIKE_CLLM, ServerError, unlike_cllm
from cllm.client.replicas import Replicas
from cllm.engine.audio import Audio
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.media_marks import MediaMarks
from cllm.engine.chat.message_checks import RESULTS
from cllm.engine.chat.readable import in_words
from cllm.engine.image import Image
from cllm.engine.loop.generates import Generates
from cllm.engine.loop.request_call import (
    MixedPrompt,
    Prompt,
    RequestCall,
    Urgency,
    check_prompt,
)
from cllm.engine.lora import check_lora
from cllm.engine.media_source import NamedMedia
from cllm.engine.request import Score
from cllm.errors import DeadlineError, InvalidArgumentError, InvalidRequestError, QueueFullError
from cllm.routing.prefix_table import Key, keys_of, prompt_bytes

HEADER_VALUE = re.compile(r"[!-~]([ -~]{0,1022}[!-~])?")
T = TypeVar("T")
N_AT_ONCE = 64  # requests of `generate_all`
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # what a server takes as `X-Request-ID`


class AsyncClient(Generates[AnswerStream]):
    """A client of one or several servers of one model, with methods of `Engine`.

    Use it with `async with`.  Call all methods in the event loop (asyncio or trio) in which the client was
    entered.  A request with `prompt_logprobs` raises `InvalidRequestError`: streams over HTTP have none.

    Parameters
    ----------
    base_url : str or sequence of str
        `http://host:port` of a server, of several servers, or of a load balancer.  With several, a request
        goes to the server that has computed the longest prefix of its prompt.  A server with over 8 requests
        of this client more than another one is passed over.
    api_key : str, optional
        Sent as `Authorization: Bearer`.
    session_id : str, optional
        Requests of one session go to one server, which has computed their prefixes.  A load balancer gets
        the id as `x-session-id`.
    model : str, optional
        Name of a model, on a server of several; or of a LoRA adapter.
    patience_s : float
        Seconds of retries, default 30, if servers cannot be reached or answer 502, 503 or 504; then
        `ServerError` is raised.  A server that was reached has no time limit but `timeout`.

    Raises
    ------
    InvalidArgumentError
        `base_url` is no address, or `api_key` or `session_id` cannot be the value of a header.
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
        """Return the client; no request is sent yet."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all connections, which cancels running requests."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._replicas.aclose()

    def _open(self, call: RequestCall) -> AnswerStream:
        """Return the stream of a request.

        A server rejects `prompt_logprobs`, which a stream does not send.  A request that samples gets a seed,
        so that another server continues it with the same random numbers.
        """
        if not REQUEST_ID.fullmatch(call.request_id):
            limit = "1 to 128 letters, digits, '.', '_', ':' and '-'"
            raise InvalidRequestError("request_id", call.request_id, limit)
        has_media = isinstance(call.prompt, MixedPrompt) or (
            isinstance(call.prompt, ChatPrompt) and call.prompt.marks is not None
        )
        prompt = {} if has_media else _prompt_of(call)
        body = {**self._model, **prompt, **_sampling_of(call), "priority": call.priority}
        if call.lora is not None:
            body["lora"] = dict(call.lora)
        if call.tenant:
            body["tenant"] = call.tenant
        return AnswerStream(
            self._replicas,
            body,
            request_id=call.request_id,
            generated=call.generated,
            timeout=call.timeout,
            keys=() if has_media else self._session or keys_of(prompt_bytes(body)),
            complete=partial(self._prompt_and_keys, call) if has_media else None,
        )

    def _prompt_and_keys(self, call: RequestCall) -> tuple[dict[str, Any], Sequence[Key]]:
        """Return the fields of a body with the prompt, and its keys.  Worker thread: it reads files."""
        prompt = _prompt_of(call)
        return prompt, self._session or keys_of(prompt_bytes(prompt))

    @property
    def _n_at_once(self) -> int:
        return N_AT_ONCE

    async def _wait_for_room(self, error: QueueFullError) -> None:
        await anyio.sleep(error.retry_after_s)

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
        """Return the vectors of texts, float32 `(n, d)`; arguments as for `Engine.embed`.

        Raises
        ------
        RequestError
            The texts cannot be served.  `DeadlineError`: there was no answer within `timeout`.
        ServerError, ClosedError
            No server accepted the request within `patience_s`, one failed, or the client is closed.
        """
        check_several("texts", texts, "a sequence of texts", InvalidRequestError)
        urgency = Urgency(priority, timeout)
        if dimensions is not None:
            dimensions = check_int("dimensions", dimensions, 1, INT32_MAX, InvalidRequestError)
        body = {
            **self._model,
            "input": [check_prompt(text, f"texts[{i}]") for i, text in enumerate(texts)],
            "encoding_format": "base64",
            "normalize": check_bool("normalize", normalize, InvalidRequestError),
            "dimensions": dimensions,
            "truncate": check_bool("truncate", truncate, InvalidRequestError),
            "priority": urgency.priority,
            "timeout": urgency.timeout,
        }

        def vectors(told: Any) -> NDArray[np.float32]:
            rows = [base64.b64decode(row["embedding"]) for row in told["data"]]
            return np.frombuffer(b"".join(rows), np.float32).reshape(len(rows), -1)

        return await self._asked("/v1/embeddings", body, vectors)

    async def score(
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        lora: Mapping[str, float] | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> Score:
        """Return the log probabilities of a continuation after a prompt; arguments as for `Engine.score`.

        Raises
        ------
        RequestError
            The texts cannot be served.  `DeadlineError`: there was no answer within `timeout`.
        ServerError, ClosedError
            As for `embed`.
        """
        urgency, scales = Urgency(priority, timeout), check_lora(lora)
        body: dict[str, Any] = {
            **self._model,
            "prompt": check_prompt(prompt),
            "continuation": check_prompt(continuation, "continuation"),
            "priority": urgency.priority,
            "tenant": check_tenant("tenant", tenant, InvalidRequestError),
            "timeout": urgency.timeout,
        }
        if scales is not None:
            body["lora"] = scales

        def score(told: Any) -> Score:
            logprobs = tuple(-math.inf if p <= LOWEST else p for p in told["logprobs"])
            return Score(tuple(told["token_ids"]), logprobs, sum(logprobs))

        return await self._asked(
            "/generate/score", body, score, self._session or keys_of(prompt_bytes(body))
        )

    async def _asked(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], T],
        keys: Sequence[Key] = (),
    ) -> T:
        """Return the result of a request that is not a stream.  If a server fails, the next one is queried.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of the session, or of the prefixes of the prompt, which choose the first server.

        Raises
        ------
        DeadlineError
            No server has answered within the `timeout` of the body.
        """
        timeout, submitted = body["timeout"], time.monotonic()
        url: str | None = None
        failure: Exception | None = None
        # A server enforces the deadline itself; this limit is needed if no server answers.
        with anyio.move_on_after(None if timeout is None else timeout + GRACE_S):
            for _ in range(MAX_MOVES + 1):
                if timeout is not None:
                    left_s = max(0.0, timeout - (time.monotonic() - submitted))
                    body = {**body, "timeout": left_s}
                url, response = await self._replicas.post(
                    path, body, keys=keys, but=url, is_large=True
                )
                try:
                    told = await response.aread()
                except httpx.TransportError as error:
                    failure = error
                    continue
                except httpx.DecodingError as error:
                    raise unlike_cllm(url, error) from None
                finally:
                    await self._replicas.close(url, response)
                try:
                    # Vectors can have tens of megabytes.
                    return await anyio.to_thread.run_sync(_read, read, told)
                except UNLIKE_CLLM as error:
                    raise unlike_cllm(url, error) from None
            raise ServerError(f"cut off {MAX_MOVES + 1} times, at last: {failure!r}")
        raise DeadlineError(f"no server has answered within {timeout:g} s")


def _read(read: Callable[[Any], T], told: bytes) -> T:
    return read(json.loads(told))


def _header_of(field: str, value: str) -> str:
    """Return `value` if a header can have it; raise `InvalidArgumentError` if not."""
    if not isinstance(value, str) or not HEADER_VALUE.fullmatch(value):
        raise InvalidArgumentError(field, value, "1 to 1024 letters, digits and signs of ASCII")
    return value


def _several(urls: Sequence[str]) -> list[str]:
    if not isinstance(urls, Sequence):
        raise InvalidArgumentError("base_url", urls, "an address, or a sequence of addresses")
    return list(urls)


def _prompt_of(call: RequestCall) -> dict[str, Any]:
    """Return the fields of a body with the prompt."""
    prompt = call.prompt
    if isinstance(prompt, MixedPrompt):
        parts = [part if isinstance(part, str) else _part_of(part) for part in prompt.parts]
        return {"prompt": parts, "parse_special": call.parse_special}
    if not isinstance(prompt, ChatPrompt):
        # Always sent: the server's default is True, like llama-server's; that of `Engine` is False.
        return {"prompt": prompt, "parse_special": call.parse_special}
    return {
        "messages": [_message_of(message, prompt.marks) for message in prompt.messages],
        "tools": prompt.tools,
        "tool_choice": prompt.tool_choice,
        "parallel_tool_calls": prompt.parallel_tool_calls,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "reasoning_effort": prompt.reasoning_effort,
        "reasoning_budget": prompt.reasoning_budget,
        "chat_template_kwargs": dict(prompt.template_kwargs),
    }


def _part_of(named: NamedMedia) -> dict[str, Any]:
    media = named.media
    assert isinstance(media, Image | Audio)
    try:
        return media.part()
    except InvalidRequestError as error:
        if named.is_optional:
            return {"type": "text", "text": in_words(media.kind)}
        raise named.with_field(error) from None


def _message_of(message: dict[str, Any], marks: MediaMarks | None) -> dict[str, Any]:
    """Return a message with its media as parts of the content."""
    content = message.get("content")
    if marks is None or not isinstance(content, str):
        return message
    parts = marks.parts_of(content)
    if len(parts) == 1:
        return message
    sent: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        if not isinstance(part, str):
            sent.append(_part_of(part))
            continue
        if message["role"] in RESULTS:  # the server puts each part into a line of its own
            part = part.removeprefix("\n") if i else part
            part = part.removesuffix("\n") if i < len(parts) - 1 else part
        sent += [{"type": "text", "text": part}] if part else []
    return {**message, "content": sent}


def _sampling_of(call: RequestCall) -> dict[str, Any]:
    """Return the fields that the caller set, and a seed unless `temperature` is 0; the server sets the rest."""
    given = {name: getattr(call.params, name) for name in call.given}
    if given.get("seed") is None and given.get("temperature") != 0.0:
        given["seed"] = secrets.randbelow(MAX_SEED + 1)
    given["logit_bias"] = {
        str(token): False if bias == -math.inf else bias
        for token, bias in dict(given.get("logit_bias") or {}).items()
    } or None
    return {name: value for name, value in given.items() if value is not None}
