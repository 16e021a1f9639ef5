"""What libllama makes of a real embedding model: all-MiniLM-L6-v2, beside the same weights in numpy.

`make test-real` fetches the model; without it these tests are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, EmbeddingContext, Model
from tests.real.bert_reference import BertReference
from tools import real_encoder

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not real_encoder.ORIGINAL.is_dir(), reason="not in the cache: make test-real fetches it"
    ),
]
N_BATCH, N_SEQ_MAX = 512, 16
SUBJECTS = [
    "A tired fisherman",
    "The old clock",
    "Nobody in the café",
    "My sister's violin",
    "粗い石",
]
VERBS = ["watches", "has forgotten", "will never reach", "is made of", "sings about"]
OBJECTS = [
    "the harbour at dawn",
    "$5,000 of gold",
    "unbelievable stories",
    "e=mc²",
    "two left shoes!",
]
TAILS = [
    "",
    " because winter came early.",
    " — or so they say; " * 3,
    " while the tide, slowly, turns" * 6,
]


def texts() -> list[str]:
    """Two hundred, of 4 to 120 tokens, in an order that mixes them."""
    made = [
        f"{subject} {verb} {thing}{tail}"
        for subject in SUBJECTS for verb in VERBS for thing in OBJECTS for tail in TAILS
    ]  # fmt: skip
    random.Random(5).shuffle(made)
    return made[:200]


@cache
def reference() -> BertReference:
    return BertReference(real_encoder.fetch_original())


@cache
def expected() -> NDArray[np.float64]:
    return np.stack([reference().embed(text) for text in texts()])


@pytest.fixture(scope="module", params=["F32", "F16"])
def embedder(request: pytest.FixtureRequest) -> Iterator[EmbeddingContext]:
    with (
        Model(real_encoder.fetch(request.param)) as model,
        EmbeddingContext(model, n_batch=N_BATCH, n_seq_max=N_SEQ_MAX) as context,
    ):
        yield context


def test_tokens_are_those_of_the_original() -> None:
    with Model(real_encoder.fetch("F16"), vocab_only=True) as model:
        for text in [*texts(), "", "🦙 ﬁ Ⅳ", "  two\tspaces\n"]:
            assert model.vocab.tokenize(text, add_special=True) == reference().tokenize(text)


@pytest.mark.parametrize("company", ["alone", "in order", "shuffled"])
def test_vectors_are_those_of_the_same_weights_in_numpy(
    embedder: EmbeddingContext, company: str
) -> None:
    order = list(range(200))
    if company == "shuffled":
        random.Random(7).shuffle(order)
    batch = Batch(N_BATCH)
    found = np.empty((200, embedder.n_values))
    waiting: list[int] = []

    def compute() -> None:
        found[waiting] = embedder.compute(batch)
        waiting.clear()
        batch.clear()

    for index in order:
        tokens = reference().tokenize(texts()[index])
        if waiting and (
            company == "alone" or len(waiting) == N_SEQ_MAX or batch.n_rows + len(tokens) > N_BATCH
        ):
            compute()
        batch.add(len(waiting), tokens, 0)
        waiting.append(index)
    compute()
    cosines = (found * expected()).sum(axis=1) / np.linalg.norm(found, axis=1)
    assert cosines.min() >= 0.9999
