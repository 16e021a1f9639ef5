"""An engine computes with as many threads as the processors suggest."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm import Engine
from cllm.bindings import Context, Model
from cllm.engine.core.thread_tuner import ProcessorLoad
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.thread.processor_load import ProcessorReader
from cllm.errors import InvalidArgumentError

OTHERS_COMPUTE = ProcessorLoad(waiting=0.0, others=2.0, idle=0.0, own=0.0)


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs use all processors, as far as the reader reports."""
    monkeypatch.setattr(ProcessorReader, "read", lambda self: OTHERS_COMPUTE)
    monkeypatch.setattr(ProcessorReader, "count_runnable", lambda self: 2)


@pytest.mark.anyio
@pytest.mark.same_process("the load is set in this process")
@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize(("deterministic", "n_threads"), [(False, 1), (True, 2)])
async def test_threads_follow_the_machine_unless_answers_depend_on_them(
    deterministic: bool, n_threads: int
) -> None:
    async with Engine(n_ctx=256, n_seq_max=1, n_threads=2, deterministic=deterministic) as engine:
        assert engine.statistics().n_threads == 2
        assert (await engine.generate("37+58=", temperature=0)).text == "95"
        assert engine.statistics().n_threads == n_threads


def test_the_number_of_threads_outlives_the_context(tiny_model_path: Path) -> None:
    with Model(tiny_model_path) as model:
        decoder = LlamaDecoder(lambda: Context(model, n_ctx=256, n_threads=4), 512)
        set_to: list[tuple[int, int]] = []
        decoder.set_n_threads(1, 2)

        class Recording(Context):
            def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
                set_to.append((n_threads, n_threads_batch))
                super().set_n_threads(n_threads, n_threads_batch)

        decoder._make_context = lambda: Recording(model, n_ctx=256, n_threads=4)
        decoder.rebuild()
        assert set_to == [(1, 2)]
        decoder.close()


@pytest.mark.parametrize("n_threads", [(0, 1), (1, 0), (513, 1), (1, 513)])
def test_a_context_refuses_a_number_of_threads_that_crashes_llama_cpp(
    tiny_model_path: Path, n_threads: tuple[int, int]
) -> None:
    with (
        Model(tiny_model_path) as model,
        Context(model, n_ctx=256) as context,
        pytest.raises(InvalidArgumentError, match="n_threads"),
    ):
        context.set_n_threads(*n_threads)
