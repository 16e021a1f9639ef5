"""FakeDecoder: a `Decoder` without libllama, for tests of everything above it.

Its KV cache is a dict of token lists, and its logits come from a function of *all* the tokens a
sequence has there: a row in the wrong place, or one too many, changes every later token.  It
refuses what `Context.decode` refuses, with the same errors, and fails where a test says so.

`conformance.check_decoder` is the authority on how a decoder behaves; the fake passes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cllm.checks import INT32_MAX, check_int
from cllm.errors import (
    DecodeFailedError,
    InvalidArgumentError,
    InvalidBatchError,
    NoKVSlotError,
    PositionError,
)

LLAMA_MAX_SEQ = 256
REMOVED = -1

Answer = Callable[[Sequence[int]], int]
Fault = int | Exception | Literal["nan"]


class FakeVocabulary:
    """A vocabulary of the 256 bytes, one token each, and two control tokens.

    Attributes
    ----------
    BEGIN, END : int
        256 and 257.  Neither has a piece; END ends a generation.
    n_tokens : int
    """

    BEGIN = 256
    END = 257
    n_tokens = 258

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for a control token."""
        check_int("token", token, 0, self.n_tokens - 1)
        return bytes([token]) if token < self.BEGIN else b""

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        return token == self.END


@dataclass(frozen=True, slots=True)
class FakeRun:
    """Consecutive rows of one sequence in the batch; the last `n_outputs` have logits."""

    seq_id: int
    p0: int
    tokens: tuple[int, ...]
    n_outputs: int


class FakeDecoder:
    """A context and its batch, in Python.

    Parameters
    ----------
    n_vocab, n_ctx, n_seq_max, n_batch : int
        Tokens of the vocabulary, KV cells in all, sequences, rows of a batch.
    kv_unified : bool
        False gives each sequence its own share of `n_ctx`.
    answer : callable, optional
        The token that has the highest logit after these tokens of a sequence.  By default a hash
        of all of them.
    faults : mapping, optional
        What happens instead at the n-th decode, counted from 1 as in `n_decodes`.  A code of
        `llama_decode`: 1 and -1 store nothing; 2 and less than -1 store the first half of the rows,
        rounded up.  An exception: raised, nothing is stored.  "nan": the first output row is NaN.

    Attributes
    ----------
    cells : dict of int to list of int
        The tokens of each sequence by position; REMOVED where `seq_rm` left a hole.  A sequence
        without tokens has no entry.
    runs : list of FakeRun
        The batch.
    faults : dict
        As given; may be changed.
    n_decodes : int
        Batches that passed the checks.
    n_ctx_seq : int
        Positions that one sequence can have.
    n_outputs_max : int
        Output rows of a batch at the most: `n_seq_max`, as in the engine's context.
    """

    def __init__(
        self,
        *,
        n_vocab: int = FakeVocabulary.n_tokens,
        n_ctx: int = 64,
        n_seq_max: int = 4,
        n_batch: int = 16,
        kv_unified: bool = True,
        answer: Answer | None = None,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        self.n_vocab = check_int("n_vocab", n_vocab, 1, INT32_MAX)
        self.n_seq_max = check_int("n_seq_max", n_seq_max, 1, LLAMA_MAX_SEQ)
        self.n_ctx = check_int("n_ctx", n_ctx, n_seq_max, INT32_MAX)
        self.n_batch = check_int("n_batch", n_batch, n_seq_max, INT32_MAX)
        self.n_ctx_seq = n_ctx if kv_unified else n_ctx // n_seq_max
        self.n_outputs_max = n_seq_max
        self.answer: Answer = self._hash if answer is None else answer
        self.faults: dict[int, Fault] = dict(faults or {})
        self.cells: dict[int, list[int]] = {}
        self.runs: list[FakeRun] = []
        self.n_decodes = 0
        self._logits = np.empty((0, n_vocab), np.float32)

    # --- The batch ---------------------------------------------------------------------------
    @property
    def n_rows(self) -> int:
        """Rows in the batch."""
        return sum(len(run.tokens) for run in self.runs)

    @property
    def n_outputs(self) -> int:
        """Output rows in the batch."""
        return sum(run.n_outputs for run in self.runs)

    def clear(self) -> None:
        """Forget the rows added so far."""
        self.runs.clear()

    def add(self, seq_id: int, tokens: Sequence[int], p0: int, *, n_outputs: int = 0) -> range:
        """Add consecutive tokens of one sequence, the last `n_outputs` with logits.

        Returns
        -------
        range
            Its output rows among all output rows of the batch.

        Raises
        ------
        PositionError
            The sequence is in the batch already and `p0` does not continue it.
        InvalidArgumentError
            Too many rows, or a value out of range.  Whatever is raised, the batch is unchanged.
        """
        check_int("rows", len(tokens), 1, self.n_batch - self.n_rows)
        check_int("seq_id", seq_id, 0, LLAMA_MAX_SEQ - 1)
        check_int("p0", p0, 0, INT32_MAX - len(tokens))
        check_int("n_outputs", n_outputs, 0, len(tokens))
        ends = {run.seq_id: run.p0 + len(run.tokens) for run in self.runs}
        if ends.get(seq_id, p0) != p0:
            raise PositionError(seq_id, ends[seq_id] - 1, p0)
        checked = tuple(check_int("token", token, 0, INT32_MAX) for token in tokens)
        start = self.n_outputs
        self.runs.append(FakeRun(seq_id, p0, checked, n_outputs))
        return range(start, start + n_outputs)

    # --- Decoding ----------------------------------------------------------------------------
    def decode(self) -> NDArray[np.float32]:
        """Store the rows of the batch and return the logits of its output rows.

        Returns
        -------
        ndarray
            float32, shape `(n_outputs, n_vocab)`: 1 for the answer, 0 for the others.  The next
            decode overwrites it with NaN.

        Raises
        ------
        PositionError, InvalidArgumentError, NoKVSlotError, InvalidBatchError, DecodeFailedError
            As `Context.decode` does.
        """
        self._check_batch()
        self._logits.fill(np.nan)
        self.n_decodes += 1
        fault = self.faults.get(self.n_decodes, 0)
        if isinstance(fault, Exception):
            raise fault
        if fault == 1 or self.n_cells_used + self.n_rows > self.n_ctx:
            raise NoKVSlotError("llama_decode", 1, "no room in the KV cache")
        if fault == -1:
            raise InvalidBatchError("llama_decode", -1, "invalid batch")
        if fault not in (0, "nan"):
            self._store((self.n_rows + 1) // 2)
            meaning = "aborted" if fault == 2 else "fatal error"
            raise DecodeFailedError("llama_decode", int(fault), meaning)
        self._logits = self._one_hot(self._store(self.n_rows))
        if fault == "nan":
            self._logits[:1] = np.nan
        return self._logits

    def _check_batch(self) -> None:
        check_int("rows", self.n_rows, 1, self.n_batch)
        check_int("output rows", self.n_outputs, 0, self.n_outputs_max)
        highest = max(token for run in self.runs for token in run.tokens)
        if highest >= self.n_vocab:
            raise InvalidArgumentError("token", highest, f"0 to {self.n_vocab - 1}")
        ends: dict[int, int] = {}
        for run in self.runs:
            check_int("seq_id", run.seq_id, 0, self.n_seq_max - 1)
            end = run.p0 + len(run.tokens)
            check_int("position", end - 1, 0, self.n_ctx_seq - 1)
            last = ends.get(run.seq_id, len(self.cells.get(run.seq_id, ())) - 1)
            if run.p0 != last + 1:
                raise PositionError(run.seq_id, last, run.p0)
            ends[run.seq_id] = end - 1

    def _store(self, n_rows: int) -> list[int]:
        """Store the first `n_rows` rows; the answers of the output rows among them."""
        answers = []
        for run in self.runs:
            first_output = len(run.tokens) - run.n_outputs
            for index, token in enumerate(run.tokens[:n_rows]):
                stored = self.cells.setdefault(run.seq_id, [])
                stored.append(token)
                if index >= first_output:
                    answers.append(self.answer([t for t in stored if t != REMOVED]))
            n_rows = max(0, n_rows - len(run.tokens))
        return answers

    def _one_hot(self, answers: list[int]) -> NDArray[np.float32]:
        logits = np.zeros((len(answers), self.n_vocab), np.float32)
        logits[np.arange(len(answers)), answers] = 1.0
        return logits

    def _hash(self, prefix: Sequence[int]) -> int:
        return zlib.crc32(np.asarray(prefix, np.int32).tobytes()) % self.n_vocab

    # --- The KV cache ------------------------------------------------------------------------
    @property
    def n_cells_used(self) -> int:
        """Cells that hold a token."""
        return sum(token != REMOVED for stored in self.cells.values() for token in stored)

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions `[p0, p1)`; all of the sequence by default.  Always True."""
        check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
        first = 0 if p0 is None else check_int("p0", p0, 0, INT32_MAX - 1)
        end = INT32_MAX if p1 is None else check_int("p1", p1, first + 1, INT32_MAX)
        stored = self.cells.pop(seq_id, [])
        left = [REMOVED if first <= p < end else token for p, token in enumerate(stored)]
        while left and left[-1] == REMOVED:
            left.pop()
        if left:
            self.cells[seq_id] = left
        return True

    def seq_pos_min(self, seq_id: int) -> int | None:
        """The first position the cache holds for a sequence; None if it is empty."""
        check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
        stored = self.cells.get(seq_id, ())
        return next((p for p, token in enumerate(stored) if token != REMOVED), None)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """The last position the cache holds for a sequence; None if it is empty."""
        check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
        return len(self.cells[seq_id]) - 1 if seq_id in self.cells else None

    def __repr__(self) -> str:
        return (
            f"<FakeDecoder seqs={len(self.cells)}/{self.n_seq_max} "
            f"cells={self.n_cells_used}/{self.n_ctx} decodes={self.n_decodes}>"
        )
