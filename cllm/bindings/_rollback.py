"""How many positions a memory with states can give up: rows of its last decode.  Pure.

With `n_rs_seq` llama.cpp keeps the states after each of the last rows of a decode, so that these rows can
be removed again.  It does not check that a state is of that decode: a sequence of one row would go on
from a state of long ago.  Rows are spread over several physical batches where sequences have different
numbers of them, and a later one may move the cells of an earlier one without these states.  A
sequence that was cut has its state among them until it is decoded again, and a copy would get another.
"""

from __future__ import annotations

from collections.abc import Sequence

from cllm.bindings.batch import Run


class Rollback:
    """Positions that each sequence can give up.

    Parameters
    ----------
    n_most : int
        `llama_n_rs_seq`: 0 if nothing can be removed but whole sequences.
    n_ubatch : int
        Rows of a physical batch.
    any_order : bool
        True if sequences of one physical batch need not have consecutive seq_ids.

    Attributes
    ----------
    cut : set of int
        Sequences that were cut since they were decoded.
    """

    def __init__(self, n_most: int, n_ubatch: int, *, any_order: bool) -> None:
        self.n_most = n_most
        self._n_ubatch = n_ubatch
        self._any_order = any_order
        self._n_left: dict[int, int] = {}
        self.cut: set[int] = set()

    def begin(self) -> None:
        """Note that a decode begins, which may move the cells of every sequence."""
        self._n_left.clear()

    def decoded(self, runs: Sequence[Run]) -> None:
        """Note what a decode has stored."""
        n_rows: dict[int, int] = {}
        for seq_id, _, n_tokens in runs:
            n_rows[seq_id] = n_rows.get(seq_id, 0) + n_tokens
        self.cut -= n_rows.keys()
        first, *others = n_rows.values()
        is_whole = all(n == first for n in others) and first * len(n_rows) <= self._n_ubatch
        ids = list(n_rows)
        if not self._any_order:
            is_whole = is_whole and ids == list(range(ids[0], ids[0] + len(ids)))
        n_left = min(first - 1, self.n_most) if is_whole else 0
        self._n_left = dict.fromkeys(ids, n_left)

    def take(self, seq_id: int, n_positions: int) -> bool:
        """Return True if a sequence can give up so many positions, which it then does."""
        if not 0 < n_positions <= self._n_left.get(seq_id, 0):
            return False
        self._n_left[seq_id] = 0  # a second time, llama.cpp refuses
        self.cut.add(seq_id)
        return True

    def forget(self, seq_id: int | None = None) -> None:
        """Note that a sequence, or all, were emptied, filled or settled."""
        if seq_id is None:
            self._n_left.clear()
            self.cut.clear()
        else:
            self._n_left.pop(seq_id, None)
            self.cut.discard(seq_id)
