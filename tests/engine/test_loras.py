"""Adapters by name: loaded, asked for by requests, freed; each answer is that of its adapters alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import (
    ClosedError,
    Completion,
    Engine,
    EngineStatus,
    InvalidRequestError,
    ModelLoadError,
)
from cllm.bindings import Context, EmbeddingContext, LoraAdapter, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.core.commands import UnloadLora
from cllm.engine.llama.gguf_header import read_types
from cllm.engine.loop.channel import Channel
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.lora import NO_LORA
from cllm.errors import InvalidArgumentError
from cllm.testing import FakeEngine
from tests.conftest import QUIET
from tests.lora_files import make_lora
from tools import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

OPTIONS: dict[str, Any] = {**QUIET, "n_ctx": 2048, "n_seq_max": 8, "n_threads": 1}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SETS: list[Mapping[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return make_model.ensure("tiny-llama", "Q8_0")


@pytest.fixture(scope="module")
def adapters(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two that change what the model says, and one that is activated by two tokens."""
    directory = tmp_path_factory.mktemp("loras")
    return {
        "a": make_lora(directory / "a.gguf", model_path, seed=1),
        "b": make_lora(directory / "b.gguf", model_path, seed=2),
        "late": make_lora(
            directory / "late.gguf", model_path, seed=3, invocation_tokens=[120, 121]
        ),
    }


# --- Any model -------------------------------------------------------------------------------
async def test_an_adapter_is_loaded_named_and_freed() -> None:
    async with FakeEngine(lora=[("first", "x/first.gguf", 0.5)]) as engine:
        assert [lora.name for lora in engine.model.loras] == ["first"]
        info = await engine.load_lora("second", "x/second.gguf", scale=2.0)
        path = str(Path("x/second.gguf").absolute())
        assert (info.name, info.path, info.scale) == ("second", path, 2.0)
        assert [lora.name for lora in engine.model.loras] == ["first", "second"]
        await engine.generate("x", lora={"second": 1.0})
        assert engine.decoder.loras == (("second", 1.0),)
        await engine.generate("x")
        assert dict(engine.decoder.loras) == {"first": 0.5, "second": 2.0}
        await engine.unload_lora("second")
        assert [lora.name for lora in engine.model.loras] == ["first"]
        with pytest.raises(InvalidRequestError, match="first"):
            await engine.generate("x", lora={"second": 1.0})
        assert await engine.audit() == []


@pytest.mark.parametrize("way", ["stream", "chat", "generate_all", "score"])
async def test_every_way_to_ask_takes_adapters(way: str) -> None:
    async with FakeEngine(lora=[("a", "a.gguf", 0.0)]) as engine:
        lora = {"a": 1.5}
        match way:
            case "stream":
                async with engine.stream("x", lora=lora) as stream:
                    await stream.completion()
            case "chat":
                await engine.chat([{"role": "user", "content": "x"}], lora=lora)
            case "generate_all":
                await engine.generate_all(["x", "y"], lora=lora)
            case "score":
                await engine.score("x", "y", lora=lora)
        assert engine.decoder.loras == (("a", 1.5),)


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"b": 1.0}, "a"),
        (["a"], "mapping"),
        ({"a": float("inf")}, "finite"),
        ({"a": "1"}, "number"),
    ],
)
async def test_a_bad_choice_is_refused_before_anything_is_computed(lora: object, says: str) -> None:
    async with FakeEngine(lora=[("a", "a.gguf", 0.0)]) as engine:
        with pytest.raises(InvalidRequestError, match=says) as caught:
            await engine.generate("x", lora=lora)  # type: ignore[arg-type]
        assert caught.value.field.startswith("lora")
        assert engine.decoder.n_decodes == 0


async def test_a_name_that_is_taken_and_one_that_is_not_there_are_refused() -> None:
    async with FakeEngine(lora=[("a", "a.gguf", 0.0)]) as engine:
        for name, path in (("a", "b.gguf"), ("", "b.gguf"), ("b", "")):
            with pytest.raises(InvalidRequestError):
                await engine.load_lora(name, path)
        with pytest.raises(InvalidRequestError, match="scale"):
            await engine.load_lora("b", "b.gguf", scale=float("nan"))
        with pytest.raises(InvalidRequestError, match="loaded"):
            await engine.unload_lora("b")
        assert [lora.name for lora in engine.model.loras] == ["a"]


async def test_what_fails_to_load_leaves_everything_as_it_was_and_may_be_tried_again() -> None:
    async with FakeEngine() as engine:
        engine.loras.load_faults["a.gguf"] = ModelLoadError("a.gguf", "no adapter")
        with pytest.raises(ModelLoadError, match="no adapter"):
            await engine.load_lora("a", "a.gguf")
        assert engine.model.loras == ()
        del engine.loras.load_faults["a.gguf"]
        await engine.load_lora("a", "a.gguf")
        assert (await engine.generate("x", lora={"a": 1.0})).text == "x"


async def test_one_that_leaves_is_named_by_nobody_new_and_waits_for_those_that_use_it() -> None:
    async with FakeEngine({"long": "x" * 100, "x": "x"}, lora=[("a", "a.gguf", 0.0)]) as engine:
        async with engine.stream("long", lora={"a": 1.0}) as stream:
            await anext(stream)
            has_left = anyio.Event()

            async def unload() -> None:
                await engine.unload_lora("a")
                has_left.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(unload)
                while True:
                    try:
                        await engine.generate("x", lora={"a": 1.0})
                    except InvalidRequestError:
                        break
                await engine.generate("x")
                assert not has_left.is_set()
                assert (await stream.completion()).text == "x" * 100
        assert has_left.is_set()
        assert engine.model.loras == ()


async def test_two_that_load_one_name_do_not_both_succeed() -> None:
    async with FakeEngine() as engine:
        refused: list[Exception] = []

        async def load(path: str) -> None:
            try:
                await engine.load_lora("a", path)
            except InvalidRequestError as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load, "a.gguf")
            tasks.start_soon(load, "b.gguf")
        assert len(refused) == 1
        assert len(engine.model.loras) == 1


async def test_a_closed_engine_loads_nothing() -> None:
    engine = FakeEngine()
    async with engine:
        pass
    with pytest.raises(ClosedError):
        await engine.load_lora("a", "a.gguf")
    with pytest.raises(ClosedError):
        await engine.unload_lora("a")


# --- llama.cpp -------------------------------------------------------------------------------
def prompt_of(number: int) -> str:
    return "The quick brown fox " + "jumps" * (number % 3)


async def answers_of(engine: Engine, uses: list[Mapping[str, float]]) -> list[Completion]:
    """Of requests that are asked at once."""
    answers: dict[int, Completion] = {}

    async def ask(number: int, lora: Mapping[str, float]) -> None:
        answers[number] = await engine.generate(prompt_of(number), lora=lora, **GREEDY)

    async with anyio.create_task_group() as tasks:
        for number, lora in enumerate(uses):
            tasks.start_soon(ask, number, lora)
    return [answers[number] for number in range(len(uses))]


async def alone(engine: Engine, number: int, lora: Mapping[str, float]) -> Completion:
    return await engine.generate(prompt_of(number), lora=lora, **GREEDY)


async def test_eight_requests_with_three_sets_at_once_get_each_what_it_gets_alone(
    model_path: Path, adapters: dict[str, Path]
) -> None:
    exact = {**OPTIONS, "deterministic": True}  # company is to change nothing else
    uses = [SETS[number // 3] for number in range(8)]
    expected = []
    for number, lora in enumerate(uses):
        # As if there were no other: at load, with its scale, asked for by nobody.
        settings = [(name, adapters[name], scale) for name, scale in lora.items()]
        async with Engine(model_path, lora=settings, **exact) as engine:
            expected.append((await engine.generate(prompt_of(number), **GREEDY)).token_ids)
    assert len(set(expected)) == 8
    settings = [(name, adapters[name], 0.0) for name in ("a", "b")]
    async with Engine(model_path, lora=settings, **exact) as engine:
        for _ in range(2):  # the second time, with what the first has left in the prefix cache
            answers = await answers_of(engine, uses)
            assert [answer.token_ids for answer in answers] == expected
        assert await engine.audit() == []


async def test_a_stream_keeps_an_adapter_that_is_being_unloaded_where_it_goes_back() -> None:
    async with FakeEngine(lambda _: "a long answer in many tokens", stream_buffer=2) as engine:
        await engine.load_lora("a", "a.gguf", scale=0.0)
        async with (
            anyio.create_task_group() as tasks,
            engine.stream("p", lora={"a": 1.0}) as stream,
        ):
            for _ in range(6):
                await anext(stream)
            tasks.start_soon(engine.unload_lora, "a")
            await engine.audit()
            with pytest.raises(InvalidRequestError, match="lora"):
                await engine.generate("q", lora={"a": 1.0})
            for _ in range(3):
                await stream.rewind(1)
                await anext(stream)
            assert [lora.name for lora in engine.model.loras] == ["a"]
            assert (await stream.completion()).text == "a long answer in many tokens"
        assert engine.model.loras == ()
        with pytest.raises(InvalidRequestError, match="lora"):
            await stream.rewind(1)
        assert await engine.audit() == []


async def test_no_request_names_an_adapter_whose_unloading_was_cancelled_in_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, is_asked, held = Dispatcher.ask, anyio.Event(), anyio.Event()

    async def ask_later(dispatcher: Dispatcher, question: Any) -> Any:
        if isinstance(question, UnloadLora):
            is_asked.set()
            await held.wait()
        return await ask(dispatcher, question)

    monkeypatch.setattr(Dispatcher, "ask", ask_later)
    async with FakeEngine(lambda _: "x") as engine:
        await engine.load_lora("a", "a.gguf", scale=0.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.unload_lora, "a")
            await is_asked.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                with pytest.raises(InvalidRequestError, match="lora"):
                    await engine.generate("q", lora={"a": 1.0})
                held.set()
        assert engine.model.loras == ()


async def test_a_stream_whose_engine_closes_while_it_goes_back_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = Channel.take

    async with FakeEngine(lambda _: "a long answer in many tokens", stream_buffer=2) as engine:

        async def take_and_close(channel: Channel) -> None:
            await take(channel)
            engine._status = EngineStatus.CLOSED

        async with engine.stream("p") as stream:
            for _ in range(4):
                await anext(stream)
            monkeypatch.setattr(Channel, "take", take_and_close)
            with pytest.raises(ClosedError):
                await stream.rewind(1)
            engine._status = EngineStatus.READY
            for _ in range(2):
                with pytest.raises(ClosedError, match="closed before its end"):
                    await anext(stream)


async def test_closing_ends_a_call_that_waits_to_unload_an_adapter() -> None:
    errors = list[BaseException]()
    async with (
        anyio.create_task_group() as tasks,
        FakeEngine(lambda _: "b" * 3000, n_ctx=4096, stream_buffer=2) as engine,
    ):
        await engine.load_lora("a", "a.gguf", scale=0.0)

        async def unload() -> None:
            try:
                await engine.unload_lora("a")
            except ClosedError as error:
                errors.append(error)

        stream = engine.stream("p", lora={"a": 1.0})
        await anext(stream)
        tasks.start_soon(unload)
        await engine.audit()
    assert len(errors) == 1


async def test_a_complete_output_that_is_resumed_goes_back_with_its_adapters(
    tmp_path: Path,
) -> None:
    adapter = make_lora(tmp_path / "a.gguf", Path(EMBEDDED_MODEL), seed=2)
    options: dict[str, Any] = {**GREEDY, "lora": {"a": 1.0}, "max_tokens": 12, "ignore_eos": True}
    async with Engine(
        lora=[("a", str(adapter), 0.0)], n_ctx=512, stream_buffer=64, **QUIET
    ) as engine:
        whole = await engine.generate("the cat", **options)
        async with engine.stream("the cat", **options) as stream:
            await anext(stream)
            while engine.statistics().n_running:  # until the output is complete
                await engine.audit()
            saved = await stream.suspend()
        async with engine.resume(saved) as resumed:
            for _ in range(4):
                await anext(resumed)
            await resumed.rewind(3)
            assert (await resumed.completion()).token_ids == whole.token_ids
        assert await engine.audit() == []


async def test_a_stream_that_goes_on_keeps_its_adapters_whatever_is_loaded() -> None:
    """One that rewinds, or avoids a banned string, is a new request for the thread."""
    async with FakeEngine(lambda _: "a long answer in many tokens") as engine:
        async with engine.stream("p") as stream:
            for _ in range(4):
                await anext(stream)
            assert stream._present.request.lora == NO_LORA
            await engine.load_lora("a", "a.gguf", scale=1.0)
            await stream.rewind(2)
            assert stream._present.request.lora == NO_LORA
            await stream.cancel()
        async with engine.stream("p") as later:
            assert later._present.request.lora.uses("a")


async def test_a_scale_counts_and_zero_is_none(model_path: Path, adapters: dict[str, Path]) -> None:
    settings = [("a", adapters["a"], 0.0)]
    async with Engine(model_path, lora=settings, deterministic=True, **OPTIONS) as engine:
        plain = await engine.generate("Hello", **GREEDY)
        scores = [
            (await engine.score("Hello", " world, hello", lora={"a": scale})).total
            for scale in (0.0, 0.5, 1.0)
        ]
        assert len(set(scores)) == 3
        assert scores[0] == (await engine.score("Hello", " world, hello")).total
        again = await engine.generate("Hello", lora={"a": 0.0}, **GREEDY)
        assert again.token_ids == plain.token_ids


async def test_an_activated_adapter_computes_from_its_tokens_on_and_shares_what_is_before(
    model_path: Path, adapters: dict[str, Path]
) -> None:
    prompt = [*range(65, 105), 120, 121, 70, 71]
    exact = {**OPTIONS, "deterministic": True, "lora": [("late", adapters["late"], 0.0)]}
    async with Engine(model_path, **exact) as engine:
        (info,) = engine.model.loras
        assert info.invocation_tokens == (120, 121)
        plain = await engine.generate(prompt, **GREEDY)
        late = await engine.generate(prompt, lora={"late": 1.0}, **GREEDY)
        assert late.token_ids != plain.token_ids
        assert late.usage.n_cached == 40
        without = await engine.generate(prompt[:40], lora={"late": 1.0}, **GREEDY)
        assert without.token_ids == (await engine.generate(prompt[:40], **GREEDY)).token_ids
    async with Engine(model_path, prefix_cache=False, **exact) as engine:
        again = await engine.generate(prompt, lora={"late": 1.0}, **GREEDY)
        assert again.token_ids == late.token_ids


async def test_texts_have_the_adapters_of_who_names_none(
    model_path: Path, adapters: dict[str, Path]
) -> None:
    async with Engine(model_path, pooling="mean", **OPTIONS) as engine:
        plain = await engine.embed(["The quick brown fox"])
        await engine.load_lora("b", adapters["b"])
        assert (await engine.embed(["The quick brown fox"]) == plain).all()
        await engine.load_lora("a", adapters["a"], scale=1.0)
        loaded = await engine.embed(["The quick brown fox"])
    settings = [("a", adapters["a"], 1.0)]
    async with Engine(model_path, pooling="mean", lora=settings, **OPTIONS) as engine:
        adapted = await engine.embed(["The quick brown fox"])
        assert float((adapted @ plain.T)[0, 0]) < 0.999
        assert float((adapted @ loaded.T)[0, 0]) > 0.9999, "whenever it was loaded"
        await engine.unload_lora("a")
        assert (await engine.embed(["The quick brown fox"]) == plain).all()


@pytest.mark.parametrize("kind", ["I8", "I16", "I32", "I64", "F64"])
async def test_an_adapter_that_no_matrix_product_takes_is_rejected_before_its_first_use(
    kind: str, model_path: Path, tmp_path: Path
) -> None:
    """llama.cpp loads it; the process would end at the tokens that it is activated by."""
    types = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}
    path = make_lora(
        tmp_path / "a.gguf", model_path, seed=1, invocation_tokens=[120], dtype=types[kind]
    )
    async with Engine(model_path, **OPTIONS) as engine:
        with pytest.raises(ModelLoadError, match=f"whose type is {kind}"):
            await engine.load_lora("x", path)
        assert (await engine.generate([119, 120, 121], **GREEDY)).usage.n_output == 24


async def test_an_adapter_of_experts_is_applied_and_one_for_fewer_experts_is_rejected(
    tmp_path: Path,
) -> None:
    model, experts = make_model.ensure("tiny-moe"), re.compile(r".*ffn_(up|down)_exps\.weight")
    right = make_lora(tmp_path / "a.gguf", model, seed=1, pattern=experts, strength=3.0)
    wrong = make_lora(tmp_path / "b.gguf", model, seed=1, pattern=experts, n_experts=3)
    async with Engine(model, **OPTIONS) as engine:
        plain = await engine.generate("Hello", **GREEDY)
        with pytest.raises(ModelLoadError, match=r"exps\.weight\.lora_a has the shape"):
            await engine.load_lora("x", wrong)
        await engine.load_lora("x", right)
        assert (
            await engine.generate("Hello", lora={"x": 1.0}, **GREEDY)
        ).token_ids != plain.token_ids
        assert (await engine.generate("Hello", **GREEDY)).token_ids == plain.token_ids


async def test_an_adapter_for_a_tensor_that_is_no_matrix_is_rejected(
    model_path: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    data = adapters["a"].read_bytes()
    name = next(name for name in read_types(adapters["a"]) if name.startswith("blk.0."))
    other = "blk.0.attn_norm.weight.lora_a"
    changed = data.replace(
        len(name).to_bytes(8, "little") + name.encode(),
        len(other).to_bytes(8, "little") + other.encode(),
    )
    path = tmp_path / "a.gguf"
    path.write_bytes(changed)
    async with Engine(model_path, **OPTIONS) as engine:
        with pytest.raises(ModelLoadError):
            await engine.load_lora("x", path)


async def test_an_adapter_of_another_model_is_refused_by_its_header(
    model_path: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = make_model.ensure("tiny-qwen3", "Q8_0")
    of_other = make_lora(tmp_path / "other.gguf", other, seed=1)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(adapters["a"].read_bytes()[:-1000])
    async with Engine(model_path, **OPTIONS) as engine:
        for path, says in (
            (of_other, "qwen3"),
            (model_path, "general.type"),
            (tmp_path / "none.gguf", "No such file"),
            (tmp_path, "not a regular file"),
            (damaged, "within the file"),
        ):
            with pytest.raises(ModelLoadError, match=says):
                await engine.load_lora("x", path)
        assert engine.model.loras == ()
        await engine.generate("Hello", **GREEDY)


async def test_a_deterministic_engine_has_those_that_it_was_tried_with(
    model_path: Path, adapters: dict[str, Path]
) -> None:
    settings = [("a", adapters["a"], 0.0)]
    async with Engine(model_path, lora=settings, deterministic=True, **OPTIONS) as engine:
        with pytest.raises(InvalidRequestError, match="deterministic"):
            await engine.load_lora("b", adapters["b"])
        uses: list[Mapping[str, float]] = [{}, {"a": 1.0}] * 3
        together = await answers_of(engine, uses)
        for number, lora in enumerate(uses):
            assert (await alone(engine, number, lora)).token_ids == together[number].token_ids


def test_a_context_lets_go_of_its_adapters_and_takes_none_of_another_model(
    model_path: Path, adapters: dict[str, Path]
) -> None:
    with Model(model_path) as model, Model(model_path) as other:
        for context in (
            Context(model, n_ctx=256, n_batch=64, n_seq_max=1),
            EmbeddingContext(model, n_batch=64, pooling="mean"),
        ):
            with context, LoraAdapter(model, adapters["a"]) as adapter:
                context.set_loras([(adapter, 1.0)])
                context.set_loras([])
                with (
                    LoraAdapter(other, adapters["a"]) as foreign,
                    pytest.raises(InvalidArgumentError, match="adapter"),
                ):
                    context.set_loras([(foreign, 1.0)])


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", 3, b"a", None])
async def test_a_path_of_no_file_system_is_rejected_by_name(path: Any) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(InvalidRequestError, match="path"):
            await engine.load_lora("a", path)
        names: list[Any] = [[], 3, {}]
        for name in names:
            with pytest.raises(InvalidRequestError, match="name"):
                await engine.unload_lora(name)
