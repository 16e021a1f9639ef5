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
    """Return a check of the processors, after a look at them of 0.25 s.

    Parameters
    ----------
    n_threads : int
        Compute threads.
    """
    reader = ProcessorReader()
    time.sleep(WINDOW_S)
    return check_processors(reader.read(), os.cpu_count() or 1, n_threads)


def check_processors(load: ProcessorLoad | None, n_processors: int, n_threads: int) -> Check:
    """Compare the threads with what other programs leave; None: the system reports no load."""
    text = f"{n_processors}, for {n_threads} compute thread{'s' * (n_threads > 1)}"
    if load is None:
        return Check("processors", Status.OK, text)
    text += f"; other programs use {load.others:.1f}"
    if load.others < OTHERS:
        return Check("processors", Status.OK, text)
    text += ": times below are longer than on a quiet machine"
    if n_threads > 1:
        text += ", and an engine computes with fewer threads while that is faster"
    return Check("processors", Status.WARNING, text)
