"""A check of how busy other programs keep the processors."""

from __future__ import annotations

import os
import time

from cllm.doctor.findings import Check, Status
from cllm.engine.core.thread_tuner import ProcessorLoad
from cllm.engine.thread.processor_load import ProcessorReader

WINDOW_S = 0.25
OTHERS = 0.3  # processors; less is no other program that computes


def processors_check(n_threads: int) -> Check:
    """Measure the load of the processors for 0.25 s and return a check.

    Parameters
    ----------
    n_threads : int
        Compute threads.
    """
    reader = ProcessorReader()
    time.sleep(WINDOW_S)
    return check_processors(reader.read(), n_processors(), n_threads)


def n_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_processors(load: ProcessorLoad | None, n_allowed: int, n_threads: int) -> Check:
    """Compare the threads with what other programs leave; None: the system reports no load."""
    text = f"{n_allowed}, for {n_threads} compute thread{'s' * (n_threads > 1)}"
    if load is None:
        return Check("processors", Status.OK, text)
    text += f"; other programs use {load.others:.1f}"
    if load.others < OTHERS:
        return Check("processors", Status.OK, text)
    text += ": times below are longer than on a quiet machine"
    if n_threads > 1:
        text += ", and an engine computes with fewer threads while that is faster"
    return Check("processors", Status.WARNING, text)
