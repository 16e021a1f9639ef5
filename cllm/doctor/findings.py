"""Findings of the doctor: frozen values, with every number that led to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    Attributes
    ----------
    name : str
    status : Status
    text : str
        Description of the result, on one line.
    """

    name: str
    status: Status
    text: str


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a request, in tokens."""

    n_prompt: int
    n_output: int

    @property
    def n_rows(self) -> int:
        """Number of rows to decode: all tokens but the last output token."""
        return self.n_prompt + self.n_output - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Number and size of the requests of each experiment.

    Attributes
    ----------
    shape : Shape
    n_requests : int
        Identical requests of one experiment; "restart at 0" has two, and in "resend history" the prompts grow.
    n_seq_ids : int
        seq_ids of each context.
    estimated_s : float
        Seconds of all experiments together, estimated before they ran; 0 without an estimate.
    """

    shape: Shape
    n_requests: int
    n_seq_ids: int
    estimated_s: float

    @property
    def n_ctx(self) -> int:
        """Cells for all requests of an experiment together, so that it has room even if none is cleared."""
        return self.n_requests * self.shape.n_rows


@dataclass(frozen=True, slots=True)
class Measurement:
    """One request of an experiment.

    Attributes
    ----------
    seq_id : int
    n_rows : int
        Rows passed to `llama_decode`.
    pos_max : int or None
        `seq_pos_max` of its seq_id after its last row.
    n_cells : int
        Cells that all seq_ids together held then.
    cleared_seq_id : int or None
        The seq_id that `seq_rm` was called for when it ended; None: it was not called.
    pos_left : int or None
        `seq_pos_max` of its seq_id after that; None: the sequence is gone.
    n_cells_left : int
        Cells that all seq_ids together held then.
    n_ahead : int
        Requests that were waiting when it was submitted.
    decode_s : float
        Seconds inside `llama_decode`.
    latency_s : float
        Seconds from submit to end, as its client sees them.
    """

    seq_id: int
    n_rows: int
    pos_max: int | None
    n_cells: int
    cleared_seq_id: int | None
    pos_left: int | None
    n_cells_left: int
    n_ahead: int
    decode_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Batch whose positions do not continue its sequence, and its errors.

    Attributes
    ----------
    seq_id : int
    last_pos, first_pos : int
        X, the last position of the sequence, and Y, the first position of the batch.
    error : str
        Text of the `PositionError` that the bindings raise instead of a call.
    code : int
        Code that `llama_decode` returns if it is called without that check.
    message : str
        Errors that llama.cpp logs then, one a line; may be empty.
    is_unchanged : bool
        True if the last position of sequence 0 and the number of used cells are the same afterwards.
    """

    seq_id: int
    last_pos: int
    first_pos: int
    error: str
    code: int
    message: str
    is_unchanged: bool


class Cause(StrEnum):
    """Cause of a pattern of rows, positions and cells."""

    FLAT = "flat"
    NOT_CLEARED = "not cleared"
    WRONG_SEQ_ID = "wrong seq_id cleared"
    CLEARED_ON_REUSE = "cleared on reuse"
    POSITIONS_RESTARTED = "positions restarted"
    HISTORY_RESENT = "history sent again"
    QUEUEING = "queueing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause, and the sentence that names it with its numbers."""

    cause: Cause
    text: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """Identical requests, one after another, and their measurements.

    Attributes
    ----------
    name : str
    question : str
        Description of the experiment, on one line.
    expected : Cause
        Diagnosis with a working llama.cpp.
    requests : tuple of Measurement
    refusal : Refusal or None
        Rejected batch; None in all experiments but "restart at 0".
    diagnosis : Diagnosis
        Cause that follows from the measured rows, positions and cells; times are not used.
    """

    name: str
    question: str
    expected: Cause
    requests: tuple[Measurement, ...]
    refusal: Refusal | None
    diagnosis: Diagnosis

    @property
    def is_expected(self) -> bool:
        """True if the diagnosed cause is the expected one."""
        return self.diagnosis.cause is self.expected


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Answer to the question "does latency grow over identical requests here?".

    `grows` is False if the diagnosis of "clear on finish" is `Cause.FLAT`.  `text` is the answer.
    """

    grows: bool
    text: str


Finding = Check | Plan | Experiment | Conclusion


@dataclass(frozen=True, slots=True)
class Report:
    """All findings of one examination, in order."""

    findings: tuple[Finding, ...]

    @property
    def checks(self) -> list[Check]:
        """The checks alone."""
        return [finding for finding in self.findings if isinstance(finding, Check)]

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments alone; none if the model could not be used."""
        return [finding for finding in self.findings if isinstance(finding, Experiment)]

    @property
    def conclusion(self) -> Conclusion | None:
        """The answer; None if the model could not be used."""
        return next((f for f in self.findings if isinstance(f, Conclusion)), None)

    @property
    def is_healthy(self) -> bool:
        """True if no check failed and every experiment has its expected diagnosis."""
        is_sound = all(check.status is not Status.FAILED for check in self.checks)
        return is_sound and all(experiment.is_expected for experiment in self.experiments)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for `json.dumps`."""
        plan = next((f for f in self.findings if isinstance(f, Plan)), None)
        return {
            "healthy": self.is_healthy,
            "checks": [asdict(check) for check in self.checks],
            "plan": None if plan is None else asdict(plan),
            "experiments": [
                asdict(experiment) | {"is_expected": experiment.is_expected}
                for experiment in self.experiments
            ],
            "conclusion": None if self.conclusion is None else asdict(self.conclusion),
        }
