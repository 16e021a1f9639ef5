"""Time `llama_cpp.Llama.generate`: takes JSON, prints tokens per second.  Needs llama-cpp-python."""

from __future__ import annotations

import itertools
import json
import sys
import time

from llama_cpp import Llama  # type: ignore[import-not-found]

given = json.loads(sys.argv[1])
llama = Llama(
    given["model"],
    n_ctx=given["n_ctx"],
    n_batch=given["n_batch"],
    n_ubatch=given["n_ubatch"],
    n_threads=given["n_threads"],
    n_threads_batch=given["n_threads"],
    flash_attn=True,  # what the others choose on a CPU; its own default is off
    verbose=False,
)
# `generate` never ends the output: its reader has to stop.
times = [
    time.perf_counter()
    for _ in itertools.islice(llama.generate(given["prompt"], temp=0.0), given["n_output"])
]
print(json.dumps((len(times) - 1) / (times[-1] - times[0])))
