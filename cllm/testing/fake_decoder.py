"""FakeDecoder: a `Decoder` without libllama, for tests of everything above it.

Its logits come from a function of *all* the tokens a sequence has in its KV cache: a row in the wrong
place, or one too many, changes every later token.  It rejects the same calls as `Context`, with the same
errors, and a test can script its faults.  `tests.simulation.conformance` tests the behavior of decoders.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.checks import INT32_MAX, check_int
from cllm.engine.core.decoder import MediaRows
from cllm.engine.lora import LoraSet
from cllm.errors import (
    DecodeFailedError,
    InvalidArgumentError,
    InvalidBatchError,
    LlamaCallError,
    NoKVSlotError,
    PositionError,
)
from cllm.testing.fake_media import row_ids_of
from cllm.testing.fake_vocabulary import FakeVocabulary

LLAMA_MAX_SEQ = 256
REMOVED = -1

Answer = Callable[[Sequence[int]], int]
Fault = int | Exception | Literal["nan"]
# Methods whose calls may fail as scripted.
CALLS = (
    "seq_rm", "seq_cp", "state_seq_get_data", "state_seq_set_data", "set_loras", "rebuild",
)  # fmt: skip


class FakeRun(NamedTuple):
    """Consecutive rows of one sequence in the batch; the last `n_outputs` have logits."""

    seq_id: int
    p0: int
    tokens: tuple[int, ...]
    n_outputs: int


Poison = Callable[[FakeRun], Fault | None]
Latency = float | Callable[[Sequence[FakeRun]], float]


@dataclass(eq=False, slots=True)
class _Cell:
    """Cell of the KV cache: its token, its position, and the adapters that computed it."""

    token: int
    position: int
    loras: LoraSet = ()


def _checksum(tokens: bytes, loras: Sequence[LoraSet]) -> bytes:
    computed_by = repr(loras).encode() if any(loras) else b""
    return zlib.crc32(tokens + computed_by).to_bytes(4, "little")


def seen_token(token: int, loras: LoraSet) -> int:
    """Return the number that later rows see for a token: the token, or a hash of it and its adapters."""
    return token if not loras else zlib.crc32(repr((token, loras)).encode()) >> 1


class FakeDecoder:
    """Context and batch in Python.  The decoding thread calls the given functions.

    Parameters
    ----------
    n_vocab, n_ctx, n_seq_max, n_batch : int
        Tokens of the vocabulary, KV cells in all, sequences, rows of a batch.
    kv_unified : bool
        False gives each sequence its own share of `n_ctx`.
    n_outputs_max : int, optional
        Largest number of output rows of a batch, at least `n_seq_max`; None: `n_seq_max`.
    separates_prompts : bool
    max_tick_s : float or None
        Attributes that the engine reads; see `Decoder`.
    answer : callable, optional
        Function of the tokens of a sequence.  It returns the token with the highest logit after them.  Tokens
        that adapters computed are given as other numbers.  By default a hash of all tokens.
    faults : mapping, optional
        Faults by decode, counted from 1 as in `n_decodes`.  A code of `llama_decode`: 1 and -1 store
        nothing; 2 and codes below -1 store the first half of the rows, rounded up.  An exception is
        raised, and nothing is stored.  "nan": the first output row is NaN.
    poison : callable, optional
        Function of a run that returns its fault or None: a fault that belongs to a request and occurs at
        every try.  It is called for every run of a batch.  "nan" makes the run's output rows NaN.  Of
        several other faults of a decode, one occurs: that of `faults`, else that of the first run.
    call_faults : mapping, optional
        Faults by `(name, k)`: the k-th call of a method, counted from 1 as in `n_calls`.  An exception is
        raised, and nothing is done.  False: nothing is done; `seq_rm` returns False, `state_seq_get_data`
        returns `b""`, `state_seq_set_data` raises `LlamaCallError`.
    latency_s : float or callable
        Seconds that a decode takes, or a function that returns them from its runs.
    wait : callable, optional
        Function that waits for a number of seconds.  None waits in real time, until `abort` ends the wait.

    Attributes
    ----------
    runs, n_rows, n_outputs : list of FakeRun, int
        The batch, and how many rows and output rows it has.
    faults, call_faults : dict
        As given; may be changed, and so may `poison` and `latency_s`.
    n_decodes : int
        Number of batches that passed the checks, including failed decodes and the present one.
    n_calls : Counter of str
        Calls of the methods in `CALLS`.
    n_rebuilds : int
        Calls of `rebuild` without a fault of `call_faults`.
    n_ctx_seq : int
        Positions that one sequence can have.
    loras : LoraSet
        The adapters in use.
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
        separates_prompts: bool = False,
        max_tick_s: float | None = None,
        answer: Answer | None = None,
        faults: Mapping[int, Fault] | None = None,
        poison: Poison | None = None,
        call_faults: Mapping[tuple[str, int], bool | Exception] | None = None,
        latency_s: Latency = 0.0,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        self.n_vocab: int = check_int("n_vocab", n_vocab, 1, INT32_MAX)
        self.n_seq_max: int = check_int("n_seq_max", n_seq_max, 1, LLAMA_MAX_SEQ)
        self.n_ctx: int = check_int("n_ctx", n_ctx, n_seq_max, INT32_MAX)
        self.n_batch: int = check_int("n_batch", n_batch, 1, INT32_MAX)
        self.kv_unified = kv_unified
        self.n_ctx_seq: int = n_ctx if kv_unified else n_ctx // n_seq_max
        n_outputs = n_seq_max if n_outputs_max is None else n_outputs_max
        self.n_outputs_max: int = check_int("n_outputs_max", n_outputs, n_seq_max, INT32_MAX)
        self.separates_prompts = separates_prompts
        self.max_tick_s = max_tick_s
        self.answer: Answer = self._hash if answer is None else answer
        self.faults: dict[int, Fault] = dict(map(_checked_fault, (faults or {}).items()))
        self.poison = poison
        self.call_faults: dict[tuple[str, int], bool | Exception] = dict(
            map(_checked_call_fault, (call_faults or {}).items())
        )
        self.latency_s = latency_s
        self._aborted, self._is_stopping = threading.Event(), False
        self._wait = self._wait_in_real_time if wait is None else wait
        self.runs: list[FakeRun] = []
        self._spans: dict[int, range] = {}  # the positions of each sequence in the batch
        self.n_rows: int = 0
        self.n_outputs: int = 0
        self.n_decodes: int = 0
        self.n_rebuilds: int = 0
        self.n_calls: Counter[str] = Counter()
        # Cells of a sequence by position, None where `seq_rm` removed one; no list ends with None.
        self._held: dict[int, list[_Cell | None]] = {}
        self._pending_copies: set[int] = set()
        # What a copy does not say: adapters, and positions behind images.
        self._saved: dict[bytes, list[_Cell | None]] = {}
        self.loras: LoraSet = ()
        self._logits = np.empty((0, n_vocab), np.float32)

    # --- The batch ---------------------------------------------------------------------------
    def set_loras(self, loras: LoraSet) -> None:
        """Set the adapters of the next batches; tokens that they compute have other answers."""
        if self._fails("set_loras"):
            return
        self.loras = loras

    def clear(self) -> None:
        """Forget the rows added so far."""
        self.runs.clear()
        self._spans.clear()
        self.n_rows = 0
        self.n_outputs = 0

    def add(self, seq_id: int, tokens: Sequence[int], p0: int, *, n_outputs: int = 0) -> range:
        """Add consecutive tokens of one sequence from position `p0` on, the last `n_outputs` with logits.

        Return the indices of its output rows among those of the batch.  `PositionError` and
        `InvalidArgumentError` leave the batch unchanged; see `Batch.add`.
        """
        check_int("rows", len(tokens), 1, self.n_batch - self.n_rows)
        seq_id = check_int("seq_id", seq_id, 0, LLAMA_MAX_SEQ - 1)
        p0 = check_int("p0", p0, 0, INT32_MAX - len(tokens))
        n_outputs = check_int("n_outputs", n_outputs, 0, len(tokens))
        span = self._spans.get(seq_id, range(p0, p0))
        if span.stop != p0:
            raise PositionError(seq_id, span.stop - 1, p0)
        checked = tuple([check_int("token", token, 0, INT32_MAX) for token in tokens])
        self.runs.append(FakeRun(seq_id, p0, checked, n_outputs))
        self._spans[seq_id] = range(span.start, p0 + len(checked))
        self.n_rows += len(checked)
        self.n_outputs += n_outputs
        return range(self.n_outputs - n_outputs, self.n_outputs)

    def add_media(self, media: MediaRows) -> None:
        """Make the batch consist of rows of one image alone; see `FakeChunk`."""
        seq_id, rows, positions, is_causal, n_outputs = media
        if not is_causal:  # llama.cpp computes half an image without complaint, and wrongly
            check_int("rows of a whole image", len(rows), int(rows[0, 2]), int(rows[0, 2]))
        self.clear()
        check_int("rows", len(rows), 1, self.n_batch)
        p0, end = int(positions.min()), int(positions.reshape(-1, len(rows))[0, -1]) + 1
        self.runs.append(FakeRun(seq_id, p0, row_ids_of(rows), n_outputs))
        self._spans[seq_id] = range(p0, end)
        self.n_rows, self.n_outputs = len(rows), n_outputs

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
            As `Context.decode` does, or as `faults` and `poison` say; these may also raise any other exception.
        """
        self._check_batch()
        self._logits.fill(np.nan)
        self.n_decodes += 1
        poison = [self.poison(run) for run in self.runs] if self.poison else []
        fault = self._fault(poison)
        latency = self.latency_s
        self._wait(latency(self.runs) if callable(latency) else latency)
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
        self._logits = logits = np.zeros((len(answers), self.n_vocab), np.float32)
        for row, answer in enumerate(answers):  # there are few: an array of indices costs more
            logits[row, answer] = 1.0
        self._pending_copies.clear()
        if fault == "nan":
            logits[:1] = np.nan
        if "nan" in poison:
            is_poisoned = [answer == "nan" for answer in poison]
            logits[np.repeat(is_poisoned, [run.n_outputs for run in self.runs])] = np.nan
        return logits

    def _wait_in_real_time(self, seconds: float) -> None:
        if self._aborted.wait(seconds) if seconds else self._aborted.is_set():
            raise DecodeFailedError("llama_decode", 2, "aborted")

    def abort(self) -> None:
        """Make running and later decodes fail with code 2 until `allow`; no effect with `wait`.  Any thread."""
        self._aborted.set()

    def allow(self) -> None:
        """Let later decodes run after an `abort`, but not after a `stop`.  Any thread."""
        self._aborted.clear()
        if self._is_stopping:
            self._aborted.set()

    def stop(self) -> None:
        """Make the running and every later decode fail as after `abort`, for good.  Any thread."""
        self._is_stopping = True
        self._aborted.set()

    def _fault(self, poison: Sequence[Fault | None]) -> Fault:
        """Return the first fault of this decode that is not "nan", otherwise its entry in `faults`, or 0."""
        scripted: Fault = self.faults.get(self.n_decodes, 0)
        failures = (fault for fault in (scripted, *poison) if fault not in (0, None, "nan"))
        return next(failures, scripted)

    def _check_batch(self) -> None:
        check_int("rows", self.n_rows, 1, self.n_batch)
        check_int("output rows", self.n_outputs, 0, self.n_outputs_max)
        highest = max([max(run.tokens) for run in self.runs])
        if highest >= self.n_vocab:
            raise InvalidArgumentError("token", highest, f"0 to {self.n_vocab - 1}")
        for seq_id, span in self._spans.items():
            check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
            check_int("position", span.stop - 1, 0, self.n_ctx_seq - 1)
            held = self._held.get(seq_id)
            end = held[-1] if held else None
            last = -1 if end is None else end.position
            # Behind an image with M-RoPE positions are skipped, and its rows have one position.
            goes_on = end is not None and end.token < 0 and span.start >= last
            if span.start != last + 1 and not goes_on:
                raise PositionError(seq_id, last, span.start)

    def _store(self, n_rows: int) -> list[int]:
        """Store the first `n_rows` rows, and return the answers of the output rows among them."""
        answers: list[int] = []
        for seq_id, p0, tokens, n_outputs in self.runs:
            if n_rows <= 0:
                break
            held = self._held.setdefault(seq_id, [])
            # All rows of an image with M-RoPE have the position of the first.
            step = 0 if tokens[0] < 0 and len(self._spans[seq_id]) < len(tokens) else 1
            held += [
                _Cell(token, p0 + step * i, self.loras) for i, token in enumerate(tokens[:n_rows])
            ]
            # The output rows are the last of a run, and each sees what is before it.
            n_outputs -= max(0, len(tokens) - n_rows)
            seen = [seen_token(cell.token, cell.loras) for cell in held if cell is not None]
            ends = range(len(seen) - n_outputs + 1, len(seen) + 1)
            answers += [self.answer(seen[:end]) for end in ends]
            n_rows -= len(tokens)
        return answers

    def _hash(self, prefix: Sequence[int]) -> int:
        return zlib.crc32(array("i", prefix)) % self.n_vocab

    # --- The KV cache ------------------------------------------------------------------------
    @property
    def cells(self) -> dict[int, list[int]]:
        """Tokens of every sequence by position; `REMOVED` (-1) for removed positions."""
        return {
            seq_id: [REMOVED if cell is None else cell.token for cell in held]
            for seq_id, held in self._held.items()
        }

    @property
    def cell_loras(self) -> dict[int, list[LoraSet]]:
        """Adapters that computed each token, by sequence and position; `()` for removed positions."""
        return {
            seq_id: [() if cell is None else cell.loras for cell in held]
            for seq_id, held in self._held.items()
        }

    @property
    def n_cells_used(self) -> int:
        """Number of cells that hold a token; a cell that sequences share counts once."""
        return len(set().union(*self._held.values()) - {None})

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions `[p0, p1)`, by default all.  Return True, or False if `call_faults` says so."""
        if self._fails("seq_rm"):
            return False
        seq_id = self._check_seq("seq_id", seq_id)
        first, end = self._check_range(p0, p1)
        held = self._held.pop(seq_id, [])
        kept = [None if cell is None or first <= cell.position < end else cell for cell in held]
        self._hold(seq_id, kept)
        return True

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        """Let an empty sequence share positions `[p0, p1)` of another; see `Memory.seq_cp`."""
        if self._fails("seq_cp"):
            return
        seq_id_src = self._check_seq("seq_id_src", seq_id_src)
        seq_id_dst = self._check_seq("seq_id_dst", seq_id_dst)
        first, end = self._check_range(p0, p1)
        if seq_id_src == seq_id_dst:
            raise InvalidArgumentError("seq_id_dst", seq_id_dst, "different from seq_id_src")
        self._check_empty("seq_id_dst", seq_id_dst)
        held = self._held.get(seq_id_src, [])
        if not self.kv_unified:
            if first > 0 or not (p1 is None or 0 < len(held) <= p1):
                raise InvalidArgumentError(
                    "[p0, p1)", (p0, p1), "the whole sequence: kv_unified is False"
                )
            self._pending_copies |= {seq_id_src, seq_id_dst}
            held = [cell and _Cell(cell.token, cell.position, cell.loras) for cell in held]
        copied = [cell if cell and first <= cell.position < end else None for cell in held]
        self._hold(seq_id_dst, copied)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """The first position the cache holds for a sequence; None if it is empty."""
        seq_id = self._check_seq("seq_id", seq_id)
        held = self._held.get(seq_id, ())
        return 0 if held and held[0] else next((p for p, cell in enumerate(held) if cell), None)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """The last position the cache holds for a sequence; None if it is empty."""
        seq_id = self._check_seq("seq_id", seq_id)
        last = self._held[seq_id][-1] if seq_id in self._held else None
        return None if last is None else last.position

    def state_seq_get_data(self, seq_id: int) -> bytes:
        """Return a copy of a sequence's state; empty if it has none."""
        if self._fails("state_seq_get_data"):
            return b""
        seq_id = self._check_seq("seq_id", seq_id)
        self._check_copied(seq_id)
        if seq_id not in self._held:
            return b""
        tokens = np.asarray(self.cells[seq_id], np.int32).tobytes()
        held = self._held[seq_id]
        loras = [() if cell is None else cell.loras for cell in held]
        checksum = _checksum(tokens, loras)
        if any(loras) or any(cell is not None and cell.token < 0 for cell in held):
            self._saved[checksum] = list(held)
        return checksum + tokens

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        """Restore an unchanged copy of `n_positions` positions into an empty sequence, as `Memory` does."""
        is_refused = self._fails("state_seq_set_data")
        seq_id = self._check_seq("seq_id", seq_id)
        n_positions = check_int("n_positions", n_positions, 1, self.n_ctx_seq)
        self._check_copied(seq_id)
        if not isinstance(data, bytes | bytearray | memoryview) or not data:
            raise InvalidArgumentError("data", data, "a copy made by state_seq_get_data")
        self._check_empty("seq_id", seq_id)
        checksum, saved = bytes(data[:4]), bytes(data[4:])
        known = self._saved.get(checksum, ())
        loras = [() if cell is None else cell.loras for cell in known] or [()] * (len(saved) // 4)
        if not saved or _checksum(saved, loras) != checksum:
            raise InvalidArgumentError(
                "data", f"{len(data)} bytes", "unchanged: its checksum is wrong"
            )
        cells = [cell and replace(cell) for cell in known] or [
            None if token == REMOVED else _Cell(token, position)
            for position, token in enumerate(np.frombuffer(saved, np.int32).tolist())
        ]
        n_cells = len(cells) - cells.count(None)
        end = 0 if cells[-1] is None else cells[-1].position + 1
        if is_refused or end != n_positions or self.n_cells_used + n_cells > self.n_ctx:
            raise LlamaCallError("llama_state_seq_set_data", 0, "restored positions (None, None)")
        self._hold(seq_id, cells)

    def rebuild(self) -> None:
        """Make an empty context with the same parameters; the batch and the counters stay."""
        if self._fails("rebuild"):
            return
        self._held.clear()
        self.loras = ()
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
        """Count a call, and raise its scripted exception.  Return True if the call must do nothing."""
        self.n_calls[method] += 1
        fault = self.call_faults.get((method, self.n_calls[method]), True)
        if isinstance(fault, Exception):
            raise fault
        return not fault

    def _check_seq(self, field: str, seq_id: int) -> int:
        return check_int(field, seq_id, 0, self.n_seq_max - 1)

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
        return f"<FakeDecoder cells={self.n_cells_used}/{self.n_ctx} decodes={self.n_decodes}>"


def _checked_fault(item: tuple[object, object]) -> tuple[int, Fault]:
    number, fault = item
    check_int("faults", number, 1, INT32_MAX)
    if not isinstance(fault, Exception) and fault != "nan":
        check_int("faults", fault, -INT32_MAX, 2)
    return item  # type: ignore[return-value]  # as checked


def _checked_call_fault(item: tuple[Any, Any]) -> tuple[tuple[str, int], bool | Exception]:
    call, fault = item
    is_call = isinstance(call, tuple) and len(call) == 2 and call[0] in CALLS
    if not is_call or not (fault is False or isinstance(fault, Exception)):
        limit = f"(name, k) with False or an exception; names: {', '.join(CALLS)}"
        raise InvalidArgumentError("call_faults", item, limit)
    check_int("call_faults", call[1], 1, INT32_MAX)
    return call, fault
