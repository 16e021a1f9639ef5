"""Cases of hazard tables 1.1 and 1.2 for embeddings: sizes of batches, poolings, models without pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf

from cllm.bindings import Batch, EmbeddingContext, Model
from cllm.errors import ContextError, PositionError
from tests.bindings.hazard_case import Scene, Topic
from tools import make_model

TOPIC = Topic()
refuse = TOPIC.refuse


def embedder(scene: Scene, name: str = "tiny-encoder", **parameters: Any) -> EmbeddingContext:
    scene.context  # noqa: B018
    small: dict[str, Any] = {"pooling": "mean", "n_batch": 64, "n_seq_max": 4, "n_threads": 1}
    return EmbeddingContext(Model(make_model.ensure(name, "F16")), **{**small, **parameters})


def embed(
    scene: Scene, runs: Sequence[tuple[int, Sequence[int], int]] = (), **parameters: Any
) -> object:
    batch = Batch(4096)
    for run in runs:
        batch.add(*run)
    return embedder(scene, **parameters).compute(batch)


def of_pooling_type(scene: Scene, number: int) -> EmbeddingContext:
    """Return a context of a model whose file has this number as its pooling type."""
    path = scene.directory / "pooling.gguf"
    original = gguf.GGUFReader(make_model.ensure("tiny-classifier", "F16"))
    field = original.fields["bert.pooling_type"]
    content = bytearray(make_model.ensure("tiny-classifier", "F16").read_bytes())
    at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    content[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)
    return EmbeddingContext(Model(path), n_threads=1)


for name in ("tiny-encoder", "tiny-t5-encoder", "tiny-llama"):
    refuse(
        f"more tokens of texts than one piece has, {name}", embed, "rows is 65, must be 1 to 64",
        runs=[(0, [5] * 40, 0), (1, [5] * 25, 0)], name=name,
    )  # fmt: skip
refuse(
    "a text longer than a model has positions", embed, "tokens is 2049, must be 1 to 2048",
    runs=[(0, [5] * 2049, 0)], n_batch=4096,
)  # fmt: skip
refuse("an embedding batch of no rows", embed, "rows is 0, must be 1 to 64")
refuse("a fifth text of four", embed, "seq_id is 4, must be 0 to 3", runs=[(4, [5], 0)])
refuse("token 260 of a text", embed, "token is 260, must be 0 to 259", runs=[(0, [260], 0)])
refuse("a text that begins at 3", embed, "3", runs=[(0, [5], 3)], error=PositionError)
refuse("two runs of one text", embed, "1", runs=[(0, [5], 0), (0, [6], 1)], error=PositionError)
for n in (0, -1, 257, 2**32, 4.0):
    refuse(
        f"n_seq_max={n!r} of texts",
        embedder,
        f"n_seq_max is {n!r}, must be",
        n_seq_max=n,
        n_batch=512,
    )
for n in (0, -1, 2**31, 2**32):
    refuse(f"n_batch={n} of texts", embedder, f"n_batch is {n}, must be 1 to", n_batch=n)
for wrong in (99, -1, "none", "unspecified", "MEAN", ""):
    refuse(f"pooling={wrong!r}", embedder, f"pooling is {wrong!r}, must be one of", pooling=wrong)
refuse("no pooling at all", embedder, "pooling is None, must be mean, cls or last", pooling=None)
refuse("rank without a classifier", embedder, "has no classifier", pooling="rank")
refuse(
    "pooling_type 99 in a file", of_pooling_type, "pooling_type 99", error=ContextError, number=99,
)  # fmt: skip
refuse(
    "vectors of a model without weights",
    lambda s: EmbeddingContext(Model(s.path, vocab_only=True), pooling="mean"),
    "no weights", error=ContextError,
)  # fmt: skip

CASES = TOPIC.cases
