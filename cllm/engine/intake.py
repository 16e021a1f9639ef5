"""Intake: from what a caller gives to a submitted request.  Event loop only.

Texts are tokenized off the loop where they are long, and everything that needs the model to be
known about a request is checked here, before the inference thread hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cllm.bindings import Vocabulary
from cllm.engine.admission import QueueGate
from cllm.engine.dispatcher import Dispatcher
from cllm.engine.request import GenerationRequest
from cllm.engine.stream import Channel
from cllm.engine.submission import RequestCall, check_length, check_tokens
from cllm.engine.worker_thread import WorkerThread
from cllm.errors import InvalidRequestError

# Texts up to this many characters are tokenized on the event loop, in microseconds; longer ones can
# recurse deeply or take long and go to a thread with a large stack.
SHORT_TEXT = 64
SHORT_TOKENS = 1024


class Intake:
    """The way in.

    Parameters
    ----------
    check_serving : callable
        The vocabulary, or why requests are not served.
    """

    def __init__(
        self,
        check_serving: Callable[[], Vocabulary],
        gate: QueueGate,
        dispatcher: Dispatcher,
        *,
        stream_buffer: int,
    ) -> None:
        self._check_serving = check_serving
        self._gate = gate
        self._dispatcher = dispatcher
        self._stream_buffer = stream_buffer
        self._n_serial = 0
        self._tokenizer = WorkerThread("cllm-tokenizer")

    async def aclose(self) -> None:
        """Wait for the calls that were begun, and end the threads."""
        await self._tokenizer.aclose()

    @property
    def _n_ctx(self) -> int:
        """Positions that one sequence can have."""
        model = self._dispatcher.model
        assert model is not None
        return model.n_ctx

    async def open(self, call: RequestCall) -> Channel:
        """Tokenize, check and submit; see `TokenStream` for what it raises."""
        vocabulary = self._check_serving()
        submitted_at = time.perf_counter()
        self._gate.enter()
        try:
            tokens = await self._tokens(call)
            self._check_serving()
            check_tokens(tokens, call.params, self._n_ctx, vocabulary.n_tokens)
            if self._dispatcher.is_open(call.request_id):
                raise InvalidRequestError("request_id", call.request_id, "not in use")
        except BaseException:
            self._gate.leave(is_served=False)
            raise
        # Nothing is awaited from here on: a submitted request always has its channel.
        self._n_serial += 1
        request = GenerationRequest(
            request_id=call.request_id,
            serial=self._n_serial,
            prompt_token_ids=tokens,
            params=call.params,
            priority=call.priority,
            submitted_at=submitted_at,
            deadline=None if call.timeout is None else submitted_at + call.timeout,
        )
        return self._dispatcher.submit(request, self._stream_buffer)

    async def _tokens(self, call: RequestCall) -> tuple[int, ...]:
        prompt = call.prompt
        if not isinstance(prompt, str):
            return prompt
        check_length(prompt, self._n_ctx)
        return tuple(await self.tokenize(prompt))

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """See `Engine.tokenize`."""
        vocabulary = self._check_serving()

        def call() -> list[int]:
            return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

        if not isinstance(text, str) or len(text) <= SHORT_TEXT:
            return call()
        return await self._tokenizer.run(call)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Engine.detokenize`."""
        vocabulary = self._check_serving()

        def call() -> str:
            return vocabulary.join(token_ids).decode("utf-8", "replace")

        return call() if len(token_ids) <= SHORT_TOKENS else await self._tokenizer.run(call)
