"""EmbeddingCore: computes the vectors of whole texts, in batches that leave time for generation.

A computed text leaves nothing in a cache.  Texts wait in their requests, and each batch takes as many as
its size and its time allow.  A request ends with its last text.  A text that takes longer than a batch may
is computed in pieces, one in each batch, if the model reads from left to right.  Pure, as `EngineCore`
is: `TextEncoder` hides libllama.
"""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.commands import AddEmbedding, CancelRequest, Command, Embedded, Event
from cllm.engine.core.sequence import aged_priority
from cllm.engine.core.statistics import Recorder
from cllm.engine.core.text_encoder import TextEncoder
from cllm.engine.core.tick_cost import TickCost
from cllm.engine.embedding import EmbeddingRequest, ended_early
from cllm.engine.output import FinishReason
from cllm.errors import (
    CllmError,
    DeadlineError,
    DecodeFailedError,
    EmbeddingError,
    EngineFailedError,
    ModelChangedError,
)

logger: logging.Logger = logging.getLogger("cllm.engine")

ABORTED = 2  # llama_encode, llama_decode: the abort flag was set
# Longest batch while no stream runs: a new request may have to wait for it.
IDLE_BATCH_S = 0.25
# A piece of a text has at least so many tokens: each batch reads all weights, whatever its size.
MIN_PIECE = 8


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended.

    Attributes
    ----------
    waiting : list of (int, int)
        Number of tokens, and index, of each text that waits for a batch, in ascending order.
    vectors : list of ndarray or None
        Vector of each text; None until it is computed.
    n_left : int
        Number of texts without a vector.
    n_batch : int
        Number of the last batch with one of its texts; 0 if there was none.
    """

    request: EmbeddingRequest
    waiting: list[tuple[int, int]]
    vectors: list[NDArray[np.float32] | None]
    n_left: int
    n_batch: int = 0

    @classmethod
    def of(cls, request: EmbeddingRequest) -> _Open:
        texts = request.texts
        waiting = sorted((len(text), index) for index, text in enumerate(texts))
        return cls(request, waiting, [None] * len(texts), len(texts))

    def take_longest(self, n_tokens: float) -> _Text | None:
        """Remove and return the longest waiting text of at most `n_tokens` tokens; None without one."""
        place = bisect.bisect_right(self.waiting, (n_tokens, math.inf))
        return _Text(self, self.waiting.pop(place - 1)[1]) if place else None


@dataclass(frozen=True, slots=True)
class _Text:
    """One text of a request.

    Attributes
    ----------
    has_failed : bool
        True if an earlier batch with this text failed, or gave it a vector with NaN.
    n_computed : int
        Number of its tokens that earlier batches have computed.
    n_rows : int or None
        Number of its tokens in the present batch; None: all that are left.
    """

    of: _Open
    index: int
    has_failed: bool = False
    n_computed: int = 0
    n_rows: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.of.request.texts[self.index]

    @property
    def n_left(self) -> int:
        return len(self.tokens) - self.n_computed

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of the text in the present batch."""
        n_rows = self.n_left if self.n_rows is None else self.n_rows
        return self.tokens[self.n_computed : self.n_computed + n_rows]

    @property
    def rest(self) -> _Text | None:
        """The text with the tokens after the present batch; None if none are left."""
        n_computed = self.n_computed + len(self.rows)
        if n_computed == len(self.tokens):
            return None
        return replace(self, n_computed=n_computed, n_rows=None)

    def put_back(self) -> None:
        """Return the text to the queue."""
        bisect.insort(self.of.waiting, (len(self.tokens), self.index))


@dataclass(slots=True)
class EmbeddingCore:
    """Core of embeddings: all requests for vectors, and their batches.

    Parameters
    ----------
    encoder : TextEncoder
        Opened when it is first needed, and again after a failure.
    recorder : Recorder
        Where texts and tokens are counted.
    clock : callable
        Seconds; the only source of time.
    on_batch : callable
        Called with the number of tokens by request id just before a batch, and with an empty mapping just
        after.
    """

    encoder: TextEncoder
    recorder: Recorder
    clock: Callable[[], float] = time.perf_counter
    on_batch: Callable[[Mapping[str, int]], None] = lambda n_tokens: None
    _open: dict[str, _Open] = field(default_factory=dict)
    _alone: deque[_Text] = field(default_factory=deque)  # texts of failed batches
    _begun: _Text | None = None  # the encoder holds its first tokens
    _events: list[Event] = field(default_factory=list)
    cost: TickCost = field(default_factory=TickCost)
    _saved_s: float = 0.0  # saved for a text that takes longer than a batch may
    _n_batches: int = 0

    # --- Commands ----------------------------------------------------------------------------
    def handle(self, command: Command) -> None:
        """Handle a command about vectors."""
        match command:
            case AddEmbedding(request) if request.texts:
                self._open[request.request_id] = _Open.of(request)
                self._count_waiting()
            case AddEmbedding(request):
                self._events.append(Embedded(request.request_id))
            case CancelRequest(request_id) if request_id in self._open:
                self._fail(request_id, ended_early(request_id, FinishReason.CANCELLED))

    def cancel_all(self) -> None:
        """End every request."""
        for request_id in list(self._open):
            self.handle(CancelRequest(request_id))

    def fail_all(self, cause: BaseException) -> None:
        """End every request with an `EngineFailedError` of this cause; llama.cpp is not called."""
        for request_id in list(self._open):
            self._fail(request_id, EngineFailedError.of(cause))

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    # --- A batch -----------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """True if texts wait."""
        return bool(self._open)

    @property
    def next_deadline(self) -> float | None:
        """Earliest deadline of an open request, in seconds of the clock; None without one."""
        deadlines = [o.request.deadline for o in self._open.values()]
        return min((at for at in deadlines if at is not None), default=None)

    def tick(self, budget_s: float | None = None) -> None:
        """Compute one batch.

        Parameters
        ----------
        budget_s : float, optional
            Seconds that the batch may take, because streams wait; None: no stream waits.  A text that
            takes longer is computed in pieces, or waits until earlier budgets add up to its time.
        """
        if not self._open:
            return
        now = self.clock()
        self._expire(now)
        if not self._open or not self._is_ready():
            return
        texts = self._plan(budget_s, now)
        if not texts:
            return
        self._saved_s = 0.0
        self._n_batches += 1
        n_tokens: dict[str, int] = {}
        for text in texts:
            text.of.n_batch = self._n_batches
            name = text.of.request.request_id
            n_tokens[name] = n_tokens.get(name, 0) + len(text.rows)
        self.on_batch(n_tokens)
        n_computed = texts[0].n_computed
        try:
            vectors = self.encoder.compute([text.rows for text in texts], n_computed)
        except ModelChangedError:
            raise
        except Exception as error:
            self.on_batch({})
            self._after_failure(texts, error)
            return
        self.on_batch({})
        n_rows = sum(n_tokens.values())
        seconds = self.clock() - now
        self.cost.observe(n_rows, n_rows * n_computed + n_rows * n_rows // 2, seconds)
        self.recorder.n_embedding_batches += 1
        self.recorder.n_embedded_tokens += n_rows
        self.recorder.embed_s += seconds
        if (rest := texts[0].rest) is not None:
            self._begun = rest
            return
        self.recorder.n_embedded_texts += len(texts)
        self._commit(texts, vectors)

    def _is_ready(self) -> bool:
        """Return True if there is an encoder; if it cannot be made, all waiting texts fail."""
        try:
            self.encoder.open()
        except Exception as error:
            logger.warning("texts cannot be embedded: %s", error)
            for request_id in list(self._open):
                self._fail(request_id, EmbeddingError.of(request_id, error))
            return False
        return True

    def _plan(self, budget_s: float | None, now: float) -> list[_Text]:
        """Return the texts of the next batch: the requests take turns, the most urgent first.

        Each gives its longest text that fits, so that short texts fill the rest of the batch.
        """
        begun, self._begun = self._begun, None
        if begun is not None and self._open.get(begun.of.request.request_id) is begun.of:
            return self._piece(begun, budget_s)
        while self._alone:
            text = self._alone.popleft()
            if self._open.get(text.of.request.request_id) is text.of:
                return [text]
        requests = sorted(
            (o for o in self._open.values() if o.waiting),
            key=lambda o: (aged_priority(o.request, now), o.n_batch, o.request.serial),
        )
        shortest = requests[0].waiting[0][0]
        n_affordable = self._n_affordable(budget_s, 0)
        if shortest > n_affordable:
            if self.encoder.computes_in_pieces:
                first = requests[0].take_longest(shortest)
                assert first is not None
                return self._piece(first, budget_s)
            if not self._has_saved(budget_s, 0, shortest):
                return []
            n_affordable = shortest
        encoder = self.encoder
        n_left, texts = min(encoder.n_batch, n_affordable), list[_Text]()
        while requests and len(texts) < encoder.n_texts_max:
            taking, requests = requests, []
            for request in taking:
                taken = request.take_longest(n_left) if len(texts) < encoder.n_texts_max else None
                if taken is not None:
                    if not texts:
                        n_left = min(n_left, encoder.n_batch_target)
                    texts.append(taken)
                    n_left -= len(taken.tokens)
                    requests.append(request)
        return texts

    def _piece(self, text: _Text, budget_s: float | None) -> list[_Text]:
        """Return the piece of a text that the time allows: at least `MIN_PIECE` tokens, or the rest.

        The time is `budget_s`, or `IDLE_BATCH_S` if None.  The list is empty if the smallest piece takes longer;
        budgets then add up until a later call.
        """
        n_rows = min(text.n_left, max(MIN_PIECE, self._n_affordable(budget_s, text.n_computed)))
        if n_rows <= MIN_PIECE and not self._has_saved(budget_s, text.n_computed, n_rows):
            self._begun = text
            return []
        return [replace(text, n_rows=n_rows)]

    def _n_affordable(self, budget_s: float | None, n_computed: int) -> int:
        """Return how many more tokens a batch has time for after `n_computed` tokens of a text."""
        seconds = IDLE_BATCH_S if budget_s is None else budget_s
        return self.cost.n_prompt_rows((), n_computed, seconds) if seconds > 0.0 else 0

    def _has_saved(self, budget_s: float | None, n_computed: int, n_rows: int) -> bool:
        """Save `budget_s`, and return True if the time saved so far is enough for `n_rows` tokens."""
        if budget_s is None:
            return True
        self._saved_s += max(0.0, budget_s)
        cells = n_rows * n_computed + n_rows * n_rows / 2
        return self._saved_s >= self.cost.seconds(n_rows, cells)

    def _commit(self, texts: Sequence[_Text], vectors: NDArray[np.float32]) -> None:
        """Give the vectors to their requests."""
        for text, vector in zip(texts, vectors, strict=True):
            owner = text.of
            if np.isfinite(vector).all():
                owner.vectors[text.index] = vector
                owner.n_left -= 1
                if not owner.n_left:
                    self._finish(owner)
            elif not text.has_failed:  # the NaN may come from another text of the batch
                self._alone.append(_Text(text.of, text.index, has_failed=True))
            else:
                error = CllmError("a vector of the model has NaN or infinity in it")
                name = owner.request.request_id
                self._fail(name, EmbeddingError.of(name, error))
        self._count_waiting()

    def _finish(self, done: _Open) -> None:
        vectors = np.stack([vector for vector in done.vectors if vector is not None])
        name = done.request.request_id
        del self._open[name]
        self._events.append(Embedded(name, vectors.tobytes(), vectors.shape[1]))

    # --- Failures ----------------------------------------------------------------------------
    def _after_failure(self, texts: Sequence[_Text], error: Exception) -> None:
        """Queue the texts of a failed batch again, each alone; fail those that had failed before.

        Texts of an aborted batch return to their requests.
        """
        if isinstance(error, DecodeFailedError) and error.code == ABORTED:
            for text in texts:  # from its beginning, if it was a piece
                text.put_back()
            return
        logger.warning("%s; %d texts were in the batch", error, len(texts))
        self.encoder.close()  # the next batch opens it again
        for text in texts:
            if not text.has_failed:
                self._alone.append(_Text(text.of, text.index, has_failed=True))
                continue
            name = text.of.request.request_id
            self._fail(name, EmbeddingError.of(name, error))

    def _expire(self, now: float) -> None:
        for name, waiting in list(self._open.items()):
            deadline = waiting.request.deadline
            if deadline is not None and now >= deadline:
                self._fail(name, ended_early(name, FinishReason.DEADLINE))

    def _fail(
        self, request_id: str, error: EmbeddingError | DeadlineError | EngineFailedError
    ) -> None:
        del self._open[request_id]
        self._count_waiting()
        self._events.append(Embedded(request_id, error=error))

    def _count_waiting(self) -> None:
        self.recorder.n_waiting_texts = sum(o.n_left for o in self._open.values())
