"""Prefixes that have left the KV cache: in host memory, and in files.  Pure; inference thread only.

Prefixes are found by blocks of tokens.  The key of a block is a hash of its tokens and of all tokens
before it.  So the longest common prefix is found in as many steps as it has blocks, independent of
the number of prefixes.  The tokens are compared afterwards: a hash only finds candidates.

Eviction is Greedy-Dual-Size.  The priority of a prefix is its tokens per byte, plus the priority of the
prefix that was evicted last.  Where all prefixes have the same tokens per byte, that is least recently
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.request import SequenceState

Tokens = NDArray[np.int32]

BLOCK = 32  # tokens that are looked up at once; no shorter prefix is kept
N_LOOKED_AT = 16  # prefixes that are compared at most, of those with the same blocks


@dataclass(eq=False, slots=True)
class SavedPrefix:
    """Prefix of a sequence, with its KV state.

    Attributes
    ----------
    state : SequenceState or None
        KV state in host memory; None: only the file has it.
    n_bytes : int
        Bytes of the state in host memory; bytes of the file before it was first read.
    file : str or None
        Name of its file; None without one.
    is_loading : bool
        True while the file is being read.
    n_awaiting : int
        Number of sequences that wait for it, so that it stays in host memory.
    """

    tokens: Tokens
    state: SequenceState | None
    n_bytes: int
    lora: LoraUse = NO_LORA
    file: str | None = None
    is_loading: bool = False
    n_awaiting: int = 0
    priority: float = 0.0


class PrefixStore(Protocol):
    """Files of prefixes.  No call waits for a disk.

    Attributes
    ----------
    stored : iterable of (tokens, file, bytes)
        Prefixes that had files at the start, the least recently used first.
    n_bytes : int
        Bytes of all files at present.
    has_room : bool
        True if it takes one more file now.
    is_clearing : bool
        True after `clear` until the files are removed; `PrefixesRemoved` is sent then.
    """

    @property
    def stored(self) -> Iterable[tuple[Tokens, str, int]]: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    @property
    def is_clearing(self) -> bool: ...

    def write(self, tokens: Tokens, state: SequenceState) -> str | None:
        """Write a file in the background; return its name, or None if it is not accepted now."""

    def load(self, file: str) -> None:
        """Read a file in the background, and send a `PrefixLoaded` to the inference thread."""

    def touch(self, file: str) -> None:
        """Mark a file as used now."""

    def remove(self, file: str) -> None:
        """Delete a file."""

    def clear(self) -> None:
        """Remove all files in the background."""


class PrefixTiers:
    """Prefixes that have left the KV cells, in host memory and in files.

    Parameters
    ----------
    n_bytes_max : int
        Bytes of host memory for all prefixes; 0: none is kept in host memory.
    whole_only : bool
        True if a prefix can be used as a whole only: memory of one position.
    store : PrefixStore, optional
        Files of prefixes; None: no files.

    Attributes
    ----------
    n_bytes_max : int
    """

    def __init__(
        self,
        *,
        n_bytes_max: int,
        whole_only: bool = False,
        store: PrefixStore | None = None,
    ) -> None:
        self.n_bytes_max: int = n_bytes_max
        self._whole_only = whole_only
        self._store = store
        self._n_bytes = 0
        self._floor = 0.0  # the priority of the prefix that was evicted last
        self._all: dict[SavedPrefix, None] = {}
        self._by_block: dict[int, dict[SavedPrefix, None]] = {}
        self._by_file: dict[str, SavedPrefix] = {}
        for tokens, file, n_bytes in () if store is None else store.stored:
            self._put(SavedPrefix(tokens, None, n_bytes, file=file))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def n_bytes(self) -> int:
        """Bytes in host memory."""
        return self._n_bytes

    @property
    def n_file_bytes(self) -> int:
        """Bytes in files."""
        return 0 if self._store is None else self._store.n_bytes

    @property
    def writes(self) -> bool:
        """True if added prefixes are written to files at present."""
        return self._store is not None and self._store.has_room

    @property
    def is_clearing(self) -> bool:
        """True after `clear` until the files are removed."""
        return self._store is not None and self._store.is_clearing

    # --- Finding -----------------------------------------------------------------------------
    def match(self, wanted: Tokens, lora: LoraUse) -> tuple[SavedPrefix | None, int]:
        """Return the saved prefix with the longest usable part of `wanted`, and its length."""
        best, n_best = None, 0
        levels = [self._by_block[h] for h in self._hashes(wanted) if h in self._by_block]
        for n_blocks in range(len(levels), 0, -1):
            for prefix in self._looked_at(levels[n_blocks - 1], n_blocks):
                n_usable = self._n_usable(prefix, wanted, lora)
                is_shorter = best is None or len(prefix.tokens) < len(best.tokens)
                if n_usable > n_best or (n_usable == n_best and n_usable and is_shorter):
                    best, n_best = prefix, n_usable
            if best is not None:
                break
        return best, n_best

    def _looked_at(self, level: dict[SavedPrefix, None], n_blocks: int) -> Iterator[SavedPrefix]:
        """Yield the latest prefixes that contain these blocks, at most `N_LOOKED_AT`.

        With `whole_only`, prefixes with more whole blocks are skipped.
        """
        n_left = N_LOOKED_AT
        for prefix in reversed(level):
            if self._whole_only and len(prefix.tokens) // BLOCK > n_blocks:
                continue
            yield prefix
            n_left -= 1
            if not n_left:
                return

    def _n_usable(self, prefix: SavedPrefix, wanted: Tokens, lora: LoraUse) -> int:
        n_alike = common_length(prefix.tokens, wanted, prefix.lora, lora)
        return 0 if self._whole_only and n_alike < len(prefix.tokens) else n_alike

    def covering(self, tokens: Tokens, lora: LoraUse) -> SavedPrefix | None:
        """Return a prefix that has these tokens, perhaps as the beginning of more; None if none has."""
        prefix, n_usable = self.match(tokens, lora)
        return prefix if n_usable == len(tokens) else None

    # --- Coming and going --------------------------------------------------------------------
    def add(self, tokens: Tokens, lora: LoraUse, state: SequenceState) -> SavedPrefix | None:
        """Keep a prefix, drop those that it contains, and evict until the limit of host memory holds.

        Return None if the new prefix is not kept.
        """
        if self._store is None and len(state.data) > self.n_bytes_max:
            return None
        if not self._whole_only:
            for shorter in self._beginnings_of(tokens, lora):
                self._drop(shorter)
        prefix = SavedPrefix(tokens, state, len(state.data), lora)
        if self._store is not None and lora == NO_LORA:  # a name may mean another adapter later
            prefix.file = self._store.write(tokens, state)
        self._put(prefix)
        self._n_bytes += prefix.n_bytes
        self._fit()
        return prefix if prefix in self._all else None

    def _beginnings_of(self, tokens: Tokens, lora: LoraUse) -> list[SavedPrefix]:
        found = []
        for n_blocks, h in enumerate(self._hashes(tokens), 1):
            level = self._by_block.get(h)
            if level is None:
                break
            for prefix in level:
                n_tokens = len(prefix.tokens)
                ends_here = n_tokens // BLOCK == n_blocks and n_tokens <= len(tokens)
                if ends_here and self._n_usable(prefix, tokens, lora) == n_tokens:
                    found.append(prefix)
        return found

    def touch(self, prefix: SavedPrefix) -> None:
        """Mark a prefix as used now."""
        prefix.priority = self._worth(prefix)
        if prefix in self._all:
            del self._all[prefix]
            self._all[prefix] = None
        if prefix.file is not None and self._store is not None:
            self._store.touch(prefix.file)

    def _worth(self, prefix: SavedPrefix) -> float:
        return self._floor + len(prefix.tokens) / max(1, prefix.n_bytes)

    def load(self, prefix: SavedPrefix) -> None:
        """Start reading the file of a prefix, unless it is being read; one more sequence waits for it."""
        assert self._store is not None
        assert prefix.file is not None
        prefix.n_awaiting += 1
        if not prefix.is_loading:
            prefix.is_loading = True
            self._store.load(prefix.file)

    def stop_awaiting(self, prefix: SavedPrefix) -> None:
        """Note that one sequence less waits for a prefix, which may then leave host memory."""
        prefix.n_awaiting -= 1
        if not prefix.n_awaiting:
            self._fit()

    def on_loaded(self, file: str, state: SequenceState | None) -> None:
        """Take the state that was read from a file; None: the file is unusable or gone."""
        prefix = self._by_file.get(file)
        if prefix is None:
            return
        prefix.is_loading = False
        if state is None or state.n_tokens != len(prefix.tokens):
            del self._by_file[file]
            prefix.file = None
            if prefix.state is None:
                self._drop(prefix)
            return
        if prefix.state is None:
            prefix.state, prefix.n_bytes = state, len(state.data)
            self._n_bytes += prefix.n_bytes
            self.touch(prefix)
            self._fit()

    def forget(self, prefix: SavedPrefix) -> None:
        """Forget a prefix, and delete its file."""
        if prefix.file is not None and self._store is not None:
            self._store.remove(prefix.file)
        if prefix in self._all:
            self._drop(prefix)

    def forget_lora(self, name: str) -> None:
        """Forget all prefixes that this adapter computed."""
        for prefix in [p for p in self._all if p.lora.uses(name)]:
            self._drop(prefix)

    def clear(self) -> None:
        """Forget everything, files too."""
        for prefix in list(self._all):
            self._drop(prefix)
        if self._store is not None:
            self._store.clear()

    # --- Bookkeeping -------------------------------------------------------------------------
    def _put(self, prefix: SavedPrefix) -> None:
        prefix.priority = self._worth(prefix)
        self._all[prefix] = None
        for h in self._hashes(prefix.tokens):
            self._by_block.setdefault(h, {})[prefix] = None
        if prefix.file is not None:
            self._by_file[prefix.file] = prefix

    def _drop(self, prefix: SavedPrefix) -> None:
        del self._all[prefix]
        prefix.is_loading = False  # a sequence that waits for it computes its tokens
        for h in self._hashes(prefix.tokens):
            level = self._by_block[h]
            del level[prefix]
            if not level:
                del self._by_block[h]
        if prefix.file is not None and self._by_file.get(prefix.file) is prefix:
            del self._by_file[prefix.file]
        self._release(prefix)

    def _release(self, prefix: SavedPrefix) -> None:
        """Release the bytes of a prefix in host memory."""
        if prefix.state is not None:
            self._n_bytes -= prefix.n_bytes
            prefix.state = None

    def limit(self, n_bytes_max: int) -> None:
        """Change the limit of host memory, and evict prefixes beyond it."""
        self.n_bytes_max = n_bytes_max
        self._fit()

    def _fit(self) -> None:
        """Evict prefixes from host memory until at most `n_bytes_max` bytes are used.

        Prefixes that a sequence waits for stay.
        """
        while self._n_bytes > self.n_bytes_max:
            held = (p for p in self._all if p.state is not None and not p.n_awaiting)
            least = min(held, key=attrgetter("priority"), default=None)
            if least is None:
                break
            self._floor = least.priority
            if least.file is None:
                self._drop(least)
            else:
                self._release(least)

    @staticmethod
    def _hashes(tokens: Tokens) -> Iterator[int]:
        """Yield the hash of each whole block, with all blocks before it."""
        data, size, so_far = tokens.tobytes(), BLOCK * tokens.itemsize, 0
        for start in range(0, len(data) - size + 1, size):
            so_far = hash((so_far, data[start : start + size]))
            yield so_far


def common_length(a: Tokens, b: Tokens, of_a: LoraUse = NO_LORA, of_b: LoraUse = NO_LORA) -> int:
    """Length of the common prefix that the same adapters compute."""
    n_tokens = min(len(a), len(b))
    if of_a is not of_b:
        n_tokens = int(min(n_tokens, of_a.n_alike(of_b)))
    # `argmax` would release the GIL, and get it back late.
    first = (a[:n_tokens] != b[:n_tokens]).tobytes().find(1)
    return n_tokens if first < 0 else first
