"""`python -m tests.reliability.bindings_fuzz [--examples N] [--save]`: any call of the bindings.

Hypothesis draws valid and invalid calls for one model and one context in a child process.  Each call must
end with a result or an error of cllm; another exception or a signal is a finding.  After every 100 calls
the cache is cleared, and the same tokens must have the same logits as at the start, to the bit.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import InvalidArgumentError, LlamaCallError, StaleLogitsError
from tests.reliability.bindings_fuzz_calls import (
    METHODS,
    N_BATCH,
    N_CTX,
    N_SEQ_MAX,
    Bench,
    Call,
    calls,
)
from tests.reliability.fuzzing import CHECK_EVERY, Findings, draw, main

CLAIM = (
    "Every call of the bindings, whatever numbers and texts it is given, ends in a result or in an "
    "error that is documented, and what is computed afterwards is the same to the bit."
)
# `LlamaCallError` is for a full cache, and for bytes that llama.cpp cannot restore as a sequence.
DOCUMENTED = (InvalidArgumentError, StaleLogitsError, LlamaCallError)


def known_logits(context: Context) -> NDArray[np.float32]:
    """Clear the cache, and return the logits of a fixed text: float32, `(1, n_vocab)`."""
    context.memory_clear()
    batch = Batch(N_BATCH)
    batch.add(0, [256, 65, 66, 67], 0, n_outputs=1)
    logits = context.decode(batch).rows.copy()
    context.memory_clear()
    return logits


class Fuzz:
    """Context under test, and the findings."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found = Findings()
        self._known = known_logits(bench.context)

    def example(self, call: Call) -> None:
        """Make one call, count its end, and run `check` after every `CHECK_EVERY` calls."""
        error: Exception | None = None
        try:
            call.make(self.bench)
        except Exception as caught:
            error = caught
            if not isinstance(caught, DOCUMENTED):
                self.found.wrong.append(f"{call!r:.400} raised {caught!r:.300}")
        self.found.count(call.method, error)
        if self.found.n_examples % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Check that the fixed text still has the same logits, to the bit."""
        self.found.n_checks += 1
        if not np.array_equal(known_logits(self.bench.context), self._known):
            self.found.wrong.append(f"after {self.found.n_examples} examples: other logits")


def fuzz(n_examples: int) -> Findings:
    """Draw `n_examples` calls, half in each layout, in this process, which a finding may end by a signal."""
    found = Findings()
    with Model(EMBEDDED_MODEL) as model:
        for kv_unified in (True, False):
            n_ctx = N_CTX if kv_unified else N_CTX * N_SEQ_MAX
            with Context(
                model, n_ctx=n_ctx, n_seq_max=N_SEQ_MAX, n_batch=N_BATCH, kv_unified=kv_unified,
                n_threads=1, n_threads_batch=1,
            ) as context:  # fmt: skip
                state = Fuzz(Bench(model, context))
                draw(calls(), n_examples // 2, state.example, state.found, seed=kv_unified)
                found.add(state.found)
    return found


if __name__ == "__main__":
    sys.exit(main("bindings_fuzz", CLAIM, [method for _, method in METHODS], fuzz))
