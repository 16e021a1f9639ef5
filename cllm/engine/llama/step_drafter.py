"""StepDrafter: base class of drafters that compute one draft of each sequence in a step.

A draft is a guess that the model checks.  An error while drafting costs speed and changes no answer.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from cllm.bindings import Context, MtpContext
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import Drafts, verdicts
from cllm.errors import CllmError

logger: logging.Logger = logging.getLogger("cllm.engine")

N_DRAFTS_MAX = 8
# Probability that a draft is right: before the first result, and the weight of each new result.
AT_FIRST, WEIGHT = 0.6, 0.1
# Each `expect` moves the estimate of a sequence back to `AT_FIRST` a little, so that it gets drafts again.
RECOVERY = 0.003
STEP_WEIGHT, STEP_RECOVERY = 0.1, 0.001
STEP_AT_FIRST_S = 1e-6  # assumed before it is measured: so small that drafts are tried


class StepDrafter(ABC):
    """A `Drafter` with a context of its own, which guesses the most likely tokens.

    Parameters
    ----------
    name : str
        Name in messages.
    context : Context or MtpContext
        It is closed with the drafter.
    clock : callable
        Returns the time in seconds.

    Attributes
    ----------
    is_broken : bool
        True after an error: there are no drafts any more.
    """

    def __init__(
        self,
        name: str,
        context: Context | MtpContext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._computes = context
        self._clock = clock
        self._shares: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        self._share = AT_FIRST
        self._n_measured = 0
        self.is_broken: bool = False
        self.step_s: float = STEP_AT_FIRST_S

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the number of threads for the next batches."""
        self._computes.set_n_threads(n_threads, n_threads_batch)

    def close(self) -> None:
        """Free the context."""
        self._computes.close()

    def expect(self, sequence: Sequence, n_max: int) -> list[float]:
        """See `Drafter`."""
        if self.is_broken or sequence.spans:  # it sees no media
            return []
        self.step_s *= 1.0 - STEP_RECOVERY  # a step that seemed too slow is measured again later
        share = self._shares.get(sequence, self._share)
        self._shares[sequence] = share + RECOVERY * (AT_FIRST - share)
        return [share ** (n + 1) for n in range(min(n_max, N_DRAFTS_MAX))]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """See `Drafter`."""
        share = self._shares.get(sequence, self._share)
        for is_right in verdicts(n_drafted, n_accepted):
            share += WEIGHT * (is_right - share)
        self._shares[sequence] = share
        self._share += WEIGHT * (share - self._share)

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        """See `Drafter`."""
        with self._ending_on_error():
            return self._draft(wanted) if wanted else []
        return [()] * len(wanted)

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End drafting for good if the block raises an error of this package."""
        try:
            yield
        except CllmError as error:
            logger.warning("%s failed and is not used any more: %s", self._name, error)
            self.is_broken = True

    @abstractmethod
    def _draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        """Return the wanted number of drafts of each sequence, or fewer."""

    def _learn_step(self, seconds: float) -> None:
        """Learn the time of a step; the first one, of a cold model, is ignored."""
        self._n_measured += 1
        if self._n_measured > 1:
            weight = 1.0 if self._n_measured == 2 else STEP_WEIGHT
            self.step_s += weight * (seconds - self.step_s)
