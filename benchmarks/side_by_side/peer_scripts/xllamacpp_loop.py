"""Time `xllamacpp.Server` in this process: takes JSON, prints tokens per second.  Needs xllamacpp."""

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
    """Note the time of an event; return False to receive more."""
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
# Tokens are those that the server counts: an event may have the text of several tokens, because
# text waits for the rest of a character.
print(json.dumps((usage["completion_tokens"] - 1) / (times[-1] - times[0])))
