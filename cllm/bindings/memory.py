"""Memory: the KV cache calls of one `llama_context`, which llama.cpp calls its memory.

Positions are half-open ranges `[p0, p1)`; `None` stands for an open end, and llama.cpp's -1 does
not appear outside this file.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable
from typing import Any

from cllm.bindings import _llama_h as h
from cllm.bindings._handle import NativeHandle
from cllm.bindings._library import Library, forward_log, library
from cllm.bindings._rollback import Rollback
from cllm.bindings.model import Model
from cllm.checks import INT32_MAX, check_bool, check_int
from cllm.errors import InvalidArgumentError, LlamaCallError, NotGenerativeError
from cllm.memory import address_of, new_bytes

# Header of a copy.  llama.cpp's bytes have no checksum, and it accepts most damaged copies.
_COPY_HEADER = struct.Struct("<8sI")  # the name of this format; CRC-32 of what follows
_COPY_NAME = b"cllmseq1"
A_COPY = "a copy made by state_seq_get_data"


class Memory(NativeHandle):
    """The part of a context that remembers tokens.  One thread only.

    Attributes
    ----------
    n_ctx, n_ctx_seq, n_seq_max : int
        Number of cells, of positions of one sequence, and of sequences, as llama.cpp has set them.
    n_rollback : int
        Largest number of rows that recurrent memory can remove from the end of a sequence; see
        `seq_rm`.  0 if it can remove whole sequences only, and for memory without states.
    kv_unified : bool
    """

    def __init__(
        self, pointer: Any, model: Model, free: Callable[[Any], None], *, kv_unified: bool
    ) -> None:
        lib = library()
        self._lib: Library = lib
        super().__init__(pointer, free, parent=model)
        self.kv_unified = kv_unified
        # Sequences of a copy between streams that llama.cpp makes at the next decode.
        self._pending_copies: set[int] = set()
        with self._closed_on_error():
            self._memory = lib.llama_get_memory(pointer)
            if not self._memory:
                # Encoder-only and diffusion models: some claim to have a decoder, none remembers.
                raise NotGenerativeError("the model has no KV cache: it cannot generate text")
            self.n_ctx: int = int(lib.llama_n_ctx(pointer))
            self.n_ctx_seq: int = int(lib.llama_n_ctx_seq(pointer))
            self.n_seq_max: int = int(lib.llama_n_seq_max(pointer))
            self.n_rollback: int = int(lib.llama_n_rs_seq(pointer))
            n_ubatch = int(lib.llama_n_ubatch(pointer))
        self._rollback = Rollback(self.n_rollback, n_ubatch, any_order=kv_unified)

    # --- KV cache ----------------------------------------------------------------------------
    def memory_clear(self, *, data: bool = True) -> None:
        """Empty the KV cache; with `data`, zero its buffers too (cures NaN in stored values)."""
        self._pointer  # noqa: B018  # the thread and lifetime check
        self._lib.llama_memory_clear(self._memory, check_bool("data", data))
        self._rollback.forget()

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions `[p0, p1)` of a sequence; by default all of it.

        Returns
        -------
        bool
            False if the memory cannot remove this part; nothing was removed.  Recurrent memory can
            remove a whole sequence, or once, after a decode, at most `n_rollback` of its last rows, but not
            its first.  The decode must have had equally many rows of each sequence, in one physical batch.
        """
        seq_id = self._check_seq("seq_id", seq_id)
        first, end = self._check_range(p0, p1)
        if self.n_rollback:
            last = self.seq_pos_max(seq_id)
            if last is None or (first <= 0 and not 0 <= end <= last):
                self._rollback.forget(seq_id)
            elif first <= last:
                is_end = not 0 <= end <= last
                if not (is_end and self._rollback.take(seq_id, last + 1 - first)):
                    return False
        return bool(self._lib.llama_memory_seq_rm(self._memory, seq_id, first, end))

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        """Let an empty sequence share positions `[p0, p1)` of another.

        In the per-sequence layout (`kv_unified=False`) only whole sequences can be copied.  llama.cpp copies
        the data at the next decode, before it stores new rows.  Until then the state of neither sequence may
        be read or restored; both may be shortened, removed and used again.
        """
        seq_id_src = self._check_seq("seq_id_src", seq_id_src)
        seq_id_dst = self._check_seq("seq_id_dst", seq_id_dst)
        first, end = self._check_range(p0, p1)
        if seq_id_src == seq_id_dst:
            raise InvalidArgumentError("seq_id_dst", seq_id_dst, "different from seq_id_src")
        if self.seq_pos_max(seq_id_dst) is not None:
            raise InvalidArgumentError("seq_id_dst", seq_id_dst, "an empty sequence")
        source_end = self.seq_pos_max(seq_id_src)
        is_whole = first <= 0 and (end < 0 or (source_end is not None and end > source_end))
        if not self.kv_unified:
            if not is_whole:
                raise InvalidArgumentError(
                    "[p0, p1)", (p0, p1), "the whole sequence: kv_unified is False"
                )
            first, end = -1, -1
        if seq_id_src in self._rollback.cut:
            self._settle(seq_id_src)
        if not self.kv_unified:
            self._pending_copies |= {seq_id_src, seq_id_dst}
        self._lib.llama_memory_seq_cp(self._memory, seq_id_src, seq_id_dst, first, end)

    def seq_add(self, seq_id: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Shift positions `[p0, p1)` of a sequence by `delta`, staying within the context."""
        seq_id = self._check_seq("seq_id", seq_id)
        first, end = self._check_range(p0, p1)
        if not self.can_shift:
            raise InvalidArgumentError(
                "context", self, "one whose cache can shift: no window, or swa_full"
            )
        last = self.seq_pos_max(seq_id)
        if last is None:
            return
        low = max(first, 0) + check_int("delta", delta, -self.n_ctx_seq, self.n_ctx_seq)
        high = (last if end < 0 else min(last, end - 1)) + delta
        check_int("shifted position", low, 0, self.n_ctx_seq - 1)
        check_int("shifted position", high, 0, self.n_ctx_seq - 1)
        self._lib.llama_memory_seq_add(self._memory, seq_id, first, end, delta)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """The first position the cache holds for a sequence; None if it is empty."""
        seq_id = self._check_seq("seq_id", seq_id)
        pos: int = self._lib.llama_memory_seq_pos_min(self._memory, seq_id)
        return None if pos == -1 else pos

    def seq_pos_max(self, seq_id: int) -> int | None:
        """The last position the cache holds for a sequence; None if it is empty.

        With M-RoPE and an image at the end it is the time of the image, which all its rows have.
        A forged copy can leave a position below -1; only `memory_clear` removes such cells.
        """
        seq_id = self._check_seq("seq_id", seq_id)
        pos: int = self._lib.llama_memory_seq_pos_max(self._memory, seq_id)
        return None if pos == -1 else pos

    @property
    def can_shift(self) -> bool:
        """True if `seq_add` is possible."""
        self._pointer  # noqa: B018  # the thread and lifetime check
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def _check_seq(self, field: str, seq_id: int) -> int:
        self._pointer  # noqa: B018  # the thread and lifetime check
        return check_int(field, seq_id, 0, self.n_seq_max - 1)

    def _check_range(self, p0: int | None, p1: int | None) -> tuple[int, int]:
        """Return the range in llama.cpp's form; reject an empty range, which llama.cpp ignores silently."""
        first = 0 if p0 is None else check_int("p0", p0, 0, INT32_MAX - 1)
        if p1 is None:
            return (-1 if p0 is None else first), -1
        p1 = check_int("p1", p1, first + 1, INT32_MAX)
        return first, p1

    # --- State of one sequence ---------------------------------------------------------------
    def state_seq_get_data(self, seq_id: int) -> bytes:
        """Return a copy of the KV state of a sequence; empty if it has none.

        The copy consists of a header with a CRC-32, and of llama.cpp's own bytes.
        """
        seq_id = self._check_seq("seq_id", seq_id)
        self._check_copied(seq_id)
        if self.seq_pos_max(seq_id) is None:
            return b""
        size = self._lib.llama_state_seq_get_size(self._pointer, seq_id)
        start = _COPY_HEADER.size
        # A copy can be a gigabyte: one pass over it.
        copy, address = new_bytes(start + size)
        cells = (ctypes.c_uint8 * size).from_address(address + start)
        n_bytes = self._lib.llama_state_seq_get_data(self._pointer, cells, size, seq_id)
        if n_bytes == 0:
            raise LlamaCallError("llama_state_seq_get_data", 0)
        checksum = zlib.crc32(memoryview(copy)[start : start + n_bytes])
        ctypes.memmove(address, _COPY_HEADER.pack(_COPY_NAME, checksum), start)
        return copy if n_bytes == size else copy[: start + n_bytes]

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        """Restore an unchanged copy made by `state_seq_get_data` into an empty sequence.

        Parameters
        ----------
        data : bytes
            From the same model, library and context parameters.
        seq_id : int
        n_positions : int
            Number of positions in the copy, from 0 on: `seq_pos_max` + 1 of the copied sequence.

        Raises
        ------
        InvalidArgumentError
            `data` is not an unchanged copy, or the sequence is not empty; nothing was restored.
        LlamaCallError
            llama.cpp rejected the copy, or restored other positions: the copy belongs to another model or
            other parameters.  The sequence is empty, unless the checksum was forged: see `seq_pos_max`.
        """
        seq_id = self._check_seq("seq_id", seq_id)
        n_positions = check_int("n_positions", n_positions, 1, self.n_ctx_seq)
        self._check_copied(seq_id)
        if not isinstance(data, bytes | bytearray | memoryview) or not data:
            raise InvalidArgumentError("data", data, A_COPY)
        if self.seq_pos_max(seq_id) is not None:
            raise InvalidArgumentError("seq_id", seq_id, "an empty sequence")
        start, size = _COPY_HEADER.size, len(data) - _COPY_HEADER.size
        copy = bytes(data)  # itself, if it is that already
        if size <= 0 or not copy.startswith(_COPY_NAME):
            raise InvalidArgumentError("data", f"{len(data)} bytes", A_COPY)
        header = _COPY_NAME, zlib.crc32(memoryview(copy)[start:])
        if _COPY_HEADER.unpack_from(copy) != header:
            raise InvalidArgumentError(
                "data", f"{len(data)} bytes", "unchanged: its checksum is wrong"
            )
        cells = (ctypes.c_uint8 * size).from_address(address_of(copy) + start)
        n_bytes = self._lib.llama_state_seq_set_data(self._pointer, cells, size, seq_id)
        forward_log()
        self._rollback.forget(seq_id)
        # llama.cpp often accepts a copy of another cache; wrong positions reveal it.
        restored = (self.seq_pos_min(seq_id), self.seq_pos_max(seq_id))
        if n_bytes != size or (restored[0] or 0) < 0 or restored[1] != n_positions - 1:
            self._lib.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
            raise LlamaCallError(
                "llama_state_seq_set_data", n_bytes, f"restored positions {restored}"
            )

    def _settle(self, seq_id: int) -> None:
        """Move the state of a shortened sequence to where `llama_memory_seq_cp` reads it."""
        self._check_copied(seq_id)
        lib, flags = self._lib, h.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = lib.llama_state_seq_get_size_ext(self._pointer, seq_id, flags)
        state = (ctypes.c_uint8 * size)()
        for call in ("llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext"):
            n_bytes = getattr(lib, call)(self._pointer, state, size, seq_id, flags)
            forward_log()
            if n_bytes != size:
                raise LlamaCallError(call, n_bytes, f"of {size} bytes")
        self._rollback.forget(seq_id)

    def _check_copied(self, seq_id: int) -> None:
        """Raise `InvalidArgumentError` if a copy is pending: its state would be read as wrong bytes."""
        if seq_id in self._pending_copies:
            raise InvalidArgumentError(
                "seq_id", seq_id, "one whose seq_cp was followed by a decode (per-sequence layout)"
            )
