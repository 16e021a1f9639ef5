"""The process of `preflight`: `python -m cllm.engine.preflight_child SECONDS`.

The process reads the settings of an engine as one JSON line from standard input, and runs that engine for
a few tokens.  The last line of its output is `{"reason": …, "path": …}`: the error, or null in both
fields.  The process ends when standard input ends, and at the latest after SECONDS.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace

import anyio
import numpy as np

from cllm.engine.audio import Audio
from cllm.engine.child_process import end_after
from cllm.engine.config import EngineConfig
from cllm.engine.engine import Engine
from cllm.engine.image import Image
from cllm.engine.llama.preflight import LOADED
from cllm.engine.llama.shapes import misfit
from cllm.errors import CllmError, ModelLoadError
from cllm.system import disable_core_files

TEXT = "The quick brown fox jumps over the lazy dog, and 1 + 1 ="
N_TOKENS = 4
IMAGE_SIZE = 64, 64, 3
STDIN, STDOUT = 0, 1


def main(seconds: str) -> None:
    """Try the model, write the result, and exit; the process ends after `seconds`."""
    disable_core_files()
    end_after(int(seconds))  # an orphan in an endless call might not see that its input has ended
    config = EngineConfig(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    reason = path = None
    try:
        if anyio.run(use_once, replace(config, n_seq_max=1)):
            reason = misfit(config)
    except ModelLoadError as error:
        reason, path = error.reason, error.path
    except CllmError as error:
        reason = " ".join(
            f"{error}{': ' if error.__cause__ else ''}{error.__cause__ or ''}".split()
        )
    answer = json.dumps({"reason": reason, "path": path})
    os.write(STDOUT, f"\n{answer}\n".encode())
    os._exit(0)  # no output may follow the answer


async def use_once(config: EngineConfig) -> bool:
    """Load the model, then generate a few tokens and compute a vector, as far as the model can.

    Returns
    -------
    bool
        True if the model generates text.
    """
    async with Engine(config=config) as engine:
        os.write(STDOUT, LOADED)
        if engine.model.generates:
            await engine.generate(TEXT, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
        if "image" in engine.model.modalities:  # wrong types of tensors abort at the first encode
            image = Image(np.zeros(IMAGE_SIZE, np.uint8))
            await engine.generate(["", image], max_tokens=1, temperature=0)
        if rate := engine.model.audio_sample_rate:
            second = Audio(np.zeros(rate, np.float32), rate)
            await engine.generate(["", second], max_tokens=1, temperature=0)
        if (info := engine.model.embedding) is not None:
            await (engine.classify([TEXT]) if info.is_classifier else engine.embed([TEXT]))
        return engine.model.generates


def _end_with_the_parent() -> None:
    while os.read(STDIN, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
