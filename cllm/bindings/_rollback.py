"""Number of rows of its last decode that a memory with states can remove again.  Pure.

llama.cpp keeps `n_rs_seq` states, those after each of the last rows of a decode.  It does not check
that a kept state belongs to that decode: a sequence of one row would continue from an old state.
Sequences with different numbers of rows are computed in several physical batches.  A later one may move
the cells of an earlier one without these states.  A shortened sequence uses one of these states until its
next decode; a copy of it would get another state.
"""

from __future__ import annotations

from collections.abc import Sequence

from cllm.bindings.batch import Run


class Rollback:
    """Number of positions that can be removed from the end of each sequence.

    Parameters
    ----------
    n_most : int
        Limit of these positions (`llama_n_rs_seq`); 0 if only whole sequences can be removed.
    n_ubatch : int
        Rows of a physical batch.
    any_order : bool
        True if sequences of one physical batch need not have consecutive seq_ids.

    Attributes
    ----------
    cut : set of int
        Sequences that were shortened by `take` since their last decode.
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
        """Record a successful decode: the runs of its batch."""
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
        """Record that the last `n_positions` of a sequence are removed; return False if that is impossible."""
        if not 0 < n_positions <= self._n_left.get(seq_id, 0):
            return False
        self._n_left[seq_id] = 0  # a second time, llama.cpp refuses
        self.cut.add(seq_id)
        return True

    def forget(self, seq_id: int | None = None) -> None:
        """Forget the record of a sequence, or of all (None), that was emptied, restored or copied."""
        if seq_id is None:
            self._n_left.clear()
            self.cut.clear()
        else:
            self._n_left.pop(seq_id, None)
            self.cut.discard(seq_id)
