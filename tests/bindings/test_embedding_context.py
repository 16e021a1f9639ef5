"""EmbeddingContext: vectors of texts, of every kind of model, in every company."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, EmbeddingContext, Model, library
from cllm.bindings.embedding_context import own_pooling
from cllm.errors import (
    ClosedError,
    ContextError,
    DecodeFailedError,
    InUseError,
    InvalidArgumentError,
    PositionError,
    WrongThreadError,
)
from tests.bindings.conftest import error_in_another_thread
from tools import make_model

KINDS = [
    "tiny-encoder",
    "tiny-t5-encoder",
    "tiny-llama",
    "tiny-swa",
    "tiny-hybrid",
    "tiny-recurrent",
]
TEXTS = [list(b"the quick brown fox"), list(b"jumps"), list(b"over the lazy dog, twice")]
NewEmbedder = Callable[..., EmbeddingContext]


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[[str], Model]]:
    """Loads each once."""
    loaded: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in loaded:
            loaded[name] = Model(make_model.ensure(name, "F16"))
        return loaded[name]

    yield load
    for model in loaded.values():
        model.close()


@pytest.fixture
def new_embedder(models: Callable[[str], Model]) -> Iterator[NewEmbedder]:
    """Makes small contexts and closes them."""
    made: list[EmbeddingContext] = []

    def new(name: str, **parameters: Any) -> EmbeddingContext:
        defaults: dict[str, Any] = {"n_batch": 64, "n_seq_max": 4, "n_threads": 1}
        made.append(EmbeddingContext(models(name), **{**defaults, **parameters}))
        return made[-1]

    yield new
    for embedder in made:
        embedder.close()


@pytest.mark.parametrize("name", KINDS)
def test_only_a_decoder_computes_a_text_in_pieces(name: str, new_embedder: NewEmbedder) -> None:
    """A row of an encoder attends to the rows after it.  llama.cpp gives T5's encoder a memory all the same."""
    assert new_embedder(name, pooling="mean").computes_in_pieces == ("encoder" not in name)


def batch_of(*texts: list[int]) -> Batch:
    batch = Batch(64)
    for seq_id, tokens in enumerate(texts):
        batch.add(seq_id, tokens, 0)
    return batch


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_has_the_same_vector_alone_and_in_every_company(
    new_embedder: NewEmbedder, name: str, pooling: str
) -> None:
    embedder = new_embedder(name, pooling=pooling)
    alone = [embedder.compute(batch_of(text))[0] for text in TEXTS]
    together = embedder.compute(batch_of(*TEXTS))
    backwards = embedder.compute(batch_of(*TEXTS[::-1]))[::-1]
    assert together.shape == (3, 64)
    assert together.dtype == np.float32
    for i, vector in enumerate(alone):
        assert cosine(vector, together[i]) > 0.999
        assert cosine(vector, backwards[i]) > 0.999
    assert cosine(alone[0], alone[1]) < 0.99


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-swa", "tiny-recurrent", "tiny-hybrid"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_text_that_comes_in_pieces_has_the_vector_that_it_has_whole(
    new_embedder: NewEmbedder, name: str, pooling: str
) -> None:
    embedder = new_embedder(name, pooling=pooling)
    assert embedder.computes_in_pieces
    text = list(b"the quick brown fox jumps over the lazy dog")
    whole = embedder.compute(batch_of(text))[0]
    pieces, batch = list[NDArray[np.float32]](), Batch(64)
    sizes = (7, 1, 20, len(text) - 28)
    for size, p0 in zip(sizes, (0, 7, 8, 28), strict=True):
        batch.clear()
        batch.add(3, text[p0 : p0 + size], p0)
        pieces.append(embedder.compute(batch)[0])
    made = {
        "mean": np.average(pieces, axis=0, weights=sizes),
        "cls": pieces[0],
        "last": pieces[-1],
    }
    assert cosine(whole, made[pooling]) > 0.9999
    assert cosine(embedder.compute(batch_of(text))[0], whole) > 0.9999


@pytest.mark.parametrize("name", ["tiny-encoder", "tiny-llama"])
def test_every_batch_counts_as_a_computation_of_the_process(
    new_embedder: NewEmbedder, name: str
) -> None:
    """llama.cpp reads some settings at the first of all computations."""
    before = library().n_computed
    new_embedder(name, pooling="mean").compute(batch_of([5, 6]))
    assert library().n_computed == before + 1


def test_only_what_was_computed_last_goes_on(new_embedder: NewEmbedder) -> None:
    decoder, late = new_embedder("tiny-llama", pooling="last"), Batch(64)
    late.add(0, [5, 6], 3)
    for before in ([[5, 6]], [[5, 6, 7], [8]], [[5, 6, 7, 8]]):
        decoder.compute(batch_of(*before))
        with pytest.raises(PositionError):
            decoder.compute(late)
    decoder.compute(batch_of([5, 6, 7]))
    assert np.isfinite(decoder.compute(late)).all()
    assert not new_embedder("tiny-encoder", pooling="mean").computes_in_pieces


def test_poolings_are_different_vectors_of_one_text(new_embedder: NewEmbedder) -> None:
    vectors = [
        new_embedder("tiny-llama", pooling=pooling).compute(batch_of(TEXTS[0]))[0]
        for pooling in ("mean", "cls", "last")
    ]
    for one, other in [(0, 1), (1, 2), (0, 2)]:
        assert cosine(vectors[one], vectors[other]) < 0.99


def test_the_first_token_of_a_decoder_knows_nothing_of_the_others(
    new_embedder: NewEmbedder,
) -> None:
    embedder = new_embedder("tiny-llama", pooling="cls")
    one, other = (embedder.compute(batch_of(text))[0] for text in ([5, 6, 7], [5, 8, 9, 10]))
    assert cosine(one, other) > 0.999


def test_a_classifier_scores_a_text_for_each_of_its_labels(
    new_embedder: NewEmbedder, models: Callable[[str], Model]
) -> None:
    assert own_pooling(models("tiny-classifier")) == "rank"
    embedder = new_embedder("tiny-classifier")
    assert (embedder.pooling, embedder.n_values) == ("rank", 3)
    scores = embedder.compute(batch_of(*TEXTS))
    assert scores.shape == (3, 3)
    assert np.abs(scores[0] - scores[1]).max() > 1e-3
    # Its texts have vectors too.
    assert new_embedder("tiny-classifier", pooling="mean").n_values == 64


def test_generating_beside_it_is_not_disturbed(
    new_embedder: NewEmbedder, models: Callable[[str], Model]
) -> None:
    with Context(models("tiny-llama"), n_ctx=256, n_threads=1, n_threads_batch=1) as context:
        batch = Batch(64)
        batch.add(0, TEXTS[0], 0, n_outputs=1)
        before = context.decode(batch).rows[0].copy()
        embedder = new_embedder("tiny-llama", pooling="mean")
        embedder.compute(batch_of(*TEXTS))
        assert context.seq_pos_max(0) == len(TEXTS[0]) - 1
        context.seq_rm(0)
        assert np.array_equal(context.decode(batch).rows[0], before)


@pytest.mark.parametrize(
    ("name", "pooling", "says"),
    [
        ("tiny-encoder", None, "names none"),
        ("tiny-llama", "none", "one of mean, cls, last, rank"),
        ("tiny-llama", 1, "one of"),
        ("tiny-llama", "rank", "has no classifier"),
    ],
)
def test_a_pooling_that_is_none_or_not_there_is_refused(
    new_embedder: NewEmbedder, name: str, pooling: object, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        new_embedder(name, pooling=pooling)
    assert caught.value.field == "pooling"


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ([[5] * 33], "rows"),
        ([[5] * 20, [6] * 20], "rows"),
        ([[5], [6], [7]], "seq_id"),
        ([[260]], "token"),
    ],
)
def test_a_batch_that_would_abort_is_refused(
    new_embedder: NewEmbedder, texts: list[list[int]], field: str
) -> None:
    embedder = new_embedder("tiny-encoder", pooling="mean", n_batch=32, n_seq_max=2)
    with pytest.raises(InvalidArgumentError) as caught:
        embedder.compute(batch_of(*texts))
    assert caught.value.field == field
    assert np.isfinite(embedder.compute(batch_of([5] * 32))).all()


def test_a_text_has_one_run_from_position_0(new_embedder: NewEmbedder) -> None:
    embedder = new_embedder("tiny-encoder", pooling="mean")
    late, twice = Batch(8), Batch(8)
    late.add(0, [5], 3)
    twice.add(0, [5], 0)
    twice.add(0, [6], 1)
    for batch in (late, twice):
        with pytest.raises(PositionError):
            embedder.compute(batch)
    with pytest.raises(InvalidArgumentError, match="rows"):
        embedder.compute(Batch(8))


def test_no_text_is_longer_than_the_model_has_positions(
    new_embedder: NewEmbedder, models: Callable[[str], Model]
) -> None:
    embedder = new_embedder("tiny-encoder", pooling="mean", n_batch=2100)
    assert embedder.n_tokens_max == models("tiny-encoder").n_ctx_train == 2048
    batch = Batch(2100)
    batch.add(0, [5] * 2049, 0)
    with pytest.raises(InvalidArgumentError, match="tokens"):  # there is no vector for its position
        embedder.compute(batch)


def test_a_computation_is_cut_short_and_the_next_one_is_not(new_embedder: NewEmbedder) -> None:
    embedder = new_embedder("tiny-llama", pooling="mean")
    embedder.set_abort(True)
    with pytest.raises(DecodeFailedError, match="aborted"):
        embedder.compute(batch_of(*TEXTS))
    embedder.set_abort(False)
    assert np.isfinite(embedder.compute(batch_of(*TEXTS))).all()


def test_another_thread_and_a_closed_one_are_refused(models: Callable[[str], Model]) -> None:
    model = models("tiny-encoder")
    embedder = EmbeddingContext(model, pooling="mean", n_batch=64, n_seq_max=2, n_threads=1)
    with pytest.raises(InUseError):
        model.close()
    batch = batch_of(TEXTS[1])
    error = error_in_another_thread(lambda: embedder.compute(batch))
    assert isinstance(error, WrongThreadError)
    embedder.close()
    with pytest.raises(ClosedError):
        embedder.compute(batch)


def test_a_model_without_weights_has_no_vectors() -> None:
    path = make_model.ensure("tiny-encoder", "F16")
    with Model(path, vocab_only=True) as model, pytest.raises(ContextError, match="no weights"):
        EmbeddingContext(model, pooling="mean")


@pytest.mark.parametrize("n_batch", [0, (1 << 20) + 1])
def test_a_batch_of_an_embedding_context_has_its_limits(
    new_embedder: NewEmbedder, n_batch: int
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"n_batch is {n_batch}, must be 1 to 1048576"):
        new_embedder("tiny-encoder", n_batch=n_batch)


# Runs in a process of its own, which llama.cpp may abort.
SIZES = """
import sys
from cllm.bindings import Batch, EmbeddingContext, Model
model = Model(sys.argv[1])
for pooling in ("mean", "cls", "last"):
    for n_batch, n_seq_max in (7, 7), (64, 3), (65, 64), (100, 64), (127, 5):
        with EmbeddingContext(
            model, pooling=pooling, n_batch=n_batch, n_seq_max=n_seq_max, n_threads=1
        ) as embedder:
            assert (embedder.n_batch, embedder.n_seq_max) == (n_batch, n_seq_max)
            whole, several = Batch(n_batch), Batch(n_batch)
            whole.add(0, [5] * n_batch, 0)
            for seq_id in range(n_seq_max):
                several.add(seq_id, [5] * (n_batch // n_seq_max), 0)
            for batch in whole, several:
                assert len(embedder.compute(batch)) == len(batch.runs)
print("computed")
"""


@pytest.mark.parametrize("name", KINDS[:3])
def test_a_batch_need_not_be_a_multiple_of_its_texts(name: str) -> None:
    """llama.cpp aborts with pooling "mean" if it has to round the rows up, but not the outputs."""
    path = str(make_model.ensure(name, "F16"))
    done = subprocess.run([sys.executable, "-c", SIZES, path], capture_output=True, text=True)
    assert done.stdout == "computed\n", done.stderr
