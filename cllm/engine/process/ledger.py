"""Ledger: every open request to the engine's process, and the output that its reader has received.

After a crash, a new process receives the open requests again, with the tokens that they had.  A request
that was being computed at two crashes in a row runs alone.  If the process crashes then, the request ends
with an error, and other requests are not affected.

A process ends the requests that it has: they are finished, cancelled, or late.  The ledger ends cancelled
and late requests that no process works on.  Pure: takes and returns commands and events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cllm.engine.completion_builder import CompletionBuilder
from cllm.engine.core.commands import (
    AddEmbedding,
    AddRequest,
    Answered,
    Ask,
    CancelRequest,
    Command,
    Embedded,
    Event,
    Finished,
    LayoutMedia,
    LoadLora,
    Progressed,
    Question,
    Read,
    UnloadLora,
    Withdraw,
)
from cllm.engine.embedding import EmbeddingRequest, ended_early
from cllm.engine.media import kind_of, size_of
from cllm.engine.media_rows import Spans, n_media_tokens
from cllm.engine.output import Completion, FinishReason, TokenDelta, Usage
from cllm.engine.process.batch_record import Underway
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.row_sampler import resamples
from cllm.errors import (
    EmbeddingError,
    EngineFailedError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
)

# A request that was being computed at this many crashes in a row is suspect: it runs alone.  A question that
# was open at as many ends with an error.
N_CRASHES_SUSPECT = 2
# After this many tokens from one process its crashes no longer count: it would crash at the same token.
N_INNOCENT = 16


@dataclass(slots=True, eq=False)
class OpenCall(ABC):
    """A request to the process, from its submission to its last event.

    Attributes
    ----------
    n_crashes : int
        Number of crashes in a row at which it was being computed.
    n_lives : int
        Number of processes that have received it.
    is_given : bool
        True if the present process has received it.
    is_cancelled : bool
        True if its reader has cancelled it.
    is_recalled : bool
        True if it was cancelled in the present process, to run again later.  Its reader gets no events then.
    """

    request: GenerationRequest | EmbeddingRequest
    n_crashes: int = 0
    n_lives: int = 0
    is_given: bool = False
    is_cancelled: bool = False
    is_recalled: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def has_media(self, digest: bytes) -> bool:
        """True if the prompt has the image or audio with this digest."""
        return False

    @abstractmethod
    def command(self) -> Command:
        """Return the command that submits the request again, with the tokens that its reader has."""

    def end_reason(self, now: float) -> FinishReason | None:
        """Return the reason for which a request must end now; None if it must not."""
        if self.is_cancelled:
            return FinishReason.CANCELLED
        deadline = self.request.deadline
        return FinishReason.DEADLINE if deadline is not None and deadline <= now else None

    @abstractmethod
    def ended(self, reason: FinishReason, now: float) -> Event:
        """Return the last event of a request that was cancelled, or whose deadline has passed."""

    @abstractmethod
    def failed(self, cause: BaseException, now: float, *, is_engine: bool = False) -> Event:
        """Return the last event of a request that failed; `is_engine`: the whole engine has failed."""

    def on_crash(self) -> None:
        """Handle the end of the process that had the request."""
        self.is_given = self.is_recalled = False


@dataclass(slots=True, eq=False)
class OpenEmbedding(OpenCall):
    """Open request for vectors; after a crash all its texts are computed again."""

    request: EmbeddingRequest

    def command(self) -> Command:
        """See `OpenCall`."""
        return AddEmbedding(self.request)

    def ended(self, reason: FinishReason, now: float) -> Event:
        """See `OpenCall`."""
        return Embedded(self.request_id, error=ended_early(self.request_id, reason))

    def failed(self, cause: BaseException, now: float, *, is_engine: bool = False) -> Event:
        """See `OpenCall`."""
        if is_engine:
            return Embedded(self.request_id, error=EngineFailedError.of(cause))
        return Embedded(self.request_id, error=EmbeddingError.of(self.request_id, cause))


@dataclass(slots=True, eq=False)
class OpenRequest(OpenCall):
    """A request for text.

    Attributes
    ----------
    output : CompletionBuilder
        Output that was delivered to its reader.
    n_unread : int
        Number of delivered deltas that the reader has not taken, also of an earlier request.
    n_new : int
        Number of deltas from the present process.
    """

    request: GenerationRequest
    output: CompletionBuilder = field(default_factory=CompletionBuilder)
    n_unread: int = 0
    n_new: int = 0

    def has_media(self, digest: bytes) -> bool:
        """See `OpenCall`."""
        return any(media.digest == digest for media in self.request.media)

    def command(self) -> Command:
        """See `OpenCall`; the output continues after the tokens that were delivered."""
        request = self.request
        if self.output.token_ids or self.n_unread != request.n_unread:
            request = replace(
                request,
                excluded=() if self.output.token_ids else request.excluded,
                generated_token_ids=(*request.generated_token_ids, *self.output.token_ids),
                resamples=resamples(request.params, request.constraint, request.thinking),
                n_unread=self.n_unread,
            )
        return AddRequest(request)

    def on_crash(self) -> None:
        """See `OpenCall`."""
        OpenCall.on_crash(self)
        self.n_new = 0

    def note(self, delta: TokenDelta, now: float) -> None:
        """Note a delta that the reader receives."""
        if self.request.state is not None:  # may be large, and is needed only to begin
            self.request = replace(self.request, state=None)
        self.output.add(delta, now)

    def completion(
        self, reason: FinishReason, stop_reason: str | int | None, now: float, n_cached: int = 0
    ) -> Completion:
        """Return the completion of everything that the reader received."""
        request, first_scored = self.request, self.request.first_scored
        return self.output.completion(
            request.request_id,
            reason,
            stop_reason,
            usage=Usage(
                n_prompt=len(request.prompt_token_ids),
                n_cached=n_cached,
                n_output=0,
                **n_media_tokens(Spans.of(request.prompt_token_ids), request.media),
            ),
            submitted_at=request.submitted_at,
            admitted_at=request.submitted_at,
            ended_at=now,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=None if first_scored is None else [None] * first_scored,
            fingerprint=request.fingerprint,
        )

    def ended(self, reason: FinishReason, now: float) -> Finished:
        """See `OpenCall`."""
        has_logprobs = self.request.params.logprobs is not None
        delta = TokenDelta("", (), reason, logprobs=() if has_logprobs else None)
        self.output.add(delta, now)
        return Finished(self.request_id, delta, self.completion(reason, None, now))

    def failed(self, cause: BaseException, now: float, *, is_engine: bool = False) -> Finished:
        """See `OpenCall`."""
        error: GenerationError | EngineFailedError = GenerationError.of(self.request_id, cause)
        if is_engine:
            error = EngineFailedError.of(cause)
        ended = self.ended(FinishReason.ERROR, now)
        error.completion = ended.completion
        return replace(ended, error=error)


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A question to the process, and the number of crashes in a row that it has met."""

    ask: Ask
    n_crashes: int = 0
    is_asked: bool = False

    def failed(self, cause: Exception) -> Answered | None:
        """Return the answer to a question that may have crashed the process; None if such a question cannot."""
        ended = f"the engine's process ended: {cause}"
        match self.ask.question:
            case LoadLora(path=path):
                return Answered(self.ask.call_id, error=ModelLoadError(path, ended))
            case LayoutMedia(shape):
                limit = f"another size: {ended}"
                error = InvalidRequestError(kind_of(shape), size_of(shape), limit)
                return Answered(self.ask.call_id, error=error)
        return None


class Ledger:
    """All open requests.  One thread at a time.

    Attributes
    ----------
    n_finished : mapping
        Number of requests for text that ended here, by reason; the processes count the others.  Any thread.
    """

    def __init__(self) -> None:
        self._open: dict[str, OpenCall] = {}
        self._questions: dict[int, OpenQuestion] = {}
        self._suspects: deque[OpenCall] = deque()
        self._tried: OpenCall | None = None
        # Last events of requests that have ended here, and that the present process still has; by id.
        self._left: dict[str, Event] = {}
        self._is_up = False
        self.n_finished: Mapping[FinishReason, int] = {}  # replaced, and never changed

    @property
    def requests(self) -> Sequence[OpenCall]:
        """Return the open requests, in the order of their submission."""
        return sorted(self._open.values(), key=lambda r: r.request.serial)

    @property
    def is_trying(self) -> bool:
        """True if a request is tried alone, or will be."""
        return self._tried is not None or bool(self._suspects)

    # --- From the event loop -----------------------------------------------------------------
    def command(self, command: Command) -> list[Command]:
        """Return the commands to send for a command of the event loop: none while its request is held back."""
        match command:
            case AddRequest(request):
                return self._open_call(OpenRequest(request, n_unread=request.n_unread))
            case AddEmbedding(texts):
                return self._open_call(OpenEmbedding(texts))
            case CancelRequest(request_id):
                if (known_or_none := self._open.get(request_id)) is None:
                    return []
                known_or_none.is_cancelled = True
                return [command] if known_or_none.is_given else []  # see `expire`
            case Read(request_id, n_deltas):
                if isinstance(reader := self._open.get(request_id), OpenRequest):
                    reader.n_unread -= n_deltas
                    return [command] if reader.is_given else []
                return []
            case Ask(call_id):
                self._questions[call_id] = OpenQuestion(command)
                return self._ask() if self._is_up else []
            case Withdraw(call_id):
                self._questions.pop(call_id, None)
        return [command] if self._is_up else []

    def _open_call(self, known: OpenCall) -> list[Command]:
        self._open[known.request_id] = known
        is_free = self._is_up and not self.is_trying and known.request_id not in self._left
        return self._give(known) if is_free else []

    @property
    def holds_back(self) -> bool:
        """True unless the process has all requests."""
        return not self._is_up or self.is_trying or bool(self._left)

    def expire(self, now: float, *, is_silent: bool = False) -> list[Event]:
        """End requests that were cancelled, or whose deadline has passed; return the events for the readers.

        A request that the process has is ended by the process, unless `is_silent`: it shows no sign of life.
        To be called after commands, and whenever a deadline may have passed.
        """
        if not (is_silent or self.holds_back):
            return []
        told: list[Event] = []
        for known in list(self._open.values()):
            reason = known.end_reason(now)
            if reason is None or (known.is_given and not is_silent):
                continue
            del self._open[known.request_id]
            ended = known.ended(reason, now)
            if known.is_given:
                self._left[known.request_id] = ended
            else:
                self._count(ended)
            if known is self._tried:
                self._tried = None
            told.append(ended)
        return told

    def _count(self, ended: Event) -> None:
        """Count a request that no process counts."""
        if isinstance(ended, Finished):
            reason = ended.completion.finish_reason
            self.n_finished = {**self.n_finished, reason: self.n_finished.get(reason, 0) + 1}

    # --- From the process --------------------------------------------------------------------
    def events(self, events: Iterable[Event], now: float) -> tuple[list[Event], list[Command]]:
        """Return the events for the readers, and the commands for the process."""
        told: list[Event] = []
        commands: list[Command] = []
        for event in events:
            match event:
                case Progressed(request_id) if request_id in self._left:
                    pass
                case Finished(request_id) | Embedded(request_id) if request_id in self._left:
                    del self._left[request_id]
                    commands += self._next()
                case Progressed(request_id, delta):
                    known = self._open.get(request_id)
                    if not isinstance(known, OpenRequest) or known.is_recalled:
                        continue
                    known.note(delta, now)
                    known.n_unread += 1
                    known.n_new += 1
                    if known.n_new >= N_INNOCENT:
                        known.n_crashes = 0
                    told.append(event)
                    if known is self._tried:
                        commands += self._acquit(known)
                case Finished(request_id) | Embedded(request_id):
                    known = self._open.get(request_id)
                    if known is None:
                        continue
                    if known.is_recalled:
                        known.is_recalled = known.is_given = False
                        if (reason := known.end_reason(now)) is not None:
                            del self._open[request_id]  # the process has counted it
                            told.append(known.ended(reason, now))
                        commands += self._next()
                        continue
                    del self._open[request_id]
                    told.append(self._whole(known, event, now))
                    if known is self._tried:
                        self._tried = None
                        commands += self._next()
                case Answered(call_id):
                    self._questions.pop(call_id, None)
                    told.append(event)
                case _:
                    told.append(event)
        return told, commands + self._ask() if self._questions else commands

    def _whole(self, known: OpenCall, event: Finished | Embedded, now: float) -> Event:
        """Return the last event, with a completion of the output from all processes."""
        if not (isinstance(known, OpenRequest) and isinstance(event, Finished)):
            return event
        known.note(event.delta, now)
        last = event.completion
        if known.n_lives == 1:
            whole = replace(last, prompt_token_ids=known.request.prompt_token_ids)
        else:
            whole = replace(
                known.completion(last.finish_reason, last.stop_reason, now, last.usage.n_cached),
                prompt_logprobs=last.prompt_logprobs,
            )
        if event.error is not None:
            event.error.completion = whole
        return replace(event, completion=whole)

    # --- Crashes -----------------------------------------------------------------------------
    def on_crash(
        self, cause: Exception, underway: Underway, now: float, *, is_own: bool = True
    ) -> list[Event]:
        """Handle the end of the process; return the events for the readers.

        Parameters
        ----------
        underway : Underway
            Work of the process when it ended.
        is_own : bool
            True if that may have caused the end; False, for example, after a lost RPC server.
        """
        self._is_up = False
        told: list[Event] = []
        for known in self._open.values() if is_own else ():
            had_media = known.is_given and known.has_media(underway.media)
            if known.request_id in underway.request_ids or had_media:
                known.n_crashes += 1
        guilty, self._tried = self._tried, None
        if is_own and guilty is not None and guilty.n_crashes > N_CRASHES_SUSPECT:
            del self._open[guilty.request_id]
            told.append(guilty.failed(cause, now))
        for known in self._open.values():
            known.on_crash()
        for ended in (*told, *self._left.values()):
            self._count(ended)
        self._left.clear()
        for question in self._questions.values():
            question.is_asked = False
        told += self._questions_failed(cause) if is_own else []
        suspects = [r for r in self.requests if r.n_crashes >= N_CRASHES_SUSPECT]
        self._suspects = deque(suspects)
        return told

    def _questions_failed(self, cause: Exception) -> list[Event]:
        """Answer questions that have met two crashes with an error, and forget them."""
        told: list[Event] = []
        for call_id, question in list(self._questions.items()):
            question.n_crashes += 1
            if question.n_crashes >= N_CRASHES_SUSPECT and (failed := question.failed(cause)):
                told.append(failed)
                del self._questions[call_id]
        return told

    def on_ready(self) -> list[Command]:
        """Handle a new process; return the commands for it.  To be called after `expire`."""
        self._is_up = True
        return [*self._ask(), *self._next(), *self._ask()]

    def _ask(self) -> list[Command]:
        """Return the open questions that have not been asked and can be.

        The process frees an adapter when it has no request with it.  The question waits while such a request
        is held back or recalled.
        """
        due = [
            question
            for question in self._questions.values()
            if not (question.is_asked or self._is_early(question.ask.question))
        ]
        for question in due:
            question.is_asked = True
        return [question.ask for question in due]

    def _is_early(self, question: Question) -> bool:
        return isinstance(question, UnloadLora) and any(
            isinstance(known, OpenRequest)
            and known.request.lora.uses(question.name)
            and (self.is_trying or known.is_recalled or not known.is_given)
            for known in self._open.values()
        )

    def cancel_all(self, now: float) -> list[Event]:
        """End all requests as cancelled; no process has them any more."""
        return self._end_all(known.ended(FinishReason.CANCELLED, now) for known in self.requests)

    def fail_all(self, cause: BaseException, now: float) -> list[Event]:
        """End all requests with an error."""
        return self._end_all(known.failed(cause, now, is_engine=True) for known in self.requests)

    def _end_all(self, ends: Iterable[Event]) -> list[Event]:
        told = list(ends)
        self._open.clear()
        for ended in (*told, *self._left.values()):
            self._count(ended)
        self._left.clear()
        return told

    def _next(self) -> list[Command]:
        """Return the commands for one suspect alone, or for all waiting requests."""
        if self._tried is not None or any(r.is_recalled for r in self._open.values()):
            return []
        while self._suspects:
            known = self._suspects.popleft()
            is_open = self._open.get(known.request_id) is known
            if is_open and not known.is_given:
                self._tried = known
                return self._give(known)
        waiting = (r for r in self.requests if not (r.is_given or r.request_id in self._left))
        return [command for known in waiting for command in self._give(known)]

    def _acquit(self, known: OpenCall) -> list[Command]:
        """Clear a request that received a token while alone; recall it while other suspects wait."""
        self._tried, known.n_crashes = None, 0
        if not self._suspects:
            return self._next()
        known.is_recalled = True
        return [CancelRequest(known.request_id)]

    def _give(self, known: OpenCall) -> list[Command]:
        """Return the commands that submit a request to the process."""
        known.is_given, known.n_lives = True, known.n_lives + 1
        return [known.command()]
