"""FakeTextEncoder: a `TextEncoder` without libllama, for tests of everything above it.

Texts that share words have similar vectors, so that a search finds texts with the words of the query.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cllm.errors import DecodeFailedError, InvalidArgumentError

N_VALUES = 64
N_GRAM = 3
ABORTED = 2
SEPARATOR = 256  # `FakeVocabulary.BEGIN`: between a query and a document

TextFault = Exception | Literal["nan"]


class FakeTextEncoder:
    """Encoder by byte trigrams: vectors of 64 values, or the overlap of a query and a document.

    Parameters
    ----------
    n_batch, n_texts_max : int
        Largest number of tokens, and of texts, in a batch.
    n_batch_target : int, optional
        Tokens that a batch of more than one text gets; `n_batch` if None.
    is_classifier : bool
        True computes one score for each text instead of a vector.
    faults : mapping, optional
        Faults by batch, counted from 1.  An exception is raised; "nan": all vectors of the batch are NaN.
    poison : callable, optional
        Function of the tokens of a text that returns a fault of the whole batch, or None.  Called for the
        texts of every batch without an entry in `faults`.
    latency_s : float
        Seconds that a batch takes; `abort` ends it earlier.
    computes_in_pieces : bool
        True if a text may come in several batches.

    Attributes
    ----------
    batches : list of tuple
        Texts of each batch, as tuples of tokens.  If a text comes in pieces, each batch has its piece.
    n_opened : int
        Number of calls of `open` that opened the encoder.
    open_fault : Exception or None
        Error that `open` raises.
    """

    def __init__(
        self,
        *,
        n_batch: int = 512,
        n_texts_max: int = 64,
        n_batch_target: int | None = None,
        is_classifier: bool = False,
        faults: Mapping[int, TextFault] | None = None,
        poison: Callable[[Sequence[int]], TextFault | None] | None = None,
        latency_s: float = 0.0,
        computes_in_pieces: bool = False,
    ) -> None:
        self.n_batch: int = n_batch
        self.n_texts_max: int = n_texts_max
        self.n_batch_target: int = n_batch if n_batch_target is None else n_batch_target
        self.is_classifier = is_classifier
        self.faults: dict[int, TextFault] = dict(faults or {})
        self.poison = poison
        self.latency_s = latency_s
        self.computes_in_pieces = computes_in_pieces
        self._begun: tuple[int, ...] = ()
        self.batches: list[tuple[tuple[int, ...], ...]] = []
        self.n_opened: int = 0
        self.open_fault: Exception | None = None
        self._is_open = self._is_stopping = False
        self._aborted = threading.Event()

    @property
    def n_values(self) -> int:
        """Numbers of a vector."""
        return 1 if self.is_classifier else N_VALUES

    def open(self) -> None:
        """See `TextEncoder`."""
        if self._is_open:
            return
        if self.open_fault is not None:
            raise self.open_fault
        self._is_open = True
        self.n_opened += 1

    def compute(self, texts: Sequence[Sequence[int]], n_computed: int = 0) -> NDArray[np.float32]:
        """See `TextEncoder`."""
        if not self._is_open:
            raise InvalidArgumentError("encoder", "closed", "open")
        n_tokens = sum(map(len, texts))
        if not 1 <= n_tokens <= self.n_batch or len(texts) > self.n_texts_max or not all(texts):
            limit = f"1 to {self.n_batch} tokens of 1 to {self.n_texts_max} texts"
            raise InvalidArgumentError("texts", f"{n_tokens} tokens of {len(texts)}", limit)
        begun = self._begun if n_computed else ()
        self._begun = ()
        if n_computed and not (n_computed == len(begun) and len(texts) == 1):
            raise InvalidArgumentError("n_computed", n_computed, f"{len(begun)} of one text")
        self.batches.append(tuple(map(tuple, texts)))
        fault = self.faults.get(len(self.batches))
        if self.poison is not None and fault is None:
            fault = next(filter(None, map(self.poison, texts)), None)
        if self._aborted.wait(self.latency_s):
            raise DecodeFailedError("llama_encode", ABORTED, "aborted")
        if isinstance(fault, Exception):
            raise fault
        make = overlap_of if self.is_classifier else vector_of
        if self.computes_in_pieces and len(texts) == 1:
            self._begun = (*begun, *texts[0])
            texts = [self._begun]
        vectors = np.array([make(text) for text in texts], np.float32)
        return np.full_like(vectors, np.nan) if fault == "nan" else vectors

    def close(self) -> None:
        """See `TextEncoder`."""
        self._is_open = False

    def abort(self) -> None:
        """Make the running batch, and later ones until `allow`, raise `DecodeFailedError`.  Any thread."""
        self._aborted.set()

    def allow(self) -> None:
        """Let later batches run after an `abort`, but not after a `stop`.  Any thread."""
        if not self._is_stopping:
            self._aborted.clear()

    def stop(self) -> None:
        """Make the running and every later batch raise `DecodeFailedError`.  Any thread."""
        self._is_stopping = True
        self._aborted.set()


def vector_of(tokens: Sequence[int]) -> list[float]:
    """Return the vector of a text: `N_VALUES` sums of its byte trigrams, by their hash; not normalized."""
    vector = [0.0] * N_VALUES
    for gram, n in _grams(tokens).items():
        value = zlib.crc32(gram)
        vector[value % N_VALUES] += n if value & 1024 else -n
    return vector


def overlap_of(tokens: Sequence[int]) -> list[float]:
    """Return the overlap of a document with a query, one value: -4 without common trigrams, 4 with all."""
    place = tokens.index(SEPARATOR) if SEPARATOR in tokens else len(tokens)
    query, document = _grams(tokens[:place]), _grams(tokens[place + 1 :])
    n_shared = (query & document).total()
    return [8.0 * n_shared / max(1, query.total()) - 4.0]


def _grams(tokens: Sequence[int]) -> Counter[bytes]:
    text = b" " + bytes(token for token in tokens if token < SEPARATOR) + b" "
    return Counter(text[i : i + N_GRAM] for i in range(len(text) - N_GRAM + 1))
