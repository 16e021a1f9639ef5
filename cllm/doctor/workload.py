"""One context, and requests that run on it one after another.  One thread only.

A request runs as in a simple server: its prompt in one batch or more, then one token at a time.  Only numbers
that such a server could measure are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from cllm.bindings import Batch, Context, EmbeddingBatch, Model, Vocabulary
from cllm.doctor.findings import Measurement, Plan, Shape
from cllm.doctor.plan import SHAPES, Pace
from cllm.errors import LlamaCallError

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "
N_ROWS_MAX = 512
N_REPEATS = 3  # measurements of the pace; the middle one counts
N_WARM_UP = 3  # buffers are touched by the first request; the processor's clock follows later


class ProbeContext(Context):
    """Context that counts its cells, and can pass llama.cpp a batch that the bindings would reject."""

    _checks_batch = True

    @property
    def n_cells(self) -> int:
        """Number of cells in use: positions of all sequences, which share none here."""
        n_cells = 0
        for seq_id in range(self.n_seq_max):
            first, last = self.seq_pos_min(seq_id), self.seq_pos_max(seq_id)
            if first is not None and last is not None:
                n_cells += last - first + 1
        return n_cells

    def decode_unchecked(self, batch: Batch) -> int:
        """Decode a batch whose positions may be wrong, and return the code of `llama_decode`.

        For wrong positions llama.cpp returns -1 and leaves the KV cache unchanged.  Tokens and seq_ids must
        be valid: they are not checked.
        """
        self._checks_batch = False
        try:
            self.decode(batch)
        except LlamaCallError as error:
            return error.code
        finally:
            self._checks_batch = True
        return 0

    def _check_batch(self, batch: Batch | EmbeddingBatch) -> None:
        if self._checks_batch:
            super()._check_batch(batch)


def open_context(model: Model, plan: Plan, *, n_threads: int) -> ProbeContext:
    """Return the context of one experiment, with one KV buffer for all sequences."""
    return ProbeContext(
        model,
        n_ctx=plan.n_ctx,
        n_batch=N_ROWS_MAX,
        n_ubatch=N_ROWS_MAX,
        n_seq_max=plan.n_seq_ids,
        n_threads=n_threads,
        n_threads_batch=n_threads,
    )


class RequestRunner:
    """Runs requests of one shape on a context.

    Attributes
    ----------
    context : ProbeContext
    prompt : list of int
        The tokens of every request.
    n_output : int
    """

    def __init__(self, context: ProbeContext, prompt: Sequence[int], n_output: int) -> None:
        self.context = context
        self.prompt: list[int] = list(prompt)
        self.n_output = n_output
        self._batch = Batch(context.n_batch)

    def warm_up(self) -> None:
        """Run a few requests that are not measured, and leave an empty cache."""
        for _ in range(N_WARM_UP):
            self.run(clears=0)

    def run(
        self,
        seq_id: int = 0,
        *,
        clears: int | None = None,
        prompt: Sequence[int] | None = None,
        submitted_s: float | None = None,
        n_ahead: int = 0,
    ) -> Measurement:
        """Run one request after the tokens that its seq_id holds, and return the measurement.

        Parameters
        ----------
        seq_id : int
        clears : int, optional
            The seq_id that `seq_rm` is called for at the end; None: it is not called.
        prompt : sequence of int, optional
            Prompt to use; None: `self.prompt`.
        submitted_s : float, optional
            Time of `perf_counter` at which the client submitted the request; None: now.
        n_ahead : int
            Number of requests that were waiting then.
        """
        context = self.context
        submitted_s = time.perf_counter() if submitted_s is None else submitted_s
        last = context.seq_pos_max(seq_id)
        pos = 0 if last is None else last + 1
        tokens = list(self.prompt if prompt is None else prompt)
        n_rows, decode_s = 0, 0.0
        for _ in range(self.n_output):
            token, elapsed_s = self._decode(seq_id, tokens, pos)
            decode_s += elapsed_s
            n_rows += len(tokens)
            pos += len(tokens)
            tokens = [token]
        pos_max, n_cells = context.seq_pos_max(seq_id), context.n_cells
        if clears is not None:
            context.seq_rm(clears)
        return Measurement(
            seq_id=seq_id,
            n_rows=n_rows,
            pos_max=pos_max,
            n_cells=n_cells,
            cleared_seq_id=clears,
            pos_left=context.seq_pos_max(seq_id),
            n_cells_left=context.n_cells,
            n_ahead=n_ahead,
            decode_s=decode_s,
            latency_s=time.perf_counter() - submitted_s,
        )

    def _decode(self, seq_id: int, tokens: Sequence[int], p0: int) -> tuple[int, float]:
        """Decode tokens; return the most likely next token, and the seconds inside `llama_decode`."""
        elapsed_s = 0.0
        for start in range(0, len(tokens), self._batch.n_rows_max):
            chunk = tokens[start : start + self._batch.n_rows_max]
            self._batch.clear()
            self._batch.add(seq_id, chunk, p0 + start, n_outputs=1)
            started_s = time.perf_counter()
            logits = self.context.decode(self._batch)
            elapsed_s += time.perf_counter() - started_s
        return int(np.argmax(logits.rows[0])), elapsed_s


def prompt_tokens(vocab: Vocabulary, n_tokens: int) -> list[int]:
    """Return tokens of plain text, with the beginning-of-sequence token first if there is one."""
    first = [vocab.bos] if vocab.adds_bos and vocab.bos is not None else []
    body = vocab.tokenize(TEXT, add_special=False) or [0]
    repeated = body * (n_tokens // len(body) + 1)
    return (first + repeated)[:n_tokens]


def measure_pace(model: Model, *, n_threads: int) -> Pace:
    """Return the seconds for a row of a prompt and for an output row, measured with a few small requests."""
    shape = Shape(SHAPES[1].n_prompt, SHAPES[-1].n_output)
    plan = Plan(shape, 1 + N_REPEATS, 1, 0.0)
    prompt = prompt_tokens(model.vocab, shape.n_prompt)
    with open_context(model, plan, n_threads=n_threads) as context:
        runner = RequestRunner(context, prompt, n_output=1)
        runner.warm_up()
        prompt_s = median(runner.run(clears=0).decode_s for _ in range(N_REPEATS))
        runner.warm_up()
        output_s = median(runner.run(prompt=prompt[:1]).decode_s for _ in range(N_REPEATS))
    return Pace(prompt_s / shape.n_prompt, output_s)
