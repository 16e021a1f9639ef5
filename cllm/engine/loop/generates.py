"""Generates: one way into every request, of `Engine` and of `AsyncClient`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

from cllm.engine.loop.generate_all import run_all
from cllm.engine.loop.request_call import (
    BatchOptions,
    ChatOptions,
    Prompt,
    PromptOptions,
    RequestCall,
    chat_prompt_of,
)
from cllm.engine.output import Completion
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import InvalidRequestError, QueueFullError

T = TypeVar("T")
R = TypeVar("R")


class CompletionStream(Protocol):
    """Stream that has a completion at its end."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    async def completion(self) -> Completion: ...


StreamT = TypeVar("StreamT", bound=CompletionStream)


class Generates(ABC, Generic[StreamT]):
    """Base of the classes that make requests; a subclass opens the stream of a checked request."""

    @abstractmethod
    def _open(self, call: RequestCall) -> StreamT:
        """Return the stream of a request; it is submitted when the stream is entered."""

    @abstractmethod
    async def _wait_for_room(self, error: QueueFullError) -> None:
        """Wait until another request may be submitted, after one was rejected."""

    @property
    @abstractmethod
    def _n_at_once(self) -> int:
        """Number of requests of one call that are submitted at once."""

    def _sampling_defaults(self) -> SamplingOptions:
        """Return the sampling fields of requests that leave them out."""
        return {}

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[PromptOptions],
    ) -> StreamT:
        """Return the output of one request as a stream of deltas.

        Parameters
        ----------
        prompt : str, sequence of int, or sequence of str, Image and Audio
            Text, token ids, or texts, images and audio in order.
        params : SamplingParams, optional
            Parameters; or their fields as keyword arguments, not both.
        priority : int
            Lower is more urgent, in the queue and for preemption.  Default 0.
        timeout : float, optional
            Seconds from submission until the request ends with `deadline`.
        request_id : str, optional
            Id of the request; None: a new one.
        generated : sequence of int
            Beginning of the output, sampled before, here or elsewhere.  The output continues after these
            tokens as if it had never been interrupted.  Deltas and completion contain only the rest.
            `max_tokens` counts these tokens.  With a `seed` the random numbers are the same.
        lora : mapping of str to float, optional
            Names and scales of the loaded adapters that compute this request.  None: those of
            `EngineConfig.lora`.
        tenant : str
            Tenant of the request.  Tenants share the engine by their weights
            (`EngineConfig.tenant_weights`) within a level of priority.  Default "".
        parse_special : bool
            Read names of control tokens in the text, such as `<|im_start|>`, as these tokens, like
            llama-server. Default False: they are text, which is right for prompts from others.
        **options
            Fields of `SamplingParams`, instead of `params`.

        Raises
        ------
        InvalidRequestError
            Names the field, the value and the limit.  Errors that depend on the model are raised when the
            stream is entered.
        TypeError
            `params` and single fields of it are both given.
        """
        return self._open(RequestCall.of(prompt, params, options, self._sampling_defaults()))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[PromptOptions],
    ) -> Completion:
        """Return the whole output of one request; arguments as for `stream`.

        Raises
        ------
        RequestError
            The request cannot be served; a `GenerationError` carries the partial completion.
        ClosedError, EngineFailedError
            The engine does not serve requests.
        """
        async with self.stream(prompt, params, **options) as stream:
            return await stream.completion()

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        return_exceptions: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[Completion]:
        """Return the outputs of many requests, in the order of their prompts.

        The queue is never overfilled: requests are submitted when it has room.

        Parameters
        ----------
        return_exceptions : bool
            Put errors into the list, instead of raising the first one and cancelling the others.  (The
            annotation names completions only, as that of `asyncio.gather`.)
        on_progress : callable, optional
            Called with `(n_done, n_total)` after each request, in the event loop.
        **options
            Options of `stream`, except `request_id`, `generated` and `parse_special`.

        Raises
        ------
        InvalidRequestError
            Names the field, the value and the limit, of an option or a prompt.  Other errors as for
            `generate`.
        """
        for name in ("request_id", "generated", "parse_special"):
            if name in options:
                raise InvalidRequestError(name, options.get(name), "left out of several requests")

        async def run(prompt: Prompt) -> Completion:
            return await self.generate(prompt, params, **options)

        return await self._run_all(
            run, prompts, return_exceptions=return_exceptions, on_progress=on_progress
        )

    async def _run_all(
        self,
        run: Callable[[Prompt], Awaitable[R]],
        prompts: Sequence[Prompt],
        *,
        return_exceptions: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        wait_for_room: Callable[[QueueFullError], Awaitable[None]] | None = None,
    ) -> list[R]:
        """Run a request for each prompt; a request waits if the queue is full."""
        wait = self._wait_for_room if wait_for_room is None else wait_for_room

        async def run_when_possible(prompt: Prompt) -> R:
            while True:
                try:
                    return await run(prompt)
                except QueueFullError as error:
                    await wait(error)

        return await run_all(
            run_when_possible,
            prompts,
            n_at_once=self._n_at_once,
            return_exceptions=return_exceptions,
            on_progress=on_progress,
        )

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> StreamT:
        """Return the answer to a chat as a stream of deltas; the chat template writes the prompt.

        Parameters
        ----------
        messages : sequence of mapping
            Messages in OpenAI's form: `{"role": "user", "content": "Hello"}`.  Names of control tokens in
            them stay text.  A user's content may be a list of parts: `{"type": "text", "text": "Look: "}`
            `{"type": "image", "image": cllm.Image("cat.png")}` and `{"type": "audio", "audio": cllm.Audio("a.wav")}`.
        tools : sequence of mapping, optional
            Tools in OpenAI's form that the model may call.  Calls are in the deltas' `tool_calls`.
        tool_choice : str
            "auto" (the default), "none", "required", or the name of one of the tools.
        parallel_tool_calls : bool
            Allow several calls in one answer.  Default True.
        reasoning_effort : str, optional
            How much the model thinks, if its template supports that: "none", "minimal", "low", "medium",
            "high", "xhigh" or "max".
        reasoning_budget : int, optional
            Largest number of tokens of the thought; then the engine writes the end of the thought.
        continue_final_message : bool
            Continue the last message, which is the beginning of the answer.  Default False.
        add_generation_prompt : bool
            End the prompt with the beginning of an answer.  Default True.
        chat_template_kwargs : mapping, optional
            Further variables for the template, such as `{"enable_thinking": False}`.
        **options
            Options of `stream`, except `parse_special`.

        Raises
        ------
        InvalidRequestError
            Names the message and the field.  Other arguments and errors as for `stream`; errors of the
            template are raised when the stream is entered.
        """
        prompt, left = chat_prompt_of(messages, options)
        return self._open(RequestCall.of(prompt, params, left, self._sampling_defaults()))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Return the whole answer to a chat; arguments as for `stream_chat`, errors as for `generate`."""
        async with self.stream_chat(messages, params, **options) as stream:
            return await stream.completion()
