"""A check of how busy other programs keep the processors."""

from __future__ import annotations

import time

from cllm.doctor.findings import Check, Status
from cllm.engine.core.thread_tuner import ProcessorLoad
from cllm.engine.thread.processor_load import ProcessorReader
from cllm.processors import Processors, usable_processors

WINDOW_S = 0.25
OTHERS = 0.3  # processors that other programs may use without a warning


def processors_check(n_threads: int) -> Check:
    """Measure the load of the processors for 0.25 s and return a check.

    Parameters
    ----------
    n_threads : int
        Compute threads.
    """
    reader = ProcessorReader()
    time.sleep(WINDOW_S)
    return check_processors(reader.read(), usable_processors(), n_threads)


def check_processors(load: ProcessorLoad | None, usable: Processors, n_threads: int) -> Check:
    """Compare the threads with the quota, and with the load of other programs (`load` None: unknown)."""
    text = str(usable.n_allowed)
    if usable.n_cores != usable.n_allowed:
        text += f" on {usable.n_cores} cores"
    if usable.quota is not None:
        text += f", of which a quota of the cgroup allows {usable.quota:g}"
    text += f", for {n_threads} compute thread{'s' * (n_threads > 1)}"
    if usable.quota is not None and n_threads > usable.quota:
        text += ": more than the quota allows, so all of them stand still for a part of the time"
        return Check("processors", Status.WARNING, text)
    if load is None:
        return Check("processors", Status.OK, text)
    text += f"; other programs use {load.others:.1f}"
    if load.others < OTHERS:
        return Check("processors", Status.OK, text)
    text += ": times below are longer than on a quiet machine"
    if n_threads > 1:
        text += ", and an engine computes with fewer threads while that is faster"
    return Check("processors", Status.WARNING, text)
