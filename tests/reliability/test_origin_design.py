"""The field reports' findings, O6 to O9, O12 and O13, each by a test that bears its name.

Arrays that were freed twice (O6), bookkeeping that threads shared (O7), one logic written twice (O8), an
old API (O9), hypotheses why latency grew (O12), and what was asked for (O13).  The others are in
test_origin.py.
"""

from __future__ import annotations

import ast
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cllm import Engine
from cllm.bindings import Batch, Context, Model, library
from cllm.bindings import _llama_h as h
from cllm.bindings.context import Logits
from cllm.doctor import Plan, Shape
from cllm.doctor.diagnosis import conclude
from cllm.doctor.experiments import SETUPS, SUBJECT, run_experiments
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import (
    DecodeFailedError,
    InvalidArgumentError,
    PositionError,
    WrongThreadError,
)
from tests.conftest import QUIET
from tests.reliability.origin import GREEDY, MIXED, check, starts_of

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cllm"
PLAN = Plan(Shape(n_prompt=6, n_output=3), n_requests=8, n_seq_ids=4, estimated_s=0.0)


@pytest.fixture
def context() -> Iterator[Context]:
    """Two sequences of the embedded model."""
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(model, n_ctx=256, n_seq_max=2, n_threads=1, n_threads_batch=1) as context,
    ):
        yield context


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where requests start: see `starts_of`."""
    return starts_of(monkeypatch)


# --- O6: arrays freed twice -----------------------------------------------------------------------
def test_o6_a_context_is_freed_once_however_often_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One owner, freed once.  `make test-asan` is the sanitizer's proof of the same."""
    freed: list[object] = []
    free = library().llama_free

    def listen(pointer: object) -> None:
        freed.append(pointer)
        free(pointer)

    monkeypatch.setattr(library(), "llama_free", listen)
    with Model(EMBEDDED_MODEL) as model:
        context = Context(model, n_ctx=256, n_threads=1, n_threads_batch=1)
        with context:
            batch = Batch(4)
            batch.add(0, [1, 2], 0)
            context.decode(batch)
        context.close()
        del context
        gc.collect()
    assert len(freed) == 1


def test_o6_the_arrays_of_a_batch_are_pythons_own_and_survive_every_error(
    context: Context,
) -> None:
    """No `llama_batch_init`, so nothing to free; after an error the same batch goes on."""
    assert not {"llama_batch_init", "llama_batch_free"} & set(h.DECLARATIONS.prototypes)
    batch = Batch(4)
    pointers = [batch.tokens.ctypes.data, batch._positions.ctypes.data]
    for tokens in ([], [1] * 5, [-1]):
        with pytest.raises(InvalidArgumentError):
            batch.add(0, tokens, 0)
    assert (batch.n_rows, batch.runs) == (0, [])
    batch.add(0, [1, 2], 5)
    with pytest.raises(PositionError):
        context.decode(batch)
    for _ in range(2):  # clearing twice is nothing special
        batch.clear()
    batch.add(0, [1, 2], 0, n_outputs=1)
    assert context.decode(batch).rows.shape == (1, context.n_vocab)
    assert [batch.tokens.ctypes.data, batch._positions.ctypes.data] == pointers


async def test_o6_an_error_in_the_middle_of_a_tick_frees_nothing_twice(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is filled, the decode fails: a new context, the old one freed once, all is right."""
    freed: list[int] = []
    decode, n_calls = Context.decode, 0
    close = Context.close

    def fail_once(context: Context, batch: Batch) -> Logits:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 7:
            raise DecodeFailedError("llama_decode", -3, "scripted")
        return decode(context, batch)

    def listen(context: Context) -> None:
        if not context.closed:
            freed.append(id(context))
        close(context)

    monkeypatch.setattr(Context, "decode", fail_once)
    monkeypatch.setattr(Context, "close", listen)
    async with Engine(n_ctx=512, n_seq_max=4, **QUIET) as engine:
        completions = await engine.generate_all([q for q, _ in MIXED], **GREEDY)
        check(completions, [answer for _, answer in MIXED])
        assert engine.statistics().n_rebuilds == 1
        assert len(freed) == 1
    assert len(freed) == 2


# --- O7: bookkeeping that threads shared ----------------------------------------------------------------
async def _raised_in_another_thread(call: object) -> type[BaseException] | None:
    def ask() -> type[BaseException] | None:
        try:
            assert callable(call)
            call()
        except BaseException as error:
            return type(error)
        return None

    return await anyio.to_thread.run_sync(ask)


async def test_o7_every_other_thread_gets_a_clear_error(
    anyio_backend: str, context: Context
) -> None:
    """Reading, clearing, decoding, closing: no lock is needed where no other thread gets in."""
    batch = Batch(4)
    batch.add(0, [1, 2], 0)
    for call in (
        lambda: context.seq_pos_max(0),
        lambda: context.seq_rm(0),
        lambda: context.decode(batch),
        context.close,
    ):
        assert await _raised_in_another_thread(call) is WrongThreadError
    context.decode(batch)
    assert context.seq_pos_max(0) == 1, "none of them did anything"


async def test_o7_an_engines_books_are_out_of_the_event_loops_reach(engine: Engine) -> None:
    """The loop sends commands and gets values; the context behind the bookkeeping refuses it."""
    (decoder,) = engine._parts.thread._backend._computing  # type: ignore[attr-defined]
    with pytest.raises(WrongThreadError):
        decoder.seq_pos_max(0)
    check([await engine.generate("1+1=", **GREEDY)], ["2"])


# --- O8: one logic written twice ------------------------------------------------------------------
def _calls(name: str) -> list[str]:
    """`file:line` of every call of a method or function of this name in the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "_native" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                called = getattr(function, "attr", getattr(function, "id", ""))
                if called == name:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_o8_one_way_leads_from_a_plan_to_llama_decode() -> None:
    """One request or many: the same `Batch.add`, the same positions, the same call."""
    assert [where.split(":")[0] for where in _calls("llama_decode")] == ["bindings/context.py"]
    fills = [line for line in _calls("_fill_batch") if line.startswith("engine/")]
    assert [where.split(":")[0] for where in fills] == ["engine/core/engine_core.py"]
    source = (PACKAGE / "engine" / "core" / "engine_core.py").read_text()
    body = ast.parse(source)
    (fill,) = (n for n in ast.walk(body) if getattr(n, "name", "") == "_fill_batch")
    names = {n.attr for n in ast.walk(fill) if isinstance(n, ast.Attribute)}
    assert "n_computed" in names, "a position is how far the sequence has come"
    adding = [n for n in ast.walk(body) if isinstance(n, ast.Attribute) and n.attr == "add"]
    assert len(adding) == 2, "the rows of a plan, and the probe, whose position is 0"


async def test_o8_one_request_and_many_go_through_the_same_tick(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_runs: list[int] = []
    decode = Context.decode

    def listen(context: Context, batch: Batch) -> Logits:
        n_runs.append(len(batch.runs))
        return decode(context, batch)

    monkeypatch.setattr(Context, "decode", listen)
    async with Engine(n_ctx=1024, n_seq_max=5, **QUIET) as engine:
        for questions in (MIXED[:1], MIXED):
            before = engine.statistics().n_ticks
            n_runs.clear()
            completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
            check(completions, [answer for _, answer in questions])
            await engine.audit()
            assert engine.statistics().n_ticks - before == len(n_runs), "a decode for each tick"
            assert max(n_runs) <= len(questions)
        assert max(n_runs) > 1


# --- O9: an old API -------------------------------------------------------------------------------
def test_o9_no_deprecated_function_is_declared_or_called() -> None:
    declared = set(h.DECLARATIONS.prototypes)
    header = library().path.parent.parent / "include" / "llama.h"
    deprecated = set(
        re.findall(r"DEPRECATED\(.*?\b(llama_\w+)\s*\(", header.read_text(), flags=re.DOTALL)
    )
    assert len(deprecated) >= 10, "the header still marks them so"
    assert not declared & deprecated
    old = re.compile(r"llama_kv_(self|cache)_\w+")
    assert not [name for name in declared if old.match(name)]
    assert {"llama_memory_seq_rm", "llama_memory_seq_pos_max"} <= declared
    for path in PACKAGE.rglob("*.py"):
        if "_native" not in path.parts:
            assert not old.search(path.read_text()), path


# --- O12: hypotheses ------------------------------------------------------------------------------
def test_o12_the_doctor_makes_all_four_experiments_and_names_a_cause_for_each() -> None:
    """What each does to a context, tests/doctor/test_experiments.py shows one by one."""
    proposed = {
        "clear on finish",  # the positions after seq_rm
        "clear on reuse",  # a new seq_id each time
        "restart at 0",  # errors of continuity
        "never clear",  # on from the last position
    }
    setups = {setup.name: setup for setup in SETUPS}
    assert proposed <= set(setups)
    assert len({setups[name].expected for name in proposed}) == 4


def test_o12_the_verdict_is_that_seq_rm_is_innocent() -> None:
    with Model(EMBEDDED_MODEL) as model:
        experiments = list(run_experiments(model, PLAN, n_threads=1))
    subject = next(e for e in experiments if e.name == SUBJECT.name)
    conclusion = conclude(experiments, subject)
    assert not conclusion.grows
    assert conclusion.text.startswith("No. ")
    assert [experiment.name for experiment in experiments if not experiment.is_expected] == []


async def test_o12_seq_ids_are_allocated_and_recycled_below_n_seq_max(
    anyio_backend: str, starts: list[tuple[int, int]]
) -> None:
    async with Engine(n_ctx=512, n_seq_max=3, prefix_cache=False, **QUIET) as engine:
        await engine.generate_all([f"{n}+{n}=" for n in range(30)], **GREEDY)
    assert len(starts) == 30
    assert {seq_id for seq_id, _ in starts} == {0, 1, 2}


async def test_o12_a_context_is_recreated_after_a_failure_and_never_as_a_cure(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, is_failing = Context.decode, False

    def fail_if_told(context: Context, batch: Batch) -> Logits:
        nonlocal is_failing
        if is_failing:
            is_failing = False
            raise DecodeFailedError("llama_decode", -3, "scripted")
        return decode(context, batch)

    monkeypatch.setattr(Context, "decode", fail_if_told)
    async with Engine(n_ctx=512, n_seq_max=2, **QUIET) as engine:
        for _ in range(50):
            await engine.generate("1+1=", **GREEDY)
        assert engine.statistics().n_rebuilds == 0
        is_failing = True
        check([await engine.generate("1+1=", **GREEDY)], ["2"])
        assert engine.statistics().n_rebuilds == 1


# --- O13: what was asked for ----------------------------------------------------------------------
def test_o13_a_position_out_of_bounds_is_a_typed_error(context: Context) -> None:
    batch = Batch(8)
    batch.add(0, [1, 2], context.n_ctx_seq - 1)
    with pytest.raises(InvalidArgumentError) as caught:
        context.decode(batch)
    assert (caught.value.field, caught.value.value) == ("position", context.n_ctx_seq)
    assert str(context.n_ctx_seq - 1) in caught.value.limit
    with pytest.raises(InvalidArgumentError):
        Batch(8).add(0, [1], -1)


async def test_o13_the_debug_log_says_that_the_kv_cache_was_cleared(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="cllm.engine")
    await engine.generate("1+1=", request_id="mine", **GREEDY)
    await engine.audit()
    assert any("request mine: cleared KV cache, seq_id 0" in line for line in caplog.messages)


def test_o13_the_script_the_stress_test_and_the_sanitizers_are_one_command_each() -> None:
    script = ROOT / "scripts" / "multi_request.sh"
    assert os.access(script, os.X_OK)
    makefile = (ROOT / "Makefile").read_text()
    for target in ("soak", "test-asan", "test-leaks"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert (ROOT / "tests" / "reliability" / "soak.py").is_file()
