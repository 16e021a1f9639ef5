"""Search with a real model: what all-MiniLM-L6-v2 finds, found by the engine, beside the numpy referee."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import Embedder, Engine
from tests.conftest import QUIET
from tests.real.bert_reference import BertReference
from tests.real.test_minilm import expected, texts
from tools import real_encoder, real_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.anyio,
    pytest.mark.skipif(
        not real_encoder.ORIGINAL.is_dir(), reason="not in the cache: make test-real fetches it"
    ),
]
PAGE = Path(__file__).parents[2] / "docs" / "retrieval.md"
# Each question with the sentence that answers it; all were written for this test.
ANSWERS = {
    "When does the library close on Fridays?":
        "On Fridays the library closes at two in the afternoon.",
    "How long is the boat trip to the island?":
        "The ferry to the island takes forty minutes and carries bicycles.",
    "Which mushroom smells of fruit?": "Chanterelles are yellow and smell of apricots.",
    "How is a violin tuned?": "The four strings of a violin are a fifth apart from each other.",
    "What should I do against a headache?":
        "Drink water and lie down in a dark room until the pain is gone.",
    "Who repaired the church tower?":
        "The mason Anna Berg mended the steeple after the storm of 1911.",
    "What do bees do in winter?":
        "In the cold months the hive clusters around its queen and shivers to keep warm.",
    "Can I return shoes that I have worn?":
        "Footwear may be brought back within thirty days if it was not used outdoors.",
    "Why is the sky red in the evening?":
        "At sunset the light passes through more air, which scatters its blue away.",
    "How do I make bread rise?": "Yeast eats the sugar of the dough and fills it with bubbles.",
    "What is the fastest way to the airport?":
        "The express train reaches the terminal in eighteen minutes.",
    "Where was the painter born?":
        "She came into the world in a fishing village near Bergen, the daughter of a painter.",
}  # fmt: skip
NOTES = [
    *ANSWERS.values(),
    "From Monday to Thursday the library is open until eight.",
    "The lake freezes in January and people skate on it.",
    "A cello is larger than a viola and is played sitting.",
    "The museum shows paintings of harbours.",
    "Honey keeps for years in a closed jar.",
    "A taxi from the station costs twelve euros.",
    "The bakery opens at six on Saturdays.",
    "New boots should be worn at home first.",
]


@cache
def referee() -> BertReference:
    return BertReference(real_encoder.fetch_original())


@pytest.fixture(params=["F32", "F16"])
async def embedder(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Embedder]:
    async with Embedder(real_encoder.fetch(request.param), **QUIET) as embedder:
        yield embedder


def cosines(found: NDArray[np.float32], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = (found * wanted).sum(axis=1)
    return result


async def test_vectors_are_the_referees_in_every_company(embedder: Embedder) -> None:
    together = await embedder.embed(texts())
    assert cosines(together, expected()).min() >= 0.9999
    order = list(range(200))
    random.Random(11).shuffle(order)
    found = np.empty_like(together)

    async def ask(indices: list[int]) -> None:
        found[indices] = await embedder.embed([texts()[i] for i in indices])

    async with anyio.create_task_group() as tasks:
        for start, n in ((0, 1), (1, 2), (3, 7), (10, 40), (50, 1), (51, 149)):
            tasks.start_soon(ask, order[start : start + n])
    assert cosines(found, expected()).min() >= 0.9999
    for i in order[:20]:
        found[i] = (await embedder.embed([texts()[i]]))[0]
    assert cosines(found, expected()).min() >= 0.9999


async def test_a_text_that_is_cut_ends_as_every_text_does(embedder: Embedder) -> None:
    tokens = await embedder.tokenize("word " * 600)
    assert len(tokens) == 602
    found = await embedder.embeddings(["word " * 600], truncate=True)
    assert found.n_tokens == (512,)
    again = await embedder.embed([[*tokens[:511], tokens[-1]]])
    assert cosines(found.vectors, again.astype(np.float64))[0] > 0.9999


async def test_questions_find_their_answers_in_the_order_of_the_referee(embedder: Embedder) -> None:
    questions = list(ANSWERS)
    found = (await embedder.embed(questions)) @ (await embedder.embed(NOTES)).T
    wanted = np.stack([referee().embed(q) for q in questions]) @ (
        np.stack([referee().embed(note) for note in NOTES]).T
    )
    np.testing.assert_array_equal(found.argsort(axis=1)[:, -5:], wanted.argsort(axis=1)[:, -5:])
    assert [NOTES[i] for i in found.argmax(axis=1)] == list(ANSWERS.values())


async def test_the_program_of_the_page_searches_and_answers(anyio_backend: str) -> None:
    """Question → call of a tool → search → an answer by a schema, with two real models."""
    source = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    program: dict[str, Any] = {}
    exec(source.removesuffix("anyio.run(main)\n"), program)
    question = "When does the library close on Fridays?"
    options = {**QUIET, "n_ctx": 2048, "n_seq_max": 2}
    encoder = real_encoder.fetch("F16")
    async with Engine(real_model.MODEL, embedding_model=encoder, **options) as engine:
        told = await program["answer"](question, engine)
        notes = await engine.embed(program["NOTES"])
        (asked,) = await engine.embed([question])
    assert "Fridays" in program["NOTES"][int((notes @ asked).argmax())]
    assert isinstance(told, str)
    assert told
