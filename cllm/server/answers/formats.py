"""Completions and deltas in the shapes of OpenAI's API.  Pure."""

from __future__ import annotations

import codecs
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from cllm import Completion, FinishReason, TokenDelta, TokenLogprob, TokenStream, ToolCallDelta
from cllm.server.answers.answer import AnswerForm
from cllm.server.answers.client_tools import CUSTOM, ClientTools, text_input_of
from cllm.server.http.replies import Event
from cllm.server.state import Served

LOWEST = -9999.0  # OpenAI's stand-in for a probability of 0: JSON has no infinity


def finish_reason_of(reason: FinishReason | None) -> str | None:
    """Return OpenAI's `finish_reason`: `stop`, `tool_calls`, or `length`, also for a deadline.

    None for an output that runs, has failed or was cancelled: an error event follows its last chunk.
    """
    if reason in (None, FinishReason.ERROR, FinishReason.CANCELLED):
        return None
    return str(reason) if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS) else "length"


def deadline_of(reason: FinishReason | None) -> dict[str, str]:
    """Return the field `stop_reason` for an output that ended at its deadline; otherwise an empty dict."""
    return {"stop_reason": "deadline"} if reason is FinishReason.DEADLINE else {}


class _OpenAIForm(AnswerForm):
    """Common parts of the answers of `/v1/completions` and `/v1/chat/completions`.

    Parameters
    ----------
    n_choices : int
        Number of choices of each prompt.
    wants_usage : bool
        True to send the usage as the last chunk of a stream.
    """

    def __init__(
        self,
        prefix: str,
        kind: str,
        request_id: str,
        model: Served,
        n_choices: int,
        wants_usage: bool,
    ) -> None:
        self._n_choices = n_choices
        self._wants_usage = wants_usage
        self._head = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    @abstractmethod
    def _chunks(self, index: int, delta: TokenDelta) -> Iterator[dict[str, Any]]: ...

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        for chunk in self._chunks(index, delta):
            yield None, chunk

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        if self._wants_usage:
            yield None, {**self._chunk_head, "choices": [], "usage": self._usage(done)}
        yield from super().end(done)

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once, however many choices it has."""
        prompts = [one.usage for one in completions[:: self._n_choices]]
        n_prompt = sum(usage.n_prompt for usage in prompts)
        outputs = [one.usage for one in completions]
        n_output = sum(usage.n_output for usage in outputs)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_output,
            "total_tokens": n_prompt + n_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.n_cached for usage in prompts),
                "image_tokens": sum(usage.n_image_tokens for usage in prompts),
                "audio_tokens": sum(usage.n_audio_tokens for usage in prompts),
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(usage.n_reasoning for usage in outputs),
                "accepted_prediction_tokens": sum(usage.n_accepted for usage in outputs),
                "rejected_prediction_tokens": sum(
                    usage.n_drafted - usage.n_accepted for usage in outputs
                ),
            },
        }

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head


class CompletionForm(_OpenAIForm):
    """Answers of `/v1/completions`: objects of the kind `text_completion`.

    Parameters
    ----------
    echoes : sequence of str
        Text that precedes each choice: its prompt, or empty.
    is_prompt_only : bool
        See `AnswerForm`.
    """

    def __init__(
        self,
        request_id: str,
        model: Served,
        echoes: Sequence[str],
        *,
        n_choices: int,
        wants_usage: bool,
        is_prompt_only: bool = False,
    ) -> None:
        kind = "text_completion"
        super().__init__("cmpl", kind, request_id, model, n_choices, wants_usage)
        self.is_prompt_only = is_prompt_only
        # Bytes of the first token of each prompt: it has no log probability that would hold them.
        self._first_pieces: Sequence[bytes] = ()
        self._echoes = list(echoes)
        self._offsets = [len(echo) for echo in echoes]
        # A character may consist of several tokens; the offset grows after the last of them.
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in echoes]

    def _chunks(self, index: int, delta: TokenDelta) -> Iterator[dict[str, Any]]:
        text, self._echoes[index] = self._echoes[index] + delta.text, ""
        reason = finish_reason_of(delta.finish_reason)
        if text or delta.token_ids or reason is not None:
            choice = self._choice(index, text, delta.logprobs, reason)
            yield {**self._head, "choices": [{**choice, **deadline_of(delta.finish_reason)}]}

    async def look_up(self, stream: TokenStream, done: Sequence[Completion]) -> None:
        """See `AnswerForm`."""
        if done[0].prompt_logprobs is not None:
            firsts = [one.prompt_token_ids[0] for one in done]
            self._first_pieces = await stream.pieces(firsts)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        choices = []
        for i, completion in enumerate(completions):
            text = self._echoes[i] + completion.text
            logprobs: Sequence[TokenLogprob | None] | None = completion.logprobs
            if completion.prompt_logprobs is not None:  # the prompt is echoed with them
                self._offsets[i] = 0
                logprobs = (*completion.prompt_logprobs, *(completion.logprobs or ()))
            reason = finish_reason_of(completion.finish_reason)
            n_prompt = len(completion.prompt_logprobs or ())
            choice = self._choice(i, text, logprobs, reason, n_prompt)
            choices.append({**choice, **deadline_of(completion.finish_reason)})
        return {**self._head, "choices": choices, "usage": self._usage(completions)}

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob | None] | None,
        reason: str | None,
        n_prompt: int = 0,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else self._logprobs(index, logprobs, n_prompt),
            "finish_reason": reason,
        }

    def _logprobs(
        self, index: int, logprobs: Sequence[TokenLogprob | None], n_prompt: int
    ) -> dict[str, Any]:
        """Return OpenAI's lists; the first token of a prompt, which nothing precedes, has no number."""
        offsets = []
        first = self._first_pieces[index] if self._first_pieces else b""
        for i, logprob in enumerate(logprobs):
            offsets.append(self._offsets[index])
            piece = first if logprob is None else logprob.bytes
            if logprob is not None and i < n_prompt:  # an echo has the names of control tokens
                piece = piece or logprob.text.encode()
            self._offsets[index] += len(self._decoders[index].decode(piece))
        return {
            "tokens": [
                first.decode("utf-8", "replace") if p is None else _name(p) for p in logprobs
            ],
            "token_logprobs": [None if p is None else _finite(p) for p in logprobs],
            "top_logprobs": [
                None if p is None else {_name(t): _finite(t) for t in p.top} for p in logprobs
            ],
            "text_offset": offsets,
        }


class ChatCompletionForm(_OpenAIForm):
    """Answers of `/v1/chat/completions`: `chat.completion`, streamed as `chat.completion.chunk`.

    Parameters
    ----------
    tools : ClientTools
        Tools of the request; calls of its custom tools have the type `custom`.
    """

    prompt_field = "messages"

    def __init__(
        self,
        request_id: str,
        model: Served,
        tools: ClientTools,
        *,
        n_choices: int,
        wants_usage: bool,
    ) -> None:
        kind = "chat.completion"
        super().__init__("chatcmpl", kind, request_id, model, n_choices, wants_usage)
        self._begun: set[int] = set()
        self._tools = tools
        # By choice, the unfinished call of a custom tool: its index, and pieces of its arguments.
        self._custom: dict[int, tuple[int, list[str]]] = {}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunks(self, index: int, delta: TokenDelta) -> Iterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})
        reason = finish_reason_of(delta.finish_reason)
        if delta.reasoning:
            yield self._chunk(index, {"reasoning_content": delta.reasoning})
        if delta.text or delta.logprobs:
            yield self._chunk(index, {"content": delta.text}, delta.logprobs)
        for call in delta.tool_calls:
            yield from self._call_chunks(index, call)
        if reason is not None:
            yield from self._end_custom(index)
            yield self._chunk(index, {}, reason=reason, ended=delta.finish_reason)

    def _call_chunks(self, index: int, call: ToolCallDelta) -> Iterator[dict[str, Any]]:
        if call.name is not None:
            yield from self._end_custom(index)
            if self._tools.known(call.name).kind == CUSTOM:
                self._custom[index] = call.index, [call.arguments]
                begun = {"index": call.index, "id": call.id, "type": CUSTOM}
                custom = {"name": call.name, "input": ""}
                yield self._chunk(index, {"tool_calls": [{**begun, CUSTOM: custom}]})
                return
        if index in self._custom:  # its text is in JSON, and sent when the JSON is complete
            self._custom[index][1].append(call.arguments)
        else:
            yield self._chunk(index, {"tool_calls": [_call_delta(call)]})

    def _end_custom(self, index: int) -> Iterator[dict[str, Any]]:
        number, parts = self._custom.pop(index, (None, []))
        if number is not None:
            custom = {"input": text_input_of("".join(parts))}
            yield self._chunk(index, {"tool_calls": [{"index": number, CUSTOM: custom}]})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] | None = None,
        reason: str | None = None,
        ended: FinishReason | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _chat_logprobs(logprobs),
            "finish_reason": reason,
            **deadline_of(ended),
        }
        return {**self._chunk_head, "choices": [choice]}

    def _message(self, completion: Completion) -> dict[str, Any]:
        message = {**completion.as_message(), "refusal": None}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._told(call) for call in calls]
        return message

    def _told(self, call: dict[str, Any]) -> dict[str, Any]:
        name = call["function"]["name"]
        if self._tools.known(name).kind != CUSTOM:
            return call
        custom = {"name": name, "input": text_input_of(call["function"]["arguments"])}
        return {"id": call["id"], "type": CUSTOM, CUSTOM: custom}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        choices = [
            {
                "index": i,
                "message": self._message(c),
                "logprobs": _chat_logprobs(c.logprobs),
                "finish_reason": finish_reason_of(c.finish_reason),
                **deadline_of(c.finish_reason),
            }
            for i, c in enumerate(completions)
        ]
        return {**self._head, "choices": choices, "usage": self._usage(completions)}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name, **function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [*map(with_top, logprobs)], "refusal": None}


def with_top(logprob: TokenLogprob) -> dict[str, Any]:
    """Return the log probability of a token, and those of the most likely ones, as chats and responses have them."""
    return {**_chat_logprob(logprob), "top_logprobs": [*map(_chat_logprob, logprob.top)]}


def _chat_logprob(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "token": logprob.text,
        "logprob": _finite(logprob),
        "bytes": list(logprob.bytes),
    }


def _name(logprob: TokenLogprob) -> str:
    """Return the text of a token; `bytes:` and the escaped bytes for a part of a character, as OpenAI does."""
    try:
        logprob.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.bytes)
    return logprob.text


def _finite(logprob: TokenLogprob) -> float:
    return max(logprob.logprob, LOWEST)
