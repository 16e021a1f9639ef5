"""The fault matrix: every function that a serving engine calls fails, in many ways, at every call.

    python -m tests.reliability.fault_matrix [--calls 200] [--function NAME …] [--speculation SHARE] [--save]

For each function, each outcome and each k, the engine serves the whole workload with that one fault.  The
function, and the request that the call was made for, decide which request must fail.  All other answers
must be those of the requests alone, and nothing may be left behind afterwards.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import anyio

from cllm.engine.sampling.batch_sampler import NotFiniteError
from cllm.errors import LlamaCallError
from tests.reliability.fault_workload import CONSTRAINED, N_VOCAB, Bench, Run
from tests.reliability.native_faults import (
    Fault,
    Outcome,
    changes,
    overwrites_row,
    raises,
    returns,
    selects_nothing,
)
from tests.reliability.record import Record, Table, conclude

CLAIM = (
    "A native call that fails once affects no request, or only the request of the call.  If no context "
    "can be made, the engine fails, and every request gets the error."
)


class Suffers(StrEnum):
    """Extent of the damage that a fault may cause."""

    NOBODY = "no request affected"
    ITS_REQUEST = "its request ends with error"
    ENGINE = "engine fails, everybody told"


OVER_PROCESS = "--over-process"
REFUSED = "refused at the call"
OTHERWISE = "not as it is to be"
# A first fault, after which the context is recreated; the fault of a row comes in addition.
FIRST_FAULT = Fault("llama_decode", 20, returns(-3, after=True))


@dataclass(frozen=True)
class Row:
    """One function, one way to fail, and the extent of the damage.

    Attributes
    ----------
    recovers : bool
        True: the run also has `FIRST_FAULT`.  A fault of `llama_decode` then comes after that one.
    """

    function: str
    outcome: Outcome
    suffers: Suffers
    recovers: bool = False

    def __str__(self) -> str:
        return f"{self.function}: {self.outcome}" + " (recovering)" * self.recovers


ERRORS = (raises(RuntimeError), raises(MemoryError))
DECODE = (
    returns(1), returns(2), returns(2, after=True), returns(-1), returns(-2),
    returns(-2, after=True), returns(-3), returns(-3, after=True), *ERRORS,
    raises(RuntimeError, after=True),
)  # fmt: skip
WRONG_POSITIONS = (changes("one more", lambda p: p + 1), changes("-1", lambda p: -1))
# Calls of the inference thread for the KV cache.  They belong to no request, so none may fail.
CACHE: Mapping[str, Sequence[Outcome]] = {
    "llama_decode": DECODE,
    "llama_synchronize": ERRORS,
    "llama_get_logits": (returns(None), *ERRORS),
    "llama_memory_seq_rm": (
        returns(False), returns(True, "True, undone"), returns(False, after=True), *ERRORS,
        raises(RuntimeError, after=True),
    ),
    "llama_memory_seq_cp": (
        returns(None, "undone"), *ERRORS, raises(RuntimeError, after=True),
    ),
    "llama_memory_seq_pos_max": (*WRONG_POSITIONS, *ERRORS),
    "llama_memory_seq_pos_min": (*WRONG_POSITIONS, *ERRORS),
    "llama_state_seq_get_size": (returns(0), *ERRORS),
    "llama_state_seq_get_data": (
        returns(0), returns(0, after=True), changes("half of it", lambda n: n // 2), *ERRORS,
    ),
    "llama_state_seq_set_data": (
        returns(0), returns(0, after=True), *ERRORS, raises(RuntimeError, after=True),
    ),
}  # fmt: skip
# A buffer that is too small, after which the call is repeated with a larger one; and failed calls that free.
BUFFERS: Mapping[str, Sequence[Outcome]] = {
    "llama_tokenize": (returns(-7),),
    "llama_token_to_piece": (returns(-3),),
    "llama_sampler_free": (
        raises(RuntimeError, after=True), raises(MemoryError, after=True),
    ),
}  # fmt: skip
SAMPLERS = (
    "dist", "dry", "greedy", "logit_bias", "min_p", "mirostat", "mirostat_v2",
    "penalties", "temp", "temp_ext", "top_k", "top_n_sigma", "top_p", "typical", "xtc",
)  # fmt: skip
SELECTS_NOTHING = selects_nothing()
NOT_FINITE = tuple(
    overwrites_row(float(value), N_VOCAB, NotFiniteError) for value in ("nan", "inf", "-inf")
)
REQUEST: Mapping[str, Sequence[Outcome]] = {
    "llama_get_logits": NOT_FINITE,
    "llama_sampler_apply": (SELECTS_NOTHING, *ERRORS),
    "llama_sampler_accept": ERRORS,
    "llama_sampler_chain_default_params": ERRORS,
    "llama_sampler_chain_init": (replace(returns(None), cause=LlamaCallError), *ERRORS),
    "llama_sampler_chain_add": (*ERRORS, raises(RuntimeError, after=True)),
    **{f"llama_sampler_init_{name}": (returns(None), *ERRORS) for name in SAMPLERS},
    "llama_sampler_clone": (returns(None), *ERRORS),
    "llama_tokenize": ERRORS,
    "llama_token_to_piece": ERRORS,
    "llama_vocab_is_eog": ERRORS,
    "llama_vocab_get_attr": ERRORS,
    "llama_vocab_get_text": ERRORS,
}
CONTEXT: Mapping[str, Sequence[Outcome]] = {
    "llama_context_default_params": ERRORS,
    "llama_max_parallel_sequences": ERRORS,
    "llama_model_meta_val_str": ERRORS,
    "llama_init_from_model": (returns(None), *ERRORS),
    **{
        f"llama_{name}": ERRORS
        for name in ("n_batch", "n_ctx", "n_ctx_seq", "n_rs_seq", "n_seq_max", "n_ubatch")
    },
    "llama_get_memory": (returns(None), *ERRORS),
    "llama_free": (raises(RuntimeError, after=True),),
}
RECOVERING = ("llama_decode", "llama_memory_seq_pos_max", "llama_memory_seq_rm")


def _rows(
    outcomes: Mapping[str, Sequence[Outcome]], suffers: Suffers, *, recovers: bool = False
) -> tuple[Row, ...]:
    return tuple(Row(f, o, suffers, recovers) for f, given in outcomes.items() for o in given)


FAMILIES: Mapping[str, tuple[Row, ...]] = {
    "cache": _rows(CACHE, Suffers.NOBODY),
    "buffers": _rows(BUFFERS, Suffers.NOBODY),
    "requests": _rows(REQUEST, Suffers.ITS_REQUEST),
    "contexts": _rows(CONTEXT, Suffers.ENGINE, recovers=True),
    "recovery": _rows({f: CACHE[f] for f in RECOVERING}, Suffers.NOBODY, recovers=True),
}
ROWS = tuple(row for rows in FAMILIES.values() for row in rows)
FUNCTIONS = tuple(dict.fromkeys(row.function for row in ROWS))


@dataclass
class Tried:
    """Results of one row.

    Attributes
    ----------
    n_calls : int
        Calls of the function in a run of the workload.
    n_missed : int
        Runs with fewer calls than k.  The moment of a cancellation, and so the number of decodes, varies.
    outcomes : Counter
        Number of runs by outcome, in the words of the table.
    wrong : list of str
        Differences from the expected results.
    """

    row: Row
    n_calls: int = 0
    n_tried: int = 0
    n_missed: int = 0
    n_ended: int = 0
    n_exact: int = 0
    n_survived: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, k: int, run: Run, affected: set[str] | None, free: str | None) -> None:
        """Count a run that was checked."""
        self.wrong += [f"{self.row}, call {k}: {wrong}" for wrong in run.wrong]
        if not run.met:
            self.n_missed += 1
            return
        self.n_tried += 1
        self.n_survived += not run.has_failed
        self.n_ended += len(run.failed | run.refused)
        self.n_exact += len(run.whole - {free})
        self.outcomes[_words(run, affected)] += 1


def _words(run: Run, affected: set[str] | None) -> str:
    if run.wrong:
        return OTHERWISE
    if affected is None:
        return Suffers.ENGINE
    if not affected:
        return Suffers.NOBODY
    return REFUSED if run.met[0].is_input else Suffers.ITS_REQUEST


def affected_by(row: Row, run: Run) -> tuple[set[str] | None, str | None]:
    """Return the requests that must end with an error, and one that may continue in another way.

    None in place of the set: the engine fails, and all requests without an answer get the error.
    """
    if row.suffers is Suffers.ENGINE:
        return None, None
    met = run.met[0]
    if row.suffers is Suffers.NOBODY:
        return set(), None
    assert met.owner is not None, f"{row}: whose call was it?"
    if row.outcome is SELECTS_NOTHING and met.owner in CONSTRAINED:
        # If the samplers leave no token, one is drawn again from all that the constraint allows.
        return set(), met.owner
    return {met.owner}, None


async def try_call(bench: Bench, row: Row, k: int) -> tuple[Run, set[str] | None, str | None]:
    """Serve the workload with the fault of a row at its k-th call."""
    fault = Fault(row.function, k, row.outcome)
    run = await bench.run(fault, FIRST_FAULT) if row.recovers else await bench.run(fault)
    run.met = [met for met in run.met if met.fault is fault]
    if not run.met:
        if run.n_calls.get(row.function, 0) >= k:
            run.wrong.append("the fault was not met")
        return run, set(), None
    affected, free = affected_by(row, run)
    bench.check(run, affected, free)
    return run, affected, free


async def try_rows(bench: Bench, rows: Iterable[Row], calls: Sequence[int]) -> list[Tried]:
    """Try each row at those of the calls that the workload makes."""
    found = []
    for row in rows:
        started = time.perf_counter()
        first = (FIRST_FAULT,) if row.recovers else ()
        tried = Tried(row, await bench.count_calls(row.function, *first))
        for k in calls:
            if row.recovers and row.function == FIRST_FAULT.function and k <= FIRST_FAULT.k:
                continue
            if k <= tried.n_calls:
                tried.add(k, *await try_call(bench, row, k))
        if not tried.n_calls or (tried.n_missed and not tried.n_tried):
            tried.wrong.append(f"{row}: the workload makes no such call")
        found.append(tried)
        seconds = time.perf_counter() - started
        sys.stderr.write(f"{row}: {tried.n_tried} of {tried.n_calls} calls, {seconds:.1f} s\n")
        sys.stderr.writelines(f"  WRONG {wrong}\n" for wrong in tried.wrong[:3])
    return found


def table(found: Sequence[Tried]) -> Table:
    """Call × fault × what followed."""
    head = (
        "call", "fault", "calls made", "tried", "outcome", "requests that ended with error",
        "requests answered exactly", "engine went on",
    )  # fmt: skip
    rows = [
        (
            t.row.function,
            str(t.row.outcome) + ", after a new context" * t.row.recovers,
            t.n_calls,
            t.n_tried,
            "; ".join(f"{words} ({n})" for words, n in t.outcomes.most_common()),
            t.n_ended,
            t.n_exact,
            t.n_survived,
        )
        for t in found
    ]
    return Table(head, rows, "One fault each; every k from 1 on.")


def wrong_in(found: Iterable[Tried]) -> list[str]:
    """Return all differences from the expected results."""
    return [line for tried in found for line in tried.wrong]


def record(found: Sequence[Tried], seconds: float, options: Sequence[str]) -> Record:
    """Return the record: the figures and the table; `options` are those of the command line."""
    figures = {
        "functions": len({tried.row.function for tried in found}),
        "functions, each with its ways to fail": len(found),
        "runs of the workload": sum(tried.n_tried for tried in found),
        "requests answered whole, as alone": sum(tried.n_exact for tried in found),
        "requests that ended with the error foretold": sum(tried.n_ended for tried in found),
        "not as it is to be": len(wrong_in(found)),
        "seconds": round(seconds, 1),
    }
    command = " ".join(["python -m tests.reliability.fault_matrix", *options, "--save"])
    name = "fault_process" if OVER_PROCESS in options else "fault_matrix"
    return Record(name, CLAIM, command, figures, [table(found)])


async def prove(make_bench: Callable[[], Bench], rows: Sequence[Row], n_calls: int) -> list[Tried]:
    """Try each row at every call up to the `n_calls`th, and return the results."""
    async with make_bench() as bench:
        return await try_rows(bench, rows, range(1, n_calls + 1))


def main() -> int:
    """Run the matrix; 1 if a result differs from the expected one."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.fault_matrix")
    parser.add_argument("--calls", type=int, default=200, help="k from 1 to this")
    parser.add_argument("--function", nargs="*", choices=FUNCTIONS, help="try only these functions")
    parser.add_argument("--speculation", type=float, metavar="SHARE", help="share of right drafts")
    parser.add_argument(
        OVER_PROCESS, action="store_true", help="try an engine that has a process of its own"
    )
    parser.add_argument("--save", action="store_true", help="keep the record")
    arguments = parser.parse_args()
    rows = [r for r in ROWS if not arguments.function or r.function in arguments.function]
    from tests.reliability.fault_process import ProcessBench  # it imports this module

    make_bench = ProcessBench if arguments.over_process else partial(Bench, arguments.speculation)
    started = time.perf_counter()
    found = anyio.run(prove, make_bench, rows, arguments.calls)
    seconds = time.perf_counter() - started
    options = [argument for argument in sys.argv[1:] if argument != "--save"]
    return conclude(record(found, seconds, options), wrong_in(found), is_kept=arguments.save)


if __name__ == "__main__":
    sys.exit(main())
