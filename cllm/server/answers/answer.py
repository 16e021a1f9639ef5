"""Production of answers with text: `AnswerForm`, the shape of one route's answers, and `answer`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.responses import Response

from cllm import Completion, FinishReason, PromptTooLongError, TokenDelta, TokenStream
from cllm.server.answers.running import Observation, check_in_time, run_streams
from cllm.server.http.problems import TOO_LONG, Problem, problem_of, shutting_down, too_long
from cllm.server.http.replies import DONE, Event, Reply, Writer
from cllm.server.state import ServerState

logger: logging.Logger = logging.getLogger("cllm.server")

Answer = TypeVar("Answer", TokenDelta, Completion)


class AnswerForm(ABC):
    """Form of one route's answers; by default with the events of OpenAI's chats.

    Attributes
    ----------
    prompt_field : str
        Name of the field with the prompt, for errors.
    tells_overflows : bool
        True if a stream whose prompt is too long has status 200 and ends with an error event.
    reads_deltas : bool
        True if `events` is called for answers that are not streamed too.
    has_lines : bool
        True if a stream is lines of JSON, and not server-sent events.
    is_plain : bool
        True if a whole answer is plain text, and not JSON.
    is_prompt_only : bool
        True if the request computes its prompt alone: the token that the engine samples is left out.
    """

    prompt_field = "prompt"
    tells_overflows = False
    reads_deltas = False
    has_lines = False
    is_plain = False
    is_prompt_only = False

    def begin(self, n_prompt: int) -> Iterable[Event]:
        """Return the first events of a stream, whose prompt has `n_prompt` tokens."""
        return ()

    def ping(self) -> Event | None:
        """Return an event without effect that keeps a waiting stream open; None to send a comment."""
        return None

    @abstractmethod
    def events(self, index: int, delta: TokenDelta) -> Iterable[Event]:
        """Return the events for one delta of the choice `index`."""

    def is_over(self, index: int) -> bool:
        """Return True if the choice `index` is complete: its stream is then cancelled."""
        return False

    def check(self, done: Sequence[Completion]) -> None:
        """Raise an error if the completions are no answer.

        Raises
        ------
        Problem
            503: a shutdown has cancelled one of them.
        DeadlineError
            All of them reached their deadline without a token.
        """
        if any(one.finish_reason is FinishReason.CANCELLED for one in done):
            raise shutting_down()
        check_in_time(done)

    async def look_up(self, stream: TokenStream, done: Sequence[Completion]) -> None:
        """Fetch further parts of the answer by the model of a stream."""
        return

    def end(self, done: Sequence[Completion]) -> Iterable[Event]:
        """Return the last events."""
        return [(None, DONE)]

    def failed(self, problem: Problem) -> Iterable[Event]:
        """Return the last events of a streamed answer that has failed."""
        return [(None, problem.body), (None, DONE)]

    @abstractmethod
    def whole(self, done: Sequence[Completion]) -> object:
        """Return the whole answer: a text with `is_plain`, otherwise a value to be encoded as JSON."""


def answer(
    state: ServerState,
    form: AnswerForm,
    open_streams: Callable[[str], list[TokenStream]],
    observation: Observation,
    request_id: str,
    *,
    is_streamed: bool,
    problem: Callable[[Exception], Problem] = problem_of,
) -> Response:
    """Return the response to a request, whole or as events; its streams end when the client disconnects.

    Parameters
    ----------
    open_streams : callable
        Called with a request id for the engine; returns the streams, not submitted yet.
    problem : callable
        Returns the error response for an exception, with the field names that the client knows.
    """
    # The last delta of the only stream: its events are sent together with those after it.
    held: list[tuple[int, TokenDelta]] = []

    async def run(writer: Writer) -> Sequence[Completion]:
        has_tokens = set[int]()
        # Last deltas of outputs that expired without a token: `form.check` decides if they are an error.
        expired: list[tuple[int, TokenDelta]] = []

        async def on_delta(index: int, delta: TokenDelta) -> None:
            if form.is_prompt_only:
                delta = _without_output(delta)
            if delta.token_ids:
                has_tokens.add(index)
            if delta.finish_reason is FinishReason.DEADLINE and index not in has_tokens:
                expired.append((index, delta))
            else:
                await send(index, delta)

        async def send(index: int, delta: TokenDelta) -> None:
            if is_streamed and delta.finish_reason is not None and len(streams) == 1:
                held.append((index, delta))
                return
            events = list(form.events(index, delta))
            if is_streamed:
                await writer.events(events)
            if form.is_over(index):
                await streams[index].cancel()

        async def on_admitted() -> None:
            await writer.begin()
            await writer.events(form.begin(streams[0].n_prompt))

        with state.unique(request_id) as engine_id:
            streams = open_streams(engine_id)
            done = await run_streams(
                streams,
                observation,
                on_delta if is_streamed or form.reads_deltas else None,
                on_admitted if is_streamed else None,
            )
        form.check(done)
        for index, delta in expired:
            await send(index, delta)
        if form.is_prompt_only:
            done = [
                replace(_without_output(one), usage=replace(one.usage, n_output=0, n_reasoning=0))
                for one in done
            ]
        await form.look_up(streams[0], done)
        return done

    def held_events() -> Iterator[Event]:
        """Yield the events of the held delta, just before they are sent: a keep-alive may have a number, too."""
        for index, delta in held:
            yield from form.events(index, delta)

    async def produce(writer: Writer) -> None:
        try:
            done = await run(writer)
        except Exception as error:
            if writer.has_left:
                raise
            if isinstance(error, PromptTooLongError):
                failure = too_long(error, form.prompt_field)
            else:
                failure = problem(error)
            tells = is_streamed and form.tells_overflows and failure.code == TOO_LONG
            if failure.status == 500:
                logger.error("request %s failed", request_id, exc_info=error)
            if not (writer.is_streaming or tells):
                raise failure from error
            if writer.is_streaming:
                observation.cut_off(failure.status, failure.code)
            last = [*held_events(), *form.failed(failure)]
        else:
            if form.is_plain:
                await writer.whole(str(form.whole(done)).encode(), "text/plain; charset=utf-8")
                return
            if not is_streamed:
                is_long = any(one.logprobs or one.prompt_logprobs for one in done)
                await writer.json(lambda: form.whole(done), is_long=is_long)
                return
            last = [*held_events(), *form.end(done)]
        await writer.end(last)

    interval_s = state.config.ping_interval_s
    return Reply(produce, interval_s, form.ping, has_lines=form.has_lines)


def _without_output(one: Answer) -> Answer:
    """Return a delta or a completion without its token; its reason is that of an output of no tokens."""
    changes: dict[str, Any] = {"text": "", "token_ids": (), "reasoning": "", "tool_calls": ()}
    if one.logprobs is not None:
        changes["logprobs"] = ()
    if one.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        changes |= {"finish_reason": FinishReason.LENGTH, "stop_reason": "max_tokens"}
    return replace(one, **changes)
