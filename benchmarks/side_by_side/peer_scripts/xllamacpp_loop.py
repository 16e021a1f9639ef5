"""`xllamacpp.Server`, in this process, timed: takes JSON, prints JSON.  Runs where xllamacpp is."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import xllamacpp  # type: ignore[import-not-found]

given = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = given["model"]
params.n_ctx = given["n_ctx"]
params.n_batch = given["n_batch"]
params.n_ubatch = given["n_ubatch"]
params.n_parallel = 1
params.cpuparams.n_threads = given["n_threads"]
params.cpuparams_batch.n_threads = given["n_threads"]
params.fit_params = False
params.verbosity = -1
times: list[float] = []
usage: dict[str, int] = {}


def read(event: dict[str, Any]) -> bool:
    """Note when it came; False asks for more."""
    times.append(time.perf_counter())
    usage.update(event.get("usage", {}))
    return False


xllamacpp.Server(params).handle_completions(
    {
        "prompt": given["prompt"],
        "max_tokens": given["n_output"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    read,
)
# Tokens as it counts them: text that waits for the rest of a character comes with a later event.
print(json.dumps((usage["completion_tokens"] - 1) / (times[-1] - times[0])))
