"""`embed`, `rerank` and `classify`: beside streams, and alone.

What a `FakeEngine` shows needs no model; what llama.cpp computes is compared with a context of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import (
    CllmError,
    ClosedError,
    DeadlineError,
    Embedder,
    EmbeddingError,
    Engine,
    InvalidArgumentError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
)
from cllm.bindings import Batch, EmbeddingContext, Model
from cllm.engine.loop.embedding_calls import EmbeddingCalls
from cllm.engine.thread.worker_thread import WorkerThread
from cllm.errors import DecodeFailedError, NotGenerativeError
from cllm.testing import FakeEngine
from cllm.testing.fake_encoder import N_VALUES, vector_of
from tests.conftest import QUIET, running_batch
from tools import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog, again and again and again", "0"]


def unit(vectors: Any) -> NDArray[np.float32]:
    array = np.array(vectors, np.float32)
    made: NDArray[np.float32] = array / np.linalg.norm(array, axis=1, keepdims=True)
    return made


def fake_vectors(texts: Sequence[str]) -> NDArray[np.float32]:
    return unit([vector_of(text.encode()) for text in texts])


# --- Any model -----------------------------------------------------------------------------------
async def test_vectors_are_a_unit_long_in_the_order_of_the_texts_and_the_callers_own() -> None:
    async with FakeEngine() as engine:
        vectors = await engine.embed(TEXTS)
        np.testing.assert_allclose(vectors, fake_vectors(TEXTS), rtol=1e-6)
        assert vectors.dtype == np.float32
        vectors[:] = 0.0  # it may be written to
        np.testing.assert_allclose(
            await engine.embed(TEXTS[1:2]), fake_vectors(TEXTS[1:2]), rtol=1e-6
        )
        assert (await engine.embed([])).shape == (0, N_VALUES)


async def test_vectors_may_be_cut_and_left_as_the_model_gives_them() -> None:
    async with FakeEngine() as engine:
        raw = await engine.embed(TEXTS, normalize=False)
        np.testing.assert_array_equal(raw, [vector_of(text.encode()) for text in TEXTS])
        cut: Any = await engine.embed(TEXTS[2:3], dimensions=8)
        np.testing.assert_allclose(cut, unit(raw[2:3, :8]), rtol=1e-6)
        assert cut.flags.c_contiguous
        zeros = await engine.embed(["0"], dimensions=8)  # of which nothing is left
        np.testing.assert_array_equal(zeros, raw[3:, :8])


async def test_token_ids_are_texts_too_and_tokens_are_counted() -> None:
    async with FakeEngine() as engine:
        found = await engine.embeddings([list(b"abc"), "abc", (97,)])
        np.testing.assert_array_equal(found.vectors[0], found.vectors[1])
        assert found.n_tokens == (3, 3, 1)


async def test_many_texts_are_answered_in_their_order_and_hold_one_place_of_the_queue() -> None:
    texts = [f"text number {i}" for i in range(1000)]
    async with FakeEngine(n_seq_max=1, max_queue=0) as engine:
        np.testing.assert_allclose(await engine.embed(texts), fake_vectors(texts), rtol=1e-5)
        assert engine.statistics().n_embedded_texts == 1000
        assert engine.statistics().n_waiting_texts == 0


@pytest.mark.parametrize(
    ("texts", "options", "field"),
    [
        pytest.param("a text", {}, "texts", id="not several"),
        pytest.param(["a", ""], {}, "texts[1]", id="empty"),
        pytest.param([[]], {}, "texts[0]", id="no tokens"),
        pytest.param(["a", None], {}, "texts[1]", id="no text"),
        pytest.param([[258]], {}, "texts[0]", id="no token"),
        pytest.param(["ok", "x" * 600], {}, "texts[1]", id="too long"),
        pytest.param(["x" * 100_000], {}, "texts[0]", id="far too long"),
        pytest.param(["a", "b\ud800"], {}, "texts[1]", id="a lone surrogate"),
        pytest.param(["a"], {"dimensions": 0}, "dimensions", id="no dimensions"),
        pytest.param(["a"], {"dimensions": 65}, "dimensions", id="more than there are"),
        pytest.param(["a"], {"normalize": 1}, "normalize", id="no flag"),
        pytest.param(["a"], {"truncate": "yes"}, "truncate", id="no flag either"),
        pytest.param(["a"], {"priority": 1.5}, "priority", id="no priority"),
        pytest.param(["a"], {"timeout": -1}, "timeout", id="no time"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name_before_anything_is_computed(
    texts: Any, options: dict[str, Any], field: str
) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.embed(texts, **options)
        assert caught.value.field == field
        assert engine.encoder.batches == []
        assert (await engine.embed(["fine"])).shape == (1, N_VALUES)


async def test_a_text_that_is_too_long_may_be_cut() -> None:
    async with FakeEngine(n_ubatch=16) as engine:
        found = await engine.embeddings(["x" * 600, "y" * 100_000, "z"], truncate=True)
        assert found.n_tokens == (16, 16, 1)


async def test_a_text_that_fails_ends_its_own_call() -> None:
    error = DecodeFailedError("llama_encode", -3, "broken")
    async with FakeEngine() as engine:
        engine.encoder.poison = lambda tokens: error if bytes(tokens) == b"poison" else None
        found: list[NDArray[np.float32]] = []

        async def embed_well() -> None:
            found.append(await engine.embed(TEXTS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed_well)
            with pytest.raises(EmbeddingError, match="broken") as caught:
                await engine.embed(["fine", "poison"])
        np.testing.assert_allclose(found[0], fake_vectors(TEXTS), rtol=1e-6)
        assert isinstance(caught.value.__cause__, DecodeFailedError)
        assert await engine.generate("still here") is not None


async def test_a_call_whose_time_is_over_ends_with_a_timeout() -> None:
    async with FakeEngine() as engine:
        engine.encoder.latency_s = 0.05
        with pytest.raises(DeadlineError):
            await engine.embed(["x" * 500] * 100, timeout=0.1)
        with pytest.raises(TimeoutError):
            await engine.embed(["x"], timeout=0)


CALLS: dict[str, tuple[dict[str, Any], Callable[[Engine], Awaitable[object]]]] = {
    "embed": ({}, lambda engine: engine.embed(["x"], timeout=0.01)),
    "classify": ({"pooling": "rank"}, lambda engine: engine.classify(["x"], timeout=0.01)),
    "rerank": ({"pooling": "rank"}, lambda engine: engine.rerank("q", ["x"], timeout=0.01)),
    "rerank by text": (
        {}, lambda engine: engine.rerank("q", ["x"], timeout=0.01, template="{query}{document}"),
    ),
    "score": ({}, lambda engine: engine.score("x" * 3000, "y", timeout=0.01)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
async def test_the_timeout_of_a_call_covers_its_tokenization(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, call = CALLS[name]
    async with FakeEngine(n_ctx=8192, **options) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(WorkerThread, "run", lambda *_: anyio.sleep_forever())
            with anyio.fail_after(30), pytest.raises(DeadlineError):
                await call(engine)
        assert (await engine.generate("x")).text


async def test_a_drain_cancels_what_is_still_being_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, held, n_waiting = WorkerThread.run, anyio.Event(), 0

    async def run_later(worker: WorkerThread, call: Any) -> Any:
        nonlocal n_waiting
        n_waiting += 1
        await held.wait()
        return await run(worker, call)

    reasons = list[str]()

    async def generate(engine: Engine) -> None:
        reasons.append((await engine.generate("x" * 3000, max_tokens=1000)).finish_reason)

    async def embed(engine: Engine) -> None:
        with pytest.raises(CllmError):
            await engine.embed(["x"])

    async with FakeEngine(lambda _: "y" * 1000, n_ctx=8192) as engine:
        engine.encoder.latency_s = 60.0
        monkeypatch.setattr(WorkerThread, "run", run_later)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate, engine)
                tasks.start_soon(embed, engine)
                while n_waiting < 2:
                    await anyio.lowlevel.checkpoint()
                tasks.start_soon(engine.drain, 0)
                while engine.health().status != "draining":
                    await anyio.lowlevel.checkpoint()
                await anyio.wait_all_tasks_blocked()
                held.set()
    assert reasons == ["cancelled"]


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    async with FakeEngine() as engine:
        engine.encoder.latency_s = 60.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, ["x" * 100])
            with anyio.fail_after(30):
                while not running_batch(engine):
                    await anyio.sleep(0)
            tasks.cancel_scope.cancel()
        engine.encoder.latency_s = 0.0
        with anyio.fail_after(30):  # the batch of nobody was aborted
            assert (await engine.embed(["fine"])).shape == (1, N_VALUES)
        assert engine.statistics().n_waiting_texts == 0


async def test_a_full_queue_refuses_texts_and_streams_alike() -> None:
    async with FakeEngine(n_seq_max=1, max_queue=1) as engine:
        engine.encoder.latency_s = 60.0
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(engine.embed, ["x" * 100])
            with anyio.fail_after(30):
                while not running_batch(engine):
                    await anyio.sleep(0)
            with pytest.raises(QueueFullError):
                await engine.embed(["one too many"])
            with pytest.raises(QueueFullError):
                await engine.generate("one too many")
            tasks.cancel_scope.cancel()


async def test_closing_ends_calls_that_wait() -> None:
    errors: list[Exception] = []

    async def embed(engine: Engine) -> None:
        try:
            await engine.embed(["x" * 100] * 600)
        except (ClosedError, EmbeddingError) as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks, FakeEngine() as engine:
        engine.encoder.latency_s = 60.0
        tasks.start_soon(embed, engine)
        with anyio.fail_after(30):
            while not running_batch(engine):
                await anyio.sleep(0)
    assert len(errors) == 1


async def test_a_drain_waits_for_texts_as_for_streams() -> None:
    async with FakeEngine() as engine:
        engine.encoder.latency_s = 0.02
        found: list[NDArray[np.float32]] = []

        async def embed() -> None:
            found.append(await engine.embed(["x" * 400] * 600))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed)
            with anyio.fail_after(30):
                while not running_batch(engine):
                    await anyio.sleep(0)
            engine.encoder.latency_s = 0.0
            await engine.drain()
        assert found[0].shape == (600, N_VALUES)


async def test_texts_are_answered_by_the_model_that_they_were_asked_of() -> None:
    async with FakeEngine() as engine:
        first = engine.encoder
        first.latency_s = 0.02
        found: list[NDArray[np.float32]] = []

        async def embed() -> None:
            found.append(await engine.embed(["x" * 400] * 600))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed)
            with anyio.fail_after(30):
                while not running_batch(engine):
                    await anyio.sleep(0)
            first.latency_s = 0.0
            await engine.reload()
        assert found[0].shape == (600, N_VALUES)
        assert sum(map(len, first.batches)) == 600
        assert engine.statistics().n_embedded_texts == 600  # of both models


async def test_streams_go_on_while_texts_are_embedded() -> None:
    async with FakeEngine(latency_s=0.001) as engine:
        engine.encoder.latency_s = 0.005
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, ["x" * 400] * 200)
            completion = await engine.generate("y" * 50)
            assert completion.text == "y" * 50
            assert engine.statistics().n_waiting_texts > 0
            tasks.cancel_scope.cancel()


# --- Rankings and classes ------------------------------------------------------------------------
async def test_the_most_relevant_document_comes_first() -> None:
    documents = ["a bicycle", "the lighthouse keeper", "a lighthouse by the sea", "soup"]
    async with FakeEngine(pooling="rank") as engine:
        ranked = await engine.rerank("lighthouse by the sea", documents)
        assert ranked[0].index == 2
        assert [each.score for each in ranked] == sorted((r.score for r in ranked), reverse=True)
        assert all(0.0 <= each.score <= 1.0 for each in ranked)
        assert {r.index: r.n_tokens for r in ranked} == {
            i: len("lighthouse by the sea") + 1 + len(d) for i, d in enumerate(documents)
        }
        assert await engine.rerank("lighthouse", []) == []


@pytest.mark.parametrize(
    ("query", "documents", "field"),
    [
        ("", ["a"], "query"),
        (["a"], ["a"], "query"),
        ("a", "b", "documents"),
        ("a", ["b", ""], "documents[1]"),
        ("a", [b"c"], "documents[0]"),
        ("a", ["b", "x" * 600], "documents[1]"),
        ("\ud800", ["b"], "query"),
        ("a", ["b", "c\ud800"], "documents[1]"),
    ],
)
async def test_what_cannot_be_ranked_is_refused_by_name(
    query: Any, documents: Any, field: str
) -> None:
    async with FakeEngine(pooling="rank") as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.rerank(query, documents)
        assert caught.value.field == field
        assert engine.encoder.batches == []


async def test_a_document_that_is_too_long_may_be_cut_and_a_query_may_not() -> None:
    async with FakeEngine(pooling="rank", n_ubatch=32) as engine:
        ranked = await engine.rerank("the query", ["x" * 100_000, "the"], truncate=True)
        assert {each.index: each.n_tokens for each in ranked} == {0: 32, 1: 13}
        for truncate in (False, True):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.rerank("q" * 40, ["a"], truncate=truncate)
            assert caught.value.field == ("query" if truncate else "documents[0]")
        assert (await engine.rerank("the query", ["the"]))[0].n_tokens == 13


async def test_a_model_without_a_classifier_neither_ranks_nor_classifies() -> None:
    async with FakeEngine() as engine:
        for call in (engine.rerank("a", ["b"]), engine.classify(["a"])):
            with pytest.raises(InvalidRequestError, match="classifier"):
                await call


async def test_a_model_with_one_gives_no_vectors() -> None:
    async with FakeEngine(pooling="rank") as engine:
        with pytest.raises(InvalidRequestError, match="scores"):
            await engine.embed(["a"])


async def test_a_model_that_writes_is_asked_for_yes_and_no() -> None:
    """Whatever it says: each document has the score that its two answers have."""
    template = "Is {document} about {query}? "
    async with FakeEngine() as engine:
        ranked = await engine.rerank("q", ["one", "two", "three"], template=template)
        for each in ranked:
            prompt = f"Is {['one', 'two', 'three'][each.index]} about q? "
            yes, no = [(await engine.score(prompt, word)).total for word in ("y", "n")]
            assert each.score == pytest.approx(np.exp(yes) / (np.exp(yes) + np.exp(no)))
            assert each.n_tokens == len(prompt)


async def test_a_ranking_is_of_the_documents_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller may use its list again while they are tokenized in a worker thread."""
    template = "{query}{document}"
    documents = ["one", "two", "three"]
    by_parts = EmbeddingCalls._by_parts

    async def overwritten(calls: EmbeddingCalls, sizes: Any, tokenize: Any) -> Any:
        given.clear()
        return await by_parts(calls, sizes, tokenize)

    async with FakeEngine(n_ctx=1024) as engine:
        whole = await engine.rerank("q", documents, template=template)
        monkeypatch.setattr(EmbeddingCalls, "_by_parts", overwritten)
        given = list(documents)
        assert await engine.rerank("q", given, template=template) == whole


async def test_the_prompts_of_a_ranking_are_tokenized_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request waits for one part, and not for all documents."""
    documents, template = [n * "d" for n in (3, 40, 9, 200, 1, 1, 1)], "{query}{document}"
    async with FakeEngine(n_ctx=1024) as engine:
        whole = await engine.rerank("q", documents, template=template)
        parts, by_parts = list[range](), EmbeddingCalls._by_parts

        async def noted(calls: EmbeddingCalls, sizes: Any, tokenize: Any) -> Any:
            def tokenized(part: range) -> Any:
                parts.append(part)
                return tokenize(part)

            return await by_parts(calls, sizes, tokenized)

        monkeypatch.setattr(EmbeddingCalls, "_by_parts", noted)
        monkeypatch.setattr("cllm.engine.loop.embedding_calls.N_CHARACTERS", 50)
        monkeypatch.setattr("cllm.engine.loop.embedding_calls.N_TEXTS", 2)
        assert await engine.rerank("q", documents, template=template) == whole
    assert [list(part) for part in parts] == [[0, 1], [2], [3], [4, 5], [6]]


# --- llama.cpp -----------------------------------------------------------------------------------
def reference(path: Path, texts: Sequence[str], pooling: str | None) -> NDArray[np.float32]:
    """Each text alone, in a context of its own."""
    rows = []
    with Model(path) as model, EmbeddingContext(model, pooling=pooling, n_threads=1) as context:
        for text in texts:
            batch = Batch(512)
            batch.add(0, model.vocab.tokenize(text), 0)
            rows.append(context.compute(batch)[0])
    return np.array(rows)


def cosines(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (unit(left) * unit(right)).sum(axis=1)
    return found


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("tiny-encoder", "mean"),
        ("tiny-encoder", "cls"),
        ("tiny-t5-encoder", "mean"),
        ("tiny-llama", "mean"),
        ("tiny-qwen3", "last"),
        ("tiny-swa", "mean"),
    ],
)
@pytest.mark.parametrize("kind", [Embedder, Engine])
async def test_vectors_are_those_of_each_text_alone(
    kind: type[Embedder] | type[Engine], name: str, pooling: str | None
) -> None:
    path = make_model.ensure(name, "F16")
    async with kind(path, pooling=pooling, **QUIET) as engine:
        vectors = await engine.embed(TEXTS * 10)
        assert await engine.audit() == []
    assert cosines(vectors[:4], reference(path, TEXTS, pooling)).min() > 0.9999
    for i in range(1, 10):
        assert cosines(vectors[:4], vectors[4 * i : 4 * i + 4]).min() > 0.9999


async def test_one_model_generates_and_embeds_at_once() -> None:
    path = make_model.ensure("tiny-llama", "F16")
    async with Engine(path, pooling="mean", **QUIET) as engine:
        alone = await engine.generate("Once", max_tokens=60, temperature=0, ignore_eos=True)
        answers: list[str] = []

        async def ask() -> None:
            answer = await engine.generate("Once", max_tokens=60, temperature=0, ignore_eos=True)
            answers.append(answer.text)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            vectors = await engine.embed(TEXTS * 50)
        assert answers == [alone.text] * 4
        assert await engine.audit() == []
        assert engine.statistics().n_embedded_texts == 200
    assert cosines(vectors[:4], reference(path, TEXTS, "mean")).min() > 0.9999


@pytest.mark.parametrize(
    ("name", "pooling"), [("tiny-llama", "mean"), ("tiny-qwen3", "last"), ("tiny-hybrid", "cls")]
)
async def test_a_text_that_comes_in_pieces_beside_a_stream_has_the_vector_of_the_whole(
    name: str, pooling: str
) -> None:
    path, text = make_model.ensure(name, "F16"), " ".join(TEXTS)
    # Streams leave next to nothing of it.
    async with (
        Engine(path, pooling=pooling, target_itl_ms=1.0, n_ctx=8192, **QUIET) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(engine.generate, "Once", max_tokens=8000, ignore_eos=True))
        while not engine.statistics().n_ticks:
            await anyio.lowlevel.checkpoint()
        vectors = await engine.embed([text])
        statistics = engine.statistics()
        tasks.cancel_scope.cancel()
    assert statistics.n_running == 1
    assert statistics.n_embedding_batches > 1
    assert cosines(vectors, reference(path, [text], pooling)).min() > 0.9999


async def test_a_classifier_names_the_likeliest_label() -> None:
    path = make_model.ensure("tiny-classifier", "F16")
    async with Embedder(path, **QUIET) as embedder:
        info = embedder.model.embedding
        assert info is not None
        assert info.labels == ("sad", "glad", "mad")
        found = await embedder.classify(TEXTS)
        with pytest.raises(InvalidRequestError, match="classifier of 3 labels"):
            await embedder.rerank("a", ["b"])
    raw = reference(path, TEXTS, None)
    for each, scores in zip(found, raw, strict=True):
        likely = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(list(each.scores.values()), likely, rtol=1e-3)
        assert each.label == info.labels[int(scores.argmax())]
        assert each.score == max(each.scores.values())


async def test_an_encoder_refuses_to_generate_by_name_and_goes_on() -> None:
    async with Engine(make_model.ensure("tiny-encoder", "F16"), pooling="mean", **QUIET) as engine:
        assert not engine.model.generates
        for call in (engine.generate("a"), engine.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(InvalidRequestError, match="generates text") as caught:
                await call
            assert caught.value.field == "model"
        with pytest.raises(InvalidRequestError):
            await engine.score("a", "b")
        assert (await engine.embed(["a"])).shape[0] == 1
        assert await engine.audit() == []


async def test_an_encoder_whose_file_names_no_pooling_has_to_be_told_one() -> None:
    path = make_model.ensure("tiny-encoder", "F16")
    with pytest.raises(NotGenerativeError, match="pooling"):
        async with Engine(path, **QUIET):
            pass
    with pytest.raises(InvalidArgumentError, match="pooling"):
        async with Embedder(path, **QUIET):
            pass


async def test_a_generator_has_no_vectors_unless_it_is_told_how() -> None:
    async with Engine(**QUIET) as engine:
        with pytest.raises(InvalidRequestError, match="pooling"):
            await engine.embed(["a"])
    with pytest.raises(InvalidArgumentError, match="no classifier"):
        async with Engine(pooling="rank", **QUIET):
            pass
    with pytest.raises(InvalidArgumentError, match="one of mean"):
        Engine(pooling="max")


async def test_a_text_is_cut_where_it_is_too_long() -> None:
    path = make_model.ensure("tiny-encoder", "F16")
    async with Embedder(path, pooling="mean", n_ubatch=16, **QUIET) as embedder:
        tokens = await embedder.tokenize("a b c d e f g h i j k l m n o p q r s t")
        assert len(tokens) > 16
        cut = tokens[:16]
        found = await embedder.embeddings(
            ["a b c d e f g h i j k l m n o p q r s t"], truncate=True
        )
        assert found.n_tokens == (16,)
        np.testing.assert_allclose(found.vectors, await embedder.embed([cut]), atol=1e-5)


async def test_a_preflight_tries_an_encoder_with_a_text() -> None:
    path = make_model.ensure("tiny-encoder", "F16")
    async with Embedder(path, pooling="mean", preflight=True, **QUIET) as embedder:
        assert (await embedder.embed(["a"])).shape[0] == 1


async def test_a_damaged_encoder_is_a_load_error(tmp_path: Path) -> None:
    data = make_model.ensure("tiny-encoder", "F16").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError):
        async with Embedder(path, **QUIET):
            pass


# --- Another model for texts ---------------------------------------------------------------------
@pytest.mark.parametrize("process", [False, True])
async def test_an_engine_may_have_a_model_of_its_own_for_texts(process: bool) -> None:
    encoder = make_model.ensure("tiny-encoder", "F16")
    async with Embedder(encoder, pooling="mean", **QUIET) as embedder:
        expected = await embedder.embed(TEXTS)
        (n_tokens,) = (await embedder.embeddings(TEXTS[:1])).n_tokens
    async with Engine(embedding_model=encoder, pooling="mean", process=process, **QUIET) as engine:
        alone = await engine.generate("count:1..9", temperature=0)
        found: list[NDArray[np.float32]] = []

        async def embed() -> None:
            found.append(await engine.embed(TEXTS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embed)
            together = await engine.generate("count:1..9", temperature=0)
        assert together.token_ids == alone.token_ids
        assert ((found[0] * expected).sum(axis=1) > 0.9999).all()
        assert (await engine.embeddings(TEXTS[:1])).n_tokens == (n_tokens,)
        assert engine.model.embedding is not None
        assert engine.model.embedding.n_values == expected.shape[1]
        assert await engine.audit() == []


async def test_a_classifier_beside_a_model_that_writes_ranks_for_it() -> None:
    classifier = make_model.ensure("tiny-reranker", "F16")
    async with Engine(embedding_model=classifier, **QUIET) as engine:
        ranked = await engine.rerank("query", ["one", "two", "three"])
        assert sorted(each.index for each in ranked) == [0, 1, 2]
        assert (await engine.generate("1+1=", temperature=0)).text == "2"
    async with Embedder(classifier, **QUIET) as embedder:
        expected = await embedder.rerank("query", ["one", "two", "three"])
    assert [each.index for each in ranked] == [each.index for each in expected]


async def test_a_model_for_texts_that_is_not_there_or_says_nothing_is_refused_by_name(
    tmp_path: Path,
) -> None:
    encoder = make_model.ensure("tiny-encoder", "F16")
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        async with Engine(embedding_model=tmp_path / "none.gguf", **QUIET):
            pass
    with pytest.raises(InvalidArgumentError, match="embedding_model names none"):
        async with Engine(embedding_model=make_model.ensure("tiny-llama", "F16"), **QUIET):
            pass
    with pytest.raises(InvalidArgumentError, match="an Embedder has one model"):
        async with Embedder(encoder, pooling="mean", embedding_model=encoder, **QUIET):
            pass


async def test_a_text_for_a_large_window_has_the_tokenizers_limit() -> None:
    """A window of 2**17 tokens has room for more characters than a tokenizer takes."""
    async with FakeEngine(n_ubatch=1 << 17, n_batch=1 << 17) as engine:
        with pytest.raises(InvalidRequestError, match="1048577 bytes") as caught:
            await engine.embed(["a", "x" * ((1 << 20) + 1)])
        assert caught.value.field == "texts[1]"
