"""`python -m tests.reliability.bindings_fuzz [--examples N] [--save]`: any call of the bindings.

Hypothesis draws calls, right and wrong, for one model and one context in a child process.  Each ends
in a result or in an error of cllm's, never in another exception or a signal.  After every hundred the
cache is cleared, and the same tokens have the same logits as in the beginning, to the bit.
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
# A full cache is an error of llama.cpp's, and so is a copy that is none.
DOCUMENTED = (InvalidArgumentError, StaleLogitsError, LlamaCallError)


def known_logits(context: Context) -> NDArray[np.float32]:
    """Of the same tokens in an empty cache."""
    context.memory_clear()
    batch = Batch(N_BATCH)
    batch.add(0, [256, 65, 66, 67], 0, n_outputs=1)
    logits = context.decode(batch).rows.copy()
    context.memory_clear()
    return logits


class Fuzz:
    """One context, and what was found with it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found = Findings()
        self._known = known_logits(bench.context)

    def example(self, call: Call) -> None:
        """One call, and every so often a look at what it left."""
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
        """The same tokens have the same logits."""
        self.found.n_checks += 1
        if not np.array_equal(known_logits(self.bench.context), self._known):
            self.found.wrong.append(f"after {self.found.n_examples} examples: other logits")


def fuzz(n_examples: int) -> Findings:
    """Draw so many calls, half of them in each layout.  In this process: it may end by a signal."""
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
