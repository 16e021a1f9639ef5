"""Commands from the event loop to the inference thread, and the events that answer them.

Frozen values, so that neither side can change what the other has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cllm.engine.core.media_store import EncodedChunk
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.embedding import EmbeddingRequest
from cllm.engine.health import Restart
from cllm.engine.lora import LoraInfo
from cllm.engine.media import MediaPiece, Shape
from cllm.engine.output import Completion, TokenDelta
from cllm.engine.request import GenerationRequest, ModelInfo, SequenceState
from cllm.errors import (
    CllmError,
    DeadlineError,
    EmbeddingError,
    EngineFailedError,
    GenerationError,
)

MAX_STATE_BYTES = 1 << 30  # largest KV state that is sent to another process


# --- Questions --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Audit:
    """Compare the bookkeeping with llama.cpp's.  The answer has a text for each discrepancy."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Return a `LiveView`.  Ticks are recorded for the next view, for some time after each question."""


@dataclass(frozen=True, slots=True)
class LoadLora:
    """Load an adapter.  The answer is a `LoadedLoras`.

    Attributes
    ----------
    scale : float
        Scale for requests that name no adapters; 0: they do not use it.
    """

    name: str
    path: str
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class UnloadLora:
    """Free an adapter when no request uses it any more.  The answer is a `LoadedLoras`."""

    name: str


@dataclass(frozen=True, slots=True)
class EraseSlot:
    """Free the cells of a cached prefix.  The answer is the number of its tokens, 0 without one."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class LayoutMedia:
    """Return the chunks and tokens of an image or audio of this shape, as a `MediaLayout`."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class ClearPrefixCache:
    """Drop all cached prefixes of finished requests, also in host memory and files.  The answer is empty."""


Question = Audit | Inspect | LoadLora | UnloadLora | EraseSlot | LayoutMedia | ClearPrefixCache


# --- Commands: event loop → inference thread --------------------------------------------------
@dataclass(frozen=True, slots=True)
class AddRequest:
    """Start this request.  Answered by events with its `request_id`, the last a `Finished`."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class AddEmbedding:
    """Compute the vectors of these texts.  Answered by one `Embedded` with its `request_id`."""

    request: EmbeddingRequest


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop working on this request.  Unknown and finished ids are ignored.

    Attributes
    ----------
    saves_state : bool
        True if its `Finished` should carry the KV state of the request, if that can be saved.
    """

    request_id: str
    saves_state: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Report that the reader has taken deltas: as many more may be computed."""

    request_id: str
    n_deltas: int


@dataclass(frozen=True, slots=True)
class PrefixLoaded:
    """A file of the prefix cache was read.  Without a state, it is unusable or gone.

    Sent by the thread of `PrefixFiles`.
    """

    file: str
    state: SequenceState | None


@dataclass(frozen=True, slots=True)
class PrefixesRemoved:
    """All files of the prefix cache are removed.  Sent by the thread of `PrefixFiles`."""


@dataclass(frozen=True, slots=True)
class MediaEncoded:
    """Embeddings of one media chunk, or the error that prevented them.  Sent by the encoder's thread.

    Attributes
    ----------
    digest : bytes
        `MediaInput.digest` of the image or audio.
    ordinal : int
        Number of the chunk in it, from 0.
    """

    digest: bytes
    ordinal: int
    chunk: EncodedChunk | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class MediaMeasured:
    """The layout of some audio is known: questions about it can be answered.  Sent by the encoder."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, or something to be done between two ticks.  Answered by one `Answered`.

    Attributes
    ----------
    call_id : int
        Number that the answer repeats.
    question : Question
    """

    call_id: int
    question: Question


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget the question with this `call_id`: its caller has left.  An answered one is ignored."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Cancel everything and end the thread.  Answered by `Stopped` and `Ended`."""


Command = (
    AddRequest
    | AddEmbedding
    | CancelRequest
    | Read
    | PrefixLoaded
    | PrefixesRemoved
    | MediaEncoded
    | MediaMeasured
    | Withdraw
    | Ask
    | Shutdown
)


# --- Values in events -----------------------------------------------------------------------------
class SlotState(StrEnum):
    """Purpose for which a seq_id is held."""

    FREE = "free"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    """The request waits for tokens that another sequence computes for both."""
    PAUSED = "paused"
    """The request waits for its reader to take deltas."""
    CACHED = "cached"
    """The prefix cache holds the seq_id."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """State of one seq_id.

    Attributes
    ----------
    request_id : str or None
        Request that holds it; None if it is free or cached.
    n_prompt, n_output : int
        Prompt tokens and output tokens of that request; 0 without one.
    n_computed : int
        Positions in the KV cache; those shared with others count here too.
    n_cached : int
        Prompt tokens that were shared and not computed.
    age_s : float
        Seconds since its request was submitted.
    n_preemptions : int
    media : tuple of (int, int)
        Rows `[start, end)` of each media chunk in the KV cache.
    tenant : str
        Tenant of its request; "" without one.
    waits_for : int or None
        seq_id of the sequence that computes a prefix for it; None if it waits for none.
    """

    seq_id: int
    state: SlotState
    request_id: str | None = None
    n_prompt: int = 0
    n_output: int = 0
    n_computed: int = 0
    n_cached: int = 0
    age_s: float = 0.0
    n_preemptions: int = 0
    media: tuple[tuple[int, int], ...] = ()
    tenant: str = ""
    waits_for: int | None = None


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """Neighbouring positions of one sequence, or of several that share them, in the KV cache.

    Attributes
    ----------
    start, end : int
        Positions `[start, end)`.
    parent : int
        Index of the extent before it in the same sequences, smaller than its own index; -1 for the first.
    seq_ids : tuple of int
        seq_ids that hold it, in ascending order.
    """

    start: int
    end: int
    parent: int
    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TickInfo:
    """One tick.

    Attributes
    ----------
    n_decode_rows, n_prompt_rows, n_draft_rows : int
        Rows of decoding sequences, of prompts, and of drafts in its batch.
    plan_s, decode_s, sample_s : float
        Seconds to plan the batch, to fill and decode it, and to sample and make text.
    started_s : float
        Time at which it began, as of `time.monotonic()`.
    """

    n_decode_rows: int
    n_prompt_rows: int
    n_draft_rows: int
    plan_s: float
    decode_s: float
    sample_s: float
    started_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LiveView:
    """Present state of an engine.

    Attributes
    ----------
    slots : tuple of SlotInfo
        Every seq_id, in order.
    extents : tuple of ExtentInfo
        Content of the KV cache; each cell in use is in exactly one.
    ticks : tuple of TickInfo
        Ticks since the last view, oldest first; the last 512 at most.
    n_waiting : int
        Requests without a seq_id.
    oldest_waiting_s : float
        Seconds since the first of them was submitted; 0 without any.
    """

    slots: tuple[SlotInfo, ...]
    extents: tuple[ExtentInfo, ...] = ()
    ticks: tuple[TickInfo, ...] = ()
    n_waiting: int = 0
    oldest_waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadedLoras:
    """The adapters that are loaded now."""

    loras: tuple[LoraInfo, ...]


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """The chunks and tokens of images or audio of one shape, in order."""

    pieces: tuple[MediaPiece, ...]


Answer = tuple[str, ...] | LiveView | LoadedLoras | int | MediaLayout


# --- Events: inference thread → event loop ----------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and requests are served."""

    model: ModelInfo
    statistics: EngineStatistics


@dataclass(frozen=True, slots=True)
class Progressed:
    """One more token of a request."""

    request_id: str
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class Finished:
    """End of a request, with its last delta: exactly one for each `AddRequest`.

    Attributes
    ----------
    state : SequenceState or None
        KV state of a request that was cancelled with `saves_state`; None if it was not saved.
    """

    request_id: str
    delta: TokenDelta
    completion: Completion
    error: GenerationError | EngineFailedError | None = None
    state: SequenceState | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The end of an `AddEmbedding`: its vectors, or why there are none.

    Attributes
    ----------
    vectors : bytes
        float32 values, `n_values` for each text, in the order of the texts; empty with an error.
    """

    request_id: str
    vectors: bytes = b""
    n_values: int = 0
    error: EmbeddingError | DeadlineError | EngineFailedError | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an `Ask`: a value, or an error."""

    call_id: int
    value: Answer | None = None
    error: CllmError | None = None


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine's process crashed, and a new one serves."""

    restart: Restart


@dataclass(frozen=True, slots=True)
class Stopped:
    """The thread serves no more requests.  With an error: it has failed, or could not load."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The thread has freed everything and ends: the last event of all."""


Event = Ready | Progressed | Finished | Embedded | Answered | Restarted | Stopped | Ended
