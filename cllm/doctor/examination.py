"""The examination: every check, then the experiments, then the answer; each as soon as it is known."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from cllm.bindings import Model
from cllm.doctor.diagnosis import conclude
from cllm.doctor.engine_check import engine_check
from cllm.doctor.experiments import SUBJECT, run_experiments
from cllm.doctor.findings import Conclusion, Finding, Plan, Status
from cllm.doctor.installation import installation_checks, memory_check
from cllm.doctor.last_crash import last_crash_check
from cllm.doctor.model_checks import model_checks
from cllm.doctor.plan import choose_plan
from cllm.doctor.preflight import preflight_check
from cllm.doctor.processors import processors_check
from cllm.doctor.workload import measure_pace

BUDGET_S, N_REQUESTS = 60.0, 24
QUICK_BUDGET_S, QUICK_N_REQUESTS = 8.0, 16


def examine(path: Path, *, n_threads: int, is_quick: bool = False) -> Generator[Finding]:
    """Examine the installation and one model.

    Use it from one thread only, and not from a coroutine: one experiment starts an event loop.  Closing the
    iterator early frees everything.

    Parameters
    ----------
    path : Path
        A GGUF file.
    n_threads : int
        Compute threads.
    is_quick : bool
        Aim at 8 s of experiments with up to 16 requests each, instead of 60 s with up to 24.

    Yields
    ------
    Check, Plan, Experiment, Conclusion
        Findings in this order; the check of the engine comes after the experiments.  After a failed check there are
        no experiments and no conclusion.
    """
    for check in installation_checks():
        yield check
        if check.status is Status.FAILED:
            return
    yield from last_crash_check()
    check = preflight_check(path)
    yield check
    if check.status is Status.FAILED:
        return
    plan, conclusion = None, None
    with Model(path) as model, closing(_examine_model(model, n_threads, is_quick)) as findings:
        for finding in findings:
            if isinstance(finding, Conclusion):
                conclusion = finding
                continue
            plan = finding if isinstance(finding, Plan) else plan
            yield finding
    # The model is freed by now: there may be no room for two.
    if plan is not None and conclusion is not None:
        yield engine_check(path, plan, n_threads=n_threads)
        yield conclusion


def _examine_model(model: Model, n_threads: int, is_quick: bool) -> Generator[Finding]:
    yield memory_check(model.size_bytes)
    yield processors_check(n_threads)
    is_usable = True
    for check in model_checks(model, n_threads=n_threads):
        yield check
        is_usable = is_usable and check.status is not Status.FAILED
    if not is_usable:
        return
    plan = choose_plan(
        measure_pace(model, n_threads=n_threads),
        budget_s=QUICK_BUDGET_S if is_quick else BUDGET_S,
        n_requests=QUICK_N_REQUESTS if is_quick else N_REQUESTS,
        n_ctx_train=model.n_ctx_train,
    )
    yield plan
    experiments = []
    for experiment in run_experiments(model, plan, n_threads=n_threads):
        yield experiment
        experiments.append(experiment)
    subject = next(e for e in experiments if e.name == SUBJECT.name)
    yield conclude(experiments, subject)
