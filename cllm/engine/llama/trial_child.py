"""The process of `constraints.trial`: a bad constraint ends this process alone.

`python -m cllm.engine.llama.trial_child MODEL MEMORY_BYTES` loads the vocabulary of a model, given as a
`FileContent` in JSON, and reports that it is ready.  Then it answers each line of standard input with
one of standard output, both in JSON: `{"field": …, "text": …}` with `{"error": null}` or with the
requirement that the constraint violates.  After the start it may allocate MEMORY_BYTES more.  It ends when
standard input ends.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

from cllm.bindings import Model, Vocabulary
from cllm.engine.child_process import answer_requests, answers_of_this_process, end_after
from cllm.engine.constraints.llguidance import Guidance
from cllm.engine.file_content import FileContent, loading
from cllm.engine.plain_values import of_plain
from cllm.engine.thread.worker_thread import STACK_BYTES, start_thread
from cllm.errors import CllmError, InvalidRequestError
from cllm.system import limit_memory

N_STEPS = 32
WALK_S = 0.8  # of processor time: other busy processes do not count
START_ALARM_S, TRIAL_ALARM_S = 90, 10


def main(content: FileContent, memory_bytes: int) -> None:
    """Answer until the input ends."""
    end_after(START_ALARM_S)
    answers = answers_of_this_process()
    try:
        with loading([content]):
            model = Model(content.path, vocab_only=True)
    except CllmError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    with answers, model:
        follower = GuidanceFollower(model.vocab)

        def answer(field: str, text: str) -> dict[str, str | None]:
            return {"error": follower.fault(field, text)}

        limit_memory(memory_bytes)
        # llguidance recurses along rules.  On a quarter of the engine's stack, too deep rules overflow here.
        serve = partial(answer_requests, answers, {"error": None}, answer, alarm_s=TRIAL_ALARM_S)
        start_thread(serve, "trial", STACK_BYTES // 4).join()


class GuidanceFollower:
    """Follows constraints for a few tokens.

    llguidance itself limits most of the costs of a constraint.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._guidance = Guidance(vocabulary, 1)
        self._guidance.tokenizer  # noqa: B018  # built before the time of a trial is measured

    def fault(self, field: str, text: str) -> str | None:
        """Return the requirement that a constraint violates; None if it can be compiled and followed."""
        deadline = time.process_time() + WALK_S
        try:
            compiled = self._guidance.compile(field, text)
        except InvalidRequestError as error:
            return error.limit
        try:
            constraint = compiled.start()
            constraint.forced()  # computes a forced text in full, however long it is
            for n_tokens in range(N_STEPS):
                (mask,) = self._guidance.masks([constraint])
                if isinstance(mask, Exception):
                    break
                if not mask.any():
                    return f"one that the vocabulary can write: after {n_tokens} tokens no other may come"
                mask[list(self._guidance.ends)] = False
                (tokens,) = mask.nonzero()
                if not len(tokens):
                    break
                constraint.accept(int(tokens[(7 * n_tokens + len(tokens) // 2) % len(tokens)]))
                if time.process_time() > deadline:  # checked last: at least one token is tried
                    break
        except CllmError as error:
            return f"one that can be followed ({error})"
        return None


if __name__ == "__main__":
    main(of_plain(FileContent, json.loads(sys.argv[1])), int(sys.argv[2]))
