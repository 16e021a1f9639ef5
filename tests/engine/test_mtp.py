"""Multi-token prediction in an engine: drafts of the model's own layer change no answer."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import gguf
import pytest

from cllm import Completion, Engine, EngineConfig, ModelLoadError
from cllm.bindings import MtpContext
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import Drafts
from cllm.engine.llama import backend, memory
from cllm.engine.llama.memory import check_room
from cllm.engine.llama.mtp_drafter import MtpDrafter
from cllm.testing.reproducibility import difference
from tests.conftest import QUIET
from tests.simulation.oracle_drafter import NextToken, known_answers
from tools import make_model, mtp_model

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.usefixtures("free_rows")]

HEAD = [65 + n % 19 for n in range(30)]
PROMPTS = [[*HEAD, 70 + n] for n in range(5)] + [[90 + n] * (4 + 9 * n) for n in range(3)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"kv_unified": True},
    "per-sequence": {"kv_unified": False},
    "few cells": {"kv_unified": True, "n_ctx": 256},
    "small batches": {"n_batch": 8, "n_ubatch": 8},
    "no prefix cache": {"prefix_cache": False},
    "quantized cells": {"type_k": "q8_0", "type_v": "q8_0"},
}


async def answers(name: str, **options: Any) -> tuple[list[Completion], Any]:
    """Return the answers to `PROMPTS`, and the statistics of the engine."""
    settings: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 4, **QUIET, **options}
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    async with Engine(make_model.ensure(name, "F16"), **settings) as engine:
        found = await engine.generate_all(PROMPTS, logprobs=0, **sampling)
        return list(found), engine.statistics()


class Counted(MtpDrafter):
    """A drafter that counts its calls."""

    n_calls = 0


def forced(next_token: NextToken, share: float) -> type[Counted]:
    """Return a drafter that computes with the layer, and then replaces its drafts by right ones."""

    class Forced(Counted):
        def expect(self, sequence: Sequence, n_max: int) -> list[float]:
            self.step_s = 1e-6  # the layer of a small model costs as much as a layer of the model
            return [1.0] * min(n_max, 4) if super().expect(sequence, n_max) else []

        def _draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
            own = super()._draft(wanted)
            type(self).n_calls += 1
            replaced: list[Drafts] = []
            for (sequence, n), drafts in zip(wanted, own, strict=True):
                assert len(drafts) in (0, n)
                tokens = list(sequence.tokens)
                for number in range(len(drafts)):
                    token = next_token(sequence, tokens)
                    if token is None:
                        break
                    is_right = (len(tokens) + number) % 5 < 5 * share
                    tokens.append(token if is_right else (token + 1) % 256)
                replaced.append(tuple(tokens[len(sequence.tokens) :]))
            return replaced

    return Forced


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for completion, alone in zip(found, expected, strict=True):
        assert not difference(completion, alone)


@pytest.mark.same_process("drafts of the test are not made there")
@pytest.mark.parametrize("share", [1.0, 0.6])
async def test_accepted_and_rejected_drafts_change_no_bit_of_an_answer(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, before = await answers("tiny-mtp", deterministic=True, speculation=None)
    drafter = forced(known_answers(plain), share)
    monkeypatch.setattr(backend, "MtpDrafter", drafter)
    found, told = await answers("tiny-mtp", deterministic=True, speculation="mtp")
    assert_same(found, plain)
    assert drafter.n_calls > 0
    assert told.n_discrepancies == 0
    assert 0 < told.n_accepted_tokens <= told.n_drafted_tokens
    if share == 1.0:
        assert told.n_accepted_tokens == told.n_drafted_tokens
        assert told.n_ticks < 0.6 * before.n_ticks
    else:
        assert told.n_accepted_tokens < told.n_drafted_tokens


@pytest.mark.same_process("drafts of the test are not made there")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["tiny-mtp", "tiny-qwen35-mtp"])
async def test_every_layout_takes_right_drafts(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LAYOUTS[layout]
    plain, _ = await answers(name, speculation=None, **options)
    monkeypatch.setattr(backend, "MtpDrafter", forced(known_answers(plain), 1.0))
    found, told = await answers(name, speculation="mtp", **options)
    assert told.n_discrepancies == told.n_rebuilds == 0
    assert told.n_accepted_tokens > 0
    # Other batches give other last digits: a token may differ where two are nearly as likely.
    assert sum(a.token_ids == b.token_ids for a, b in zip(found, plain, strict=True)) >= 6
    assert [c.usage.n_output for c in found] == [40] * len(PROMPTS)


def eager(n_drafts: int) -> type[Counted]:
    """Return a drafter of which every request wants so many drafts."""

    class Eager(Counted):
        def expect(self, sequence: Sequence, n_max: int) -> list[float]:
            self.step_s = 1e-6  # the layer of a small model costs as much as a layer of the model
            return [1.0] * min(n_max, n_drafts) if super().expect(sequence, n_max) else []

    return Eager


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a layer that was trained for it."""
    path = tmp_path_factory.mktemp("mtp") / "trained.gguf"
    mtp_model.write(path)
    return path


TASKS = ["12+30=", "count:1..40", "count:3..30", "repeat:the quick brown fox", "reverse:abcdefgh"]
NOTE = "Alice lives in a small house near the river, and has two cats. " * 3


@pytest.mark.same_process("drafts of the test are not made there")
@pytest.mark.parametrize(("n_drafts", "least"), [(1, 0.9), (3, 0.75)])
async def test_a_trained_layer_is_mostly_right_and_changes_nothing(
    trained: Path, n_drafts: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MtpDrafter", eager(n_drafts))
    settings: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": 4, "deterministic": True, **QUIET}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 120}

    async def ask(engine: Engine) -> list[Completion]:
        together = await engine.generate_all(TASKS, **greedy)
        # The note is computed once, and its cells are shared by the model and by the layer.
        return [*together, *[await engine.generate(NOTE + task, **greedy) for task in TASKS[:3]]]

    async with Engine(speculation=None, **settings) as engine:
        embedded = await ask(engine)
    async with Engine(trained, speculation="mtp", **settings) as engine:
        found = await ask(engine)
        told = engine.statistics()
    assert [c.text for c in found] == [c.text for c in embedded]
    assert [c.text for c in found][:2] == ["42", " ".join(map(str, range(1, 41)))]
    assert found[-1].usage.n_cached > 100
    assert told.n_accepted_tokens > least * told.n_drafted_tokens > 0


async def test_an_engine_of_any_kind_drafts_with_the_layer() -> None:
    plain, _ = await answers("tiny-mtp", deterministic=True, speculation=None)
    found, told = await answers("tiny-mtp", deterministic=True, speculation="mtp")
    assert_same(found, plain)
    assert told.n_discrepancies == 0


async def test_a_model_without_the_layer_is_rejected_before_it_is_loaded(tmp_path: Path) -> None:
    """A file can name a layer and lack its weights: llama.cpp would end the process."""
    reader = gguf.GGUFReader(make_model.ensure("tiny-mtp", "F16"))
    path = tmp_path / "without-weights.gguf"
    writer = gguf.GGUFWriter(path, "glm4moe")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub_type = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.2."):
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for model in (path, make_model.ensure("tiny-llama", "F16")):
        with pytest.raises(ModelLoadError, match="speculation is 'mtp', but"):
            async with Engine(model, speculation="mtp", n_ctx=256, **QUIET):
                pass
    async with Engine(path, n_ctx=256, **QUIET) as engine:  # without it the file is good
        assert (await engine.generate("x", max_tokens=3, ignore_eos=True)).usage.n_output == 3


@pytest.mark.same_process("its log is read")
async def test_memory_that_removes_no_rows_has_no_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = make_model.ensure("tiny-qwen35-mtp", "F16")
    async with Engine(
        path, speculation="mtp", n_ctx=256, n_seq_max=2, n_batch=2, **QUIET
    ) as engine:
        completion = await engine.generate("x", max_tokens=5, ignore_eos=True)
    assert completion.usage.n_output == 5
    assert completion.usage.n_drafted == 0
    messages = [record.message for record in caplog.records]
    assert messages.count("there are no drafts: the model's memory cannot remove wrong ones") == 1


def test_the_context_of_the_layer_counts_in_the_memory_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(memory, "_is_elsewhere", lambda config: False)
    path = make_model.ensure("tiny-mtp", "F16")
    found = []
    for speculation in (None, "mtp"):
        config = EngineConfig(model=path, speculation=speculation, n_ctx=65536, n_gpu_layers=0)
        planned = backend.planned_contexts(config)
        assert len(planned) == (1 if speculation is None else 2)
        with pytest.raises(ModelLoadError) as caught:
            check_room(config, planned)
        found.append(float(caught.value.reason.split()[2].replace(",", "")))
    assert found[1] == pytest.approx(1.5 * found[0], rel=0.1)  # a layer beside two


def test_the_layer_has_a_cell_for_each_cell_and_for_the_drafts() -> None:
    from cllm.bindings import Model
    from cllm.engine.llama.mtp_drafter import make_mtp_context

    path = make_model.ensure("tiny-mtp", "F16")
    config = EngineConfig(model=path, speculation="mtp", n_ctx=512, n_gpu_layers=0)
    with Model(path, n_gpu_layers=0, load_mtp=True) as model:
        for n_cells, n_expected in ((512, 768), (0, 2304)):  # llama.cpp rounds up to 256
            with make_mtp_context(model, config, n_cells, 4) as context:
                assert isinstance(context, MtpContext)
                assert context.n_ctx == n_expected
