"""The process that `preflight` starts: `python -m cllm.doctor.preflight_helper MODEL_PATH`.

Loads the model, tokenizes, decodes, and says on standard output what was wrong, if anything.
"""

from __future__ import annotations

import os
import resource
import sys

from cllm.bindings import Batch, Context, Model
from cllm.doctor.workload import prompt_tokens
from cllm.errors import CllmError

N_TOKENS = 16


def main(path: str) -> int:
    """Use the model once; 1 if it cannot be."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with (
            Model(path) as model,
            Context(model, n_ctx=256, n_batch=N_TOKENS, n_threads=1, n_threads_batch=1) as context,
        ):
            batch = Batch(N_TOKENS)
            batch.add(0, prompt_tokens(model.vocab, N_TOKENS), 0, n_outputs=1)
            context.decode(batch)
    except CllmError as error:
        os.write(1, f"{error}\n".encode("utf-8", "backslashreplace"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
