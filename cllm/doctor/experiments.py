"""The experiments: one way in which a server handles identical requests well, and six others.

Each experiment has its own context and runs its requests there, one after another.  Field reports proposed
four of them.  "clear on finish" reads the positions after seq_rm.  "clear on reuse" takes another seq_id each
time.  "restart at 0" shows continuity errors.  "never clear" continues from the last position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cllm.bindings import Batch, Model
from cllm.doctor.diagnosis import diagnose
from cllm.doctor.findings import Cause, Experiment, Measurement, Plan, Refusal
from cllm.doctor.queueing import run_behind_a_lock
from cllm.doctor.workload import RequestRunner, open_context, prompt_tokens
from cllm.errors import PositionError

Outcome = tuple[list[Measurement], Refusal | None]


@dataclass(frozen=True, slots=True)
class Setup:
    """Description of an experiment; `run` takes a runner and the number of requests."""

    name: str
    question: str
    expected: Cause
    run: Callable[[RequestRunner, int], Outcome]


def run_experiments(model: Model, plan: Plan, *, n_threads: int) -> Iterator[Experiment]:
    """Run the experiments in the order of `SETUPS`, and yield each as soon as it is finished."""
    for setup in SETUPS:
        yield run_experiment(setup, model, plan, n_threads=n_threads)


def run_experiment(setup: Setup, model: Model, plan: Plan, *, n_threads: int) -> Experiment:
    """Run one experiment in its own context, and return it with its diagnosis."""
    prompt = prompt_tokens(model.vocab, plan.shape.n_prompt)
    with open_context(model, plan, n_threads=n_threads) as context:
        runner = RequestRunner(context, prompt, plan.shape.n_output)
        runner.warm_up()
        requests, refusal = setup.run(runner, plan.n_requests)
    return Experiment(
        setup.name,
        setup.question,
        setup.expected,
        tuple(requests),
        refusal,
        diagnose(requests, refusal),
    )


def clear_on_finish(runner: RequestRunner, n_requests: int) -> Outcome:
    """Show the effect of the `seq_rm` that a completion callback has to call."""
    return [runner.run(clears=0) for _ in range(n_requests)], None


def never_clear(runner: RequestRunner, n_requests: int) -> Outcome:
    """Never call `seq_rm`: each request continues the sequence of the one before."""
    return [runner.run() for _ in range(n_requests)], None


def clear_wrong_id(runner: RequestRunner, n_requests: int) -> Outcome:
    """Call `seq_rm` with another seq_id, which is empty: it returns True each time."""
    return [runner.run(clears=1) for _ in range(n_requests)], None


def clear_on_reuse(runner: RequestRunner, n_requests: int) -> Outcome:
    """Use the seq_ids in rotation, and clear each just before its next request."""
    requests = []
    for number in range(n_requests):
        seq_id = number % runner.context.n_seq_max
        runner.context.seq_rm(seq_id)
        requests.append(runner.run(seq_id))
    return requests, None


def restart_at_0(runner: RequestRunner, _n_requests: int) -> Outcome:
    """Begin at position 0 again in a sequence that was not cleared.

    The first request is not cleared.  The second is rejected.  It runs again after `seq_rm`.
    """
    context = runner.context
    first = runner.run()
    before = (context.seq_pos_max(0), context.n_cells)
    batch = Batch(context.n_batch)
    batch.add(0, runner.prompt, 0, n_outputs=1)
    try:
        context.decode(batch)
    except PositionError as refused:
        with llama_errors() as messages:
            code = context.decode_unchecked(batch)
        refusal = Refusal(
            seq_id=refused.seq_id,
            last_pos=refused.last_pos,
            first_pos=refused.first_pos,
            error=str(refused),
            code=code,
            message="\n".join(messages),
            is_unchanged=(context.seq_pos_max(0), context.n_cells) == before,
        )
    else:
        raise AssertionError("the bindings let positions restart")
    context.seq_rm(0)
    return [first, runner.run(clears=0)], refusal


def resend_history(runner: RequestRunner, n_requests: int) -> Outcome:
    """Send all earlier prompts before each prompt, and clear each sequence when its request ends."""
    requests = [runner.run(clears=0, prompt=runner.prompt * (n + 1)) for n in range(n_requests)]
    return requests, None


def queue(runner: RequestRunner, n_requests: int) -> Outcome:
    """Submit the requests of all clients at once, serve them behind one lock, and time them in the clients."""
    return run_behind_a_lock(runner, n_requests), None


SETUPS = (
    Setup("clear on finish", "seq_rm(seq_id, -1, -1) when a request ends", Cause.FLAT,
          clear_on_finish),
    Setup("never clear", "no seq_rm: the next request continues on the same seq_id",
          Cause.NOT_CLEARED, never_clear),
    Setup("clear the wrong id", "seq_rm when a request ends, but of another seq_id",
          Cause.WRONG_SEQ_ID, clear_wrong_id),
    Setup("clear on reuse", "seq_ids in rotation, seq_rm only of the one about to be used",
          Cause.CLEARED_ON_REUSE, clear_on_reuse),
    Setup("restart at 0", "positions begin at 0 again, no seq_rm", Cause.POSITIONS_RESTARTED,
          restart_at_0),
    Setup("resend history", "seq_rm is right, but each prompt carries the earlier ones",
          Cause.HISTORY_RESENT, resend_history),
    Setup("queue", "all clients at once, served one after another behind a lock",
          Cause.QUEUEING, queue),
)  # fmt: skip
SUBJECT = SETUPS[0]  # the experiment that answers the question


class _Collector(logging.Handler):
    """Log handler that appends the messages of errors to a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@contextmanager
def llama_errors() -> Iterator[list[str]]:
    """Yield a list that collects the errors which llama.cpp logs during the block."""
    messages: list[str] = []
    collector = _Collector(messages)
    logger = logging.getLogger("cllm.llama")
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
