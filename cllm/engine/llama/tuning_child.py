"""The process of a measurement: `python -m cllm.engine.llama.tuning_child`.

It answers each line of standard input with one of standard output, both in JSON.  `{"config": …, "n_spin": …, "shapes": […]}`
loads a model first, later lines are `{"shapes": […]}`.  The answer is `{"readings": {SHAPE: [SECONDS, SPIN_S]}}`
or `{"error": …}`.  The process ends when standard input ends.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from cllm.bindings import Batch, Context, Model
from cllm.engine.child_process import answer_requests, answers_of_this_process
from cllm.engine.config import EngineConfig
from cllm.engine.core.tick_shares import DECODES, PROMPTS
from cllm.engine.llama.decoder import make_context, measure_states
from cllm.engine.llama.determinism import TILED_PRODUCTS
from cllm.engine.llama.devices import placement_of, use_processors
from cllm.errors import CllmError

ALARM_S = 900
N_SEQUENCES = max(DECODES.values())
N_FIRST = 16  # positions of each sequence when it begins
N_CTX = 2048
TEXT = "The quick brown fox jumps over the lazy dog. "
# About 10 ms: a shorter loop mostly times the start of its threads.
SPIN_BYTES, N_SPINS = 1 << 20, 16


class Measurements:
    """A model in this process, and decodes of it; one thread.

    Parameters
    ----------
    config : EngineConfig
    n_spin : int
        Threads of the spin loop; the same for all that are compared.
    owned : ExitStack
        Frees the model.
    """

    def __init__(self, config: EngineConfig, n_spin: int, owned: ExitStack) -> None:
        if not config.tiled_matmul:
            os.environ[TILED_PRODUCTS] = "0"
        use_processors(config)
        self._n_spin = n_spin
        small = replace(
            config, n_ctx=N_CTX, n_seq_max=N_SEQUENCES + 1, prefix_cache=False, kv_unified=True
        )
        model = owned.enter_context(
            Model(
                config.model_path,
                n_gpu_layers=config.n_gpu_layers,
                placement=placement_of(config),
                load_mode=config.used_load_mode,
                use_extra_bufts=config.repack,
            )
        )
        self._context: Context = owned.enter_context(
            make_context(model, small, measure_states(model, small))
        )
        self._batch = Batch(self._context.n_batch)
        n_tokens = max(PROMPTS.values())
        self._tokens = (model.vocab.tokenize(TEXT) * n_tokens)[:n_tokens]
        self._ends = [0] * N_SEQUENCES
        self._restart()
        # llama.cpp reserves memory for each kind of batch at its first.
        self._decode_rows(N_SEQUENCES)

    def turn(self, shapes: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Measure each shape once: seconds of the decode, and of the slower spin loop around it."""
        if max(self._ends) > N_CTX // (2 * N_SEQUENCES):
            self._restart()
        self._decode_rows(1)  # wakes the compute threads
        readings = {}
        before_s = spin(self._n_spin)
        for shape in shapes:
            began = time.perf_counter()
            if shape in PROMPTS:
                self._decode_prompt(PROMPTS[shape])
            else:
                self._decode_rows(DECODES[shape])
            seconds = time.perf_counter() - began
            after_s = spin(self._n_spin)
            readings[shape] = seconds, max(before_s, after_s)
            before_s = after_s
            self._context.seq_rm(N_SEQUENCES)
        return readings

    def _restart(self) -> None:
        """Fill the sequences that are decoded."""
        for seq_id in range(N_SEQUENCES):
            self._context.seq_rm(seq_id)
            self._batch.clear()
            self._batch.add(seq_id, self._tokens[:N_FIRST], 0, n_outputs=0)
            self._context.decode(self._batch)
        self._ends = [N_FIRST] * N_SEQUENCES

    def _decode_prompt(self, n_rows: int) -> None:
        self._batch.clear()
        self._batch.add(N_SEQUENCES, self._tokens[:n_rows], 0, n_outputs=1)
        self._context.decode(self._batch)

    def _decode_rows(self, n_rows: int) -> None:
        self._batch.clear()
        for seq_id in range(n_rows):
            self._batch.add(seq_id, [self._tokens[0]], self._ends[seq_id], n_outputs=1)
            self._ends[seq_id] += 1
        self._context.decode(self._batch)


def spin(n_threads: int) -> float:
    """Return the seconds of a fixed amount of work in each of so many threads at once."""
    data = bytes(SPIN_BYTES)

    def work() -> None:
        for _ in range(N_SPINS):
            hashlib.sha256(data)  # other threads run meanwhile

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def answering(owned: ExitStack) -> Callable[..., Mapping[str, Any]]:
    """Return the function that answers requests; `owned` frees the model."""
    opened: list[Measurements] = []

    def answer(
        shapes: Sequence[str], config: Mapping[str, Any] | None = None, n_spin: int = 1
    ) -> dict[str, Any]:
        try:
            if config is not None:
                opened.append(Measurements(EngineConfig(**config), n_spin, owned))
            return {"readings": opened[-1].turn(shapes)}
        except (CllmError, OSError) as error:
            return {"error": str(error)}

    return answer


if __name__ == "__main__":
    with answers_of_this_process() as answers, ExitStack() as owned:
        answer_requests(answers, {"error": None}, answering(owned), alarm_s=ALARM_S)
