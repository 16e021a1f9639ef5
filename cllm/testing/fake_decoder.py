"""FakeDecoder: a `Decoder` without libllama, for tests of everything above it.

Its KV cache is a dict of lists of cells, and its logits come from a function of *all* the tokens a
sequence has there: a row in the wrong place, or one too many, changes every later token.  It
refuses what `Context` refuses, with the same errors, and fails where a test says so.

`conformance.check_decoder` is the authority on how a decoder behaves; the fake passes it.
"""

from __future__ import annotations

import zlib
from collections import Counter
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
    LlamaCallError,
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

    def spelling(self, token: int) -> bytes:
        """The bytes of a token; of a control token, its name."""
        return self.piece(token) or (b"<begin>", b"<end>")[token - self.BEGIN]

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


Poison = Callable[[FakeRun], Fault | None]


@dataclass(eq=False, slots=True)
class _Cell:
    """One cell of the KV cache, which several sequences may hold."""

    token: int


class FakeDecoder:
    """A context and its batch, in Python.

    Parameters
    ----------
    n_vocab, n_ctx, n_seq_max, n_batch : int
        Tokens of the vocabulary, KV cells in all, sequences, rows of a batch.
    kv_unified : bool
        False gives each sequence its own share of `n_ctx`.
    n_outputs_max : int, optional
        Output rows of a batch at the most; None: `n_seq_max`.
    answer : callable, optional
        The token that has the highest logit after these tokens of a sequence.  By default a hash
        of all of them.
    faults : mapping, optional
        What happens instead at the n-th decode, counted from 1 as in `n_decodes`.  A code of
        `llama_decode`: 1 and -1 store nothing; 2 and less than -1 store the first half of the rows,
        rounded up.  An exception: raised, nothing is stored.  "nan": the first output row is NaN.
    poison : callable, optional
        Asked for every run of every batch before it is computed: a fault that belongs to a request
        and happens as often as it is tried.  The first answer that is not None happens; "nan" makes
        the output rows of the runs it was answered for NaN.  `faults` come first.
    call_faults : mapping, optional
        What happens instead at the k-th call, counted from 1 as in `n_calls`, of a method, by
        `(name, k)`.  An exception: raised, nothing is done.  False: nothing is done; `seq_rm`
        returns False, `state_seq_get_data` returns `b""`, `state_seq_set_data` refuses the data.

    Attributes
    ----------
    runs : list of FakeRun
        The batch.
    faults, call_faults : dict
        As given; may be changed, and so may `poison`.
    n_decodes : int
        Batches that passed the checks.
    n_calls : Counter of str
        Calls of `seq_rm`, `seq_cp`, `state_seq_get_data`, `state_seq_set_data` and `rebuild`.
    n_rebuilds : int
        Those of `rebuild` that did what they should.
    n_ctx_seq : int
        Positions that one sequence can have.
    """

    def __init__(
        self,
        *,
        n_vocab: int = FakeVocabulary.n_tokens,
        n_ctx: int = 64,
        n_seq_max: int = 4,
        n_batch: int = 16,
        kv_unified: bool = True,
        n_outputs_max: int | None = None,
        answer: Answer | None = None,
        faults: Mapping[int, Fault] | None = None,
        poison: Poison | None = None,
        call_faults: Mapping[tuple[str, int], bool | Exception] | None = None,
    ) -> None:
        self.n_vocab = check_int("n_vocab", n_vocab, 1, INT32_MAX)
        self.n_seq_max = check_int("n_seq_max", n_seq_max, 1, LLAMA_MAX_SEQ)
        self.n_ctx = check_int("n_ctx", n_ctx, n_seq_max, INT32_MAX)
        self.n_batch = check_int("n_batch", n_batch, n_seq_max, INT32_MAX)
        self.kv_unified = kv_unified
        self.n_ctx_seq = n_ctx if kv_unified else n_ctx // n_seq_max
        n_outputs = n_seq_max if n_outputs_max is None else n_outputs_max
        self.n_outputs_max = check_int("n_outputs_max", n_outputs, n_seq_max, n_batch)
        self.answer: Answer = self._hash if answer is None else answer
        self.faults: dict[int, Fault] = dict(faults or {})
        self.poison = poison
        self.call_faults: dict[tuple[str, int], bool | Exception] = dict(call_faults or {})
        self.runs: list[FakeRun] = []
        self.n_decodes = self.n_rebuilds = 0
        self.n_calls: Counter[str] = Counter()
        # None where `seq_rm` left a hole; no sequence is empty or ends with one.
        self._held: dict[int, list[_Cell | None]] = {}
        self._pending_copies: set[int] = set()
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

        Returns the indices of its output rows among those of the batch.  Whatever is raised, the
        batch is unchanged; see `Batch.add`.
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
        poison = [None if self.poison is None else self.poison(run) for run in self.runs]
        fault = self._fault(poison)
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
        answers = self._store(self.n_rows)
        self._logits = np.zeros((len(answers), self.n_vocab), np.float32)
        self._logits[np.arange(len(answers)), answers] = 1.0
        self._pending_copies.clear()
        if fault == "nan":
            self._logits[:1] = np.nan
        is_poisoned = [answer == "nan" for answer in poison]
        self._logits[np.repeat(is_poisoned, [run.n_outputs for run in self.runs])] = np.nan
        return self._logits

    def _fault(self, poison: Sequence[Fault | None]) -> Fault:
        """What happens at this decode; "nan" is only the scripted one, of the first output row."""
        scripted: Fault = self.faults.get(self.n_decodes, 0)
        first: Fault = next((answer for answer in poison if answer is not None), "nan")
        return first if scripted in (0, "nan") and first != "nan" else scripted

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
            last = ends.get(run.seq_id, len(self._held.get(run.seq_id, ())) - 1)
            if run.p0 != last + 1:
                raise PositionError(run.seq_id, last, run.p0)
            ends[run.seq_id] = end - 1

    def _store(self, n_rows: int) -> list[int]:
        """Store the first `n_rows` rows; the answers of the output rows among them."""
        answers = []
        for run in self.runs:
            first_output = len(run.tokens) - run.n_outputs
            for index, token in enumerate(run.tokens[:n_rows]):
                held = self._held.setdefault(run.seq_id, [])
                held.append(_Cell(token))
                if index >= first_output:
                    answers.append(self.answer([cell.token for cell in held if cell is not None]))
            n_rows = max(0, n_rows - len(run.tokens))
        return answers

    def _hash(self, prefix: Sequence[int]) -> int:
        return zlib.crc32(np.asarray(prefix, np.int32).tobytes()) % self.n_vocab

    # --- The KV cache ------------------------------------------------------------------------
    @property
    def cells(self) -> dict[int, list[int]]:
        """The tokens of every sequence that has any, by position; REMOVED where one is missing."""
        return {
            seq_id: [REMOVED if cell is None else cell.token for cell in held]
            for seq_id, held in self._held.items()
        }

    @property
    def n_cells_used(self) -> int:
        """Cells that hold a token, however many sequences share them."""
        return len({cell for held in self._held.values() for cell in held if cell is not None})

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions `[p0, p1)`; all of the sequence by default.  True unless scripted."""
        if self._fails("seq_rm"):
            return False
        self._check_seq("seq_id", seq_id)
        first, end = self._check_range(p0, p1)
        held = self._held.pop(seq_id, [])
        self._hold(seq_id, [None if first <= p < end else cell for p, cell in enumerate(held)])
        return True

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        """Let an empty sequence share positions `[p0, p1)` of another; see `Memory.seq_cp`."""
        if self._fails("seq_cp"):
            return
        self._check_seq("seq_id_src", seq_id_src)
        self._check_seq("seq_id_dst", seq_id_dst)
        first, end = self._check_range(p0, p1)
        if seq_id_src == seq_id_dst:
            raise InvalidArgumentError("seq_id_dst", seq_id_dst, "another than seq_id_src")
        self._check_empty("seq_id_dst", seq_id_dst)
        held = self._held.get(seq_id_src, [])
        if not self.kv_unified:
            if first > 0 or not (p1 is None or 0 < len(held) <= p1):
                raise InvalidArgumentError("[p0, p1)", (p0, p1), "everything (per-sequence layout)")
            self._pending_copies |= {seq_id_src, seq_id_dst}
            held = [cell and _Cell(cell.token) for cell in held]
        self._hold(seq_id_dst, [c if first <= p < end else None for p, c in enumerate(held)])

    def seq_pos_min(self, seq_id: int) -> int | None:
        """The first position the cache holds for a sequence; None if it is empty."""
        self._check_seq("seq_id", seq_id)
        held = self._held.get(seq_id, ())
        return next((p for p, cell in enumerate(held) if cell is not None), None)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """The last position the cache holds for a sequence; None if it is empty."""
        self._check_seq("seq_id", seq_id)
        return len(self._held[seq_id]) - 1 if seq_id in self._held else None

    def state_seq_get_data(self, seq_id: int) -> bytes:
        """A copy of what the cache holds for a sequence; empty if it holds nothing."""
        if self._fails("state_seq_get_data"):
            return b""
        self._check_seq("seq_id", seq_id)
        self._check_copied(seq_id)
        if seq_id not in self._held:
            return b""
        tokens = np.asarray(self.cells[seq_id], np.int32).tobytes()
        return zlib.crc32(tokens).to_bytes(4, "little") + tokens

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        """Restore a copy into an empty sequence; finds all damage, where llama.cpp finds some."""
        is_refused = self._fails("state_seq_set_data")
        self._check_seq("seq_id", seq_id)
        check_int("n_positions", n_positions, 1, self.n_ctx_seq)
        self._check_copied(seq_id)
        if not isinstance(data, bytes | bytearray | memoryview) or not data:
            raise InvalidArgumentError("data", data, "a copy made by state_seq_get_data")
        self._check_empty("seq_id", seq_id)
        checksum, saved = bytes(data[:4]), bytes(data[4:])
        is_sound = zlib.crc32(saved).to_bytes(4, "little") == checksum and not is_refused
        tokens = np.frombuffer(saved, np.int32).tolist() if is_sound else []
        n_cells = len(tokens) - tokens.count(REMOVED)
        if len(tokens) != n_positions or self.n_cells_used + n_cells > self.n_ctx:
            raise LlamaCallError("llama_state_seq_set_data", 0, "restored positions (None, None)")
        self._hold(seq_id, [None if token == REMOVED else _Cell(token) for token in tokens])

    def rebuild(self) -> None:
        """Make an empty context with the same parameters; the batch and the counters stay."""
        if self._fails("rebuild"):
            return
        self._held.clear()
        self._pending_copies.clear()
        self._logits.fill(np.nan)
        self.n_rebuilds += 1

    def _hold(self, seq_id: int, cells: list[_Cell | None]) -> None:
        """Make these the cells of an empty sequence."""
        while cells and cells[-1] is None:
            cells.pop()
        if cells:
            self._held[seq_id] = cells

    def _fails(self, method: str) -> bool:
        """Count a call and raise its scripted exception; whether it shall do nothing."""
        self.n_calls[method] += 1
        fault = self.call_faults.get((method, self.n_calls[method]), True)
        if isinstance(fault, Exception):
            raise fault
        return not fault

    def _check_seq(self, field: str, seq_id: int) -> None:
        check_int(field, seq_id, 0, self.n_seq_max - 1)

    def _check_range(self, p0: int | None, p1: int | None) -> tuple[int, int]:
        first = 0 if p0 is None else check_int("p0", p0, 0, INT32_MAX - 1)
        return first, INT32_MAX if p1 is None else check_int("p1", p1, first + 1, INT32_MAX)

    def _check_empty(self, field: str, seq_id: int) -> None:
        if seq_id in self._held:
            raise InvalidArgumentError(field, seq_id, "an empty sequence")

    def _check_copied(self, seq_id: int) -> None:
        if seq_id in self._pending_copies:
            raise InvalidArgumentError("seq_id", seq_id, "one whose seq_cp a decode has followed")

    def __repr__(self) -> str:
        return (
            f"<FakeDecoder seqs={len(self._held)}/{self.n_seq_max} "
            f"cells={self.n_cells_used}/{self.n_ctx} decodes={self.n_decodes}>"
        )
