"""Check of a model in a child process first: a damaged file or a wrong build ends only the child."""

from __future__ import annotations

from pathlib import Path

from cllm import CllmError, EngineConfig
from cllm.doctor.findings import Check, Status
from cllm.engine.llama.preflight import Preflight


def preflight_check(path: Path) -> Check:
    """Load the model in a child process and decode a few tokens there; an error becomes a failed check."""
    config = EngineConfig(model=path, n_threads=1, n_threads_batch=1, preflight=True)
    try:
        Preflight(config).run()
    except CllmError as error:
        return Check("preflight", Status.FAILED, str(error))
    return Check("preflight", Status.OK, "a child process loaded the model and decoded with it")
