"""OutputProcessor: turns the logits of a decoded batch into tokens, text, log probabilities and events."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.commands import Progressed
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.run_queue import RunQueue, last_delta, push
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.output import FinishReason, TokenDelta, TokenLogprob
from cllm.engine.sampling.batch_sampler import BatchSampler, NotFiniteError
from cllm.engine.vocabulary import OutputVocabulary

# A row of logits, a token, the number of alternatives → the log probabilities of the token and of these.
ReadLogprob = Callable[[NDArray[np.float32], int, int], TokenLogprob]
# A sequence, how many drafts it had, how many of them were right.
OnDrafts = Callable[[Sequence, int, int], None]
Logprobs = tuple[TokenLogprob, ...] | None


class Output(NamedTuple):
    """An output row to sample from.

    Attributes
    ----------
    drafts : tuple of int
        Drafts of this tick.  Their rows follow the row of the last real token, in order.
    n_accepted : int
        Number of drafts that were right so far; the next draft is the guess for this row.
    """

    row: int
    sequence: Sequence
    drafts: tuple[int, ...] = ()
    n_accepted: int = 0

    def is_right(self, token: int | Exception) -> bool:
        """Return True if `token` is the draft for this row; False without one."""
        return self.drafts[self.n_accepted : self.n_accepted + 1] == (token,)


def _exclude(
    outputs: list[Output], logits: NDArray[np.float32]
) -> list[tuple[NDArray[np.float32], list[int], NDArray[np.float32]]]:
    """Set the logits of excluded tokens to -inf, for the first token of each request.

    Return the rows, tokens and logits: log probabilities are read from the logits as they were.
    """
    hidden = []
    for output in outputs:
        sequence = output.sequence
        if sequence.request.excluded and not sequence.n_sampled:
            tokens, row = list(sequence.request.excluded), logits[output.row]
            hidden.append((row, tokens, row[tokens]))
            row[tokens] = -np.inf
    return hidden


class OutputProcessor:
    """Second half of a tick.  An error of a row affects its own request only.

    Parameters
    ----------
    n_vocab : int
    nan_spreads : bool
        True if NaN in one sequence's cells can get into the logits of others.
    on_drafts : callable
        Called with a sequence, its number of drafts, and the number of right ones.
    """

    def __init__(
        self,
        vocabulary: OutputVocabulary,
        kv_cache: KVCache,
        manager: KVCacheManager,
        queue: RunQueue,
        recorder: Recorder,
        read_logprob: ReadLogprob,
        *,
        n_vocab: int,
        nan_spreads: bool,
        clock: Callable[[], float],
        on_drafts: OnDrafts,
    ) -> None:
        self._vocabulary = vocabulary
        self._kv_cache = kv_cache
        self._manager = manager
        self._queue = queue
        self._recorder = recorder
        self._read_logprob = read_logprob
        self._sampler = BatchSampler(n_vocab)
        self._nan_spreads = nan_spreads
        self._clock = clock
        self._on_drafts = on_drafts

    def commit(self, chunks: list[Chunk], logits: NDArray[np.float32]) -> list[Output]:
        """Advance the bookkeeping by the computed chunks, score, and return the rows to sample from."""
        outputs, row = [], 0
        for chunk in chunks:
            sequence, n_outputs, completes = chunk.sequence, chunk.n_outputs, chunk.completes
            assert sequence.placement.slot is not None
            n_prompt_left = max(0, sequence.n_prompt - sequence.n_computed)
            self._recorder.n_prefill_tokens += min(chunk.n_tokens, n_prompt_left)
            # Rows of drafts count too: those of wrong drafts are removed after sampling.
            self._kv_cache.advance(sequence.placement.slot, chunk.n_rows)
            sequence.n_drafted += len(chunk.drafts)
            self._recorder.n_drafted_tokens += len(chunk.drafts)
            rows = logits[row : row + n_outputs]
            if (sequence.is_scored or self._score(sequence, rows)) and completes:
                first = row + n_outputs - 1 - len(chunk.drafts)
                outputs.append(Output(first, sequence, chunk.drafts))
            row += n_outputs
        return outputs

    def sample(self, outputs: list[Output], logits: NDArray[np.float32]) -> None:
        """Give each of these sequences its next token, from its row, and more if drafts are right."""
        while outputs:
            started = self._clock()
            n_handovers = self._sampler.n_gil_handovers
            hidden = _exclude(outputs, logits)
            tokens = self._sampler.sample(
                logits, [o.row for o in outputs], [o.sequence.sampler for o in outputs]
            )
            for row, excluded, values in hidden:
                row[excluded] = values
            self._recorder.n_gil_handovers += self._sampler.n_gil_handovers - n_handovers
            sampled = self._clock()
            self._recorder.sample_s += sampled - started
            following = []
            for output, token in zip(outputs, tokens, strict=True):
                is_right, sequence = output.is_right(token), output.sequence
                if is_right:
                    sequence.n_accepted += 1
                    self._recorder.n_accepted_tokens += 1
                self._advance(sequence, token, logits[output.row], sampled)
                if is_right and sequence.placement.slot is not None:
                    accepted = output.n_accepted + 1
                    following.append(output._replace(row=output.row + 1, n_accepted=accepted))
                elif output.drafts:
                    self._settle(output, output.n_accepted + is_right)
            outputs = following
            self._recorder.n_decoding_rows += len(outputs)
            self._recorder.detokenize_s += self._clock() - sampled

    def _settle(self, output: Output, n_accepted: int) -> None:
        """Remove the rows of wrong drafts, and report how many drafts were right."""
        self._remove_surplus(output.sequence)
        self._on_drafts(output.sequence, len(output.drafts), n_accepted)

    def _remove_surplus(self, sequence: Sequence) -> None:
        """Remove the computed rows after the last token but one, which were drafts."""
        if sequence.placement.slot is not None:
            self._manager.cells.truncate(sequence.placement.slot, sequence.n_settled)

    def _score(self, sequence: Sequence, logits: NDArray[np.float32]) -> bool:
        """Score the given tokens of a sequence by the rows before them; return False if that ended it.

        Prompt tokens get log probabilities.  Given output tokens are passed to the sampler.
        """
        n_top, sampler = sequence.request.params.prompt_logprobs or 0, sequence.sampler
        try:
            for row in logits[: sequence.n_to_score - sequence.n_scored]:
                token = sequence.tokens[sequence.n_scored]
                if sequence.n_scored < sequence.n_prompt:
                    sequence.prompt_logprobs.append(self._read_logprob(row, token, n_top))
                elif sampler is not None:
                    self._sampler.resample(row, sampler, token)
                sequence.n_scored += 1
        except Exception as error:
            self._fail(sequence, error)
            return False
        return True

    def _advance(
        self, sequence: Sequence, token: int | Exception, row: NDArray[np.float32], now: float
    ) -> None:
        """Add one sampled token to a sequence."""
        if isinstance(token, Exception):
            self._fail(sequence, token)
            return
        n_top, logprob = sequence.request.params.logprobs, None
        if n_top is not None:
            try:
                logprob = self._read_logprob(row, token, n_top)
            except Exception as error:
                self._fail(sequence, error)  # no token is reported without its log probability
                return
        sequence.tokens.append(token)
        self._recorder.n_output_tokens += 1
        logprobs = None if logprob is None else (logprob,)
        try:
            self._append_text(sequence, token, logprobs, now)
        except Exception as error:
            end = TokenDelta("", (token,), FinishReason.ERROR, logprobs=logprobs)
            self._queue.finish(sequence, end, cause=error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a request with unusable logits, or with a sampler that failed."""
        self._queue.finish(sequence, last_delta(FinishReason.ERROR), cause=error)
        if isinstance(error, NotFiniteError) and self._nan_spreads:
            # NaN stays in the cells of the removed sequence: only a new context is clean.
            self._manager.cells.fault = error

    def _append_text(self, sequence: Sequence, token: int, logprobs: Logprobs, now: float) -> None:
        """Add the text of a new token and its event; end the request if the output is complete."""
        params = sequence.request.params
        if self._vocabulary.is_eog(token) or token in params.stop_token_ids:
            self._end(sequence, TokenDelta("", (token,), FinishReason.STOP, token, logprobs))
            return
        text = push(sequence, token, self._vocabulary)
        reason, stop_reason = None, None
        if (match := sequence.detokenizer.stop_match) is not None:
            reason, stop_reason = FinishReason.STOP, match
        elif sequence.n_output == params.max_tokens:
            reason, stop_reason = FinishReason.LENGTH, "max_tokens"
        elif len(sequence.tokens) > self._kv_cache.n_ctx_seq:
            reason, stop_reason = FinishReason.LENGTH, "context"
        delta = TokenDelta(text, (token,), reason, stop_reason, logprobs)
        if reason is not None:
            self._end(sequence, delta)
            return
        sequence.n_unread += 1
        sequence.output.add(delta, now)
        self._queue.events.append(Progressed(sequence.request_id, delta))

    def _end(self, sequence: Sequence, delta: TokenDelta) -> None:
        """End a request whose output is complete."""
        self._remove_surplus(sequence)  # before the prefix cache gets it
        self._queue.finish(sequence, delta)
