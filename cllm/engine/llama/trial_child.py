"""The process of `constraints.trial`: a bad constraint ends this process alone.

`python -m cllm.engine.llama.trial_child KIND MODEL_PATH MEMORY_BYTES` loads the vocabulary, says that
it is ready, and answers each line of standard input with one of standard output, in JSON:
`{"field": …, "text": …}` with `{"error": null}` or with what the constraint should have been.  It may
then take so much more memory, and it ends when standard input does.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time

import numpy as np

from cllm.bindings import Candidates, Grammar, Model, Vocabulary
from cllm.engine.child_process import answer_requests, answers_of_this_process, limit_memory
from cllm.engine.constraints.llguidance import Guidance
from cllm.errors import CllmError, InvalidArgumentError, InvalidRequestError

N_STEPS = 32
WALK_S = 0.8
# CPU time of one token, for 100,000 tokens of vocabulary: a neighbour that is busy does not count.
STEP_S = 0.25
START_ALARM_S, TRIAL_ALARM_S = 90, 10


def main(kind: str, model_path: str, memory_bytes: int) -> None:
    """Answer until the input ends."""
    signal.alarm(START_ALARM_S)
    answers = answers_of_this_process()
    try:
        model = Model(model_path, vocab_only=True)
    except CllmError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    with answers, model:
        follower: GrammarFollower | GuidanceFollower
        if kind == "llguidance":
            follower = GuidanceFollower(model.vocab)
        else:
            follower = GrammarFollower(model.vocab)
            # The first walk is several times slower than the others.
            follower.fault("grammar", "root ::= .*")

        def answer(field: str, text: str) -> dict[str, str | None]:
            return {"error": follower.fault(field, text)}

        limit_memory(memory_bytes)
        answer_requests(answers, {"error": None}, answer, alarm_s=TRIAL_ALARM_S)


class GrammarFollower:
    """Follows grammars a while, the same way every time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        n_vocab = vocabulary.n_tokens
        self._vocabulary = vocabulary
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._logits = np.zeros(n_vocab, np.float32)
        self._ends = np.array([vocabulary.is_eog(token) for token in range(n_vocab)])
        self._step_s = STEP_S * max(1.0, n_vocab / 100_000)

    def fault(self, field: str, text: str) -> str | None:
        """What the grammar should have been, if it is not."""
        try:
            grammar = Grammar(self._vocabulary, text)
        except InvalidArgumentError:
            return "GBNF that llama.cpp can read, with tokens that the vocabulary has"
        with grammar:
            return self._walk(grammar, hashlib.sha256(text.encode()).digest())

    def _walk(self, grammar: Grammar, seed: bytes) -> str | None:
        deadline = time.monotonic() + WALK_S
        for n_tokens in range(N_STEPS):
            if time.monotonic() > deadline:
                return None
            start = time.thread_time()
            candidates = Candidates(self._ids, self._logits)
            grammar.apply(candidates)
            allowed = np.isfinite(candidates.logits)
            if not allowed.any():
                return (
                    f"one that the vocabulary can write: after {n_tokens} tokens no other may come"
                )
            # A token that ends the output ends the walk: only where there is no other.
            tokens = candidates.ids[allowed & ~self._ends]
            if not len(tokens):
                return None
            draw = hashlib.sha256(seed + bytes([n_tokens])).digest()
            grammar.accept(int(tokens[int.from_bytes(draw[:8], "big") % len(tokens)]))
            spent = time.thread_time() - start
            if spent > self._step_s:
                return f"faster to follow: a token took {spent:.2f} s"
        return None


class GuidanceFollower:
    """Follows schemas and regular expressions a while.

    What it must not do is take for ever, or all memory: llguidance limits most of that by itself.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._guidance = Guidance(vocabulary, 1)

    def fault(self, field: str, text: str) -> str | None:
        """What the constraint should have been, if it cannot be compiled."""
        deadline = time.monotonic() + WALK_S
        try:
            compiled = self._guidance.compile(field, text)
        except InvalidRequestError as error:
            return error.limit
        try:
            constraint = compiled.start()
            for n_tokens in range(N_STEPS):
                (mask,) = self._guidance.masks([constraint])
                if isinstance(mask, Exception) or time.monotonic() > deadline:
                    break
                mask[list(self._guidance.ends)] = False
                (tokens,) = mask.nonzero()
                if not len(tokens):
                    break
                constraint.accept(int(tokens[(7 * n_tokens + len(tokens) // 2) % len(tokens)]))
        except CllmError:
            pass
        return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
