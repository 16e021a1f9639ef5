"""Types for the hazard cases of the bindings: `Case`, `Topic`, and `Scene`, the objects that a case uses.

Each case is one call that would make libllama abort, hang or return wrong results.  The cases are in
`hazards_*.py`, by topic; `hazard_server` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cllm.bindings import (
    Batch,
    Candidates,
    Context,
    Logits,
    Model,
    SamplerChain,
    Vocabulary,
)
from cllm.errors import InvalidArgumentError

NAN, INF = float("nan"), float("inf")
INT_MAX = 2**31 - 1
N_VOCAB = 260
TIME_LIMIT_S = 20
SMALL: dict[str, Any] = {
    "n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 4, "n_threads": 1,
    "n_threads_batch": 1,
}  # fmt: skip


class Scene:
    """Model, context, batch and other objects of a case, each made at its first use."""

    def __init__(self, path: Path, directory: Path) -> None:
        self.path = path
        self.directory = directory

    @cached_property
    def model(self) -> Model:
        return Model(self.path)

    @cached_property
    def vocab(self) -> Vocabulary:
        return self.model.vocab

    @cached_property
    def context(self) -> Context:
        return self.new_context()

    @cached_property
    def split(self) -> Context:
        """A context in the per-sequence layout."""
        return self.new_context(kv_unified=False, n_ctx=1024)

    @cached_property
    def batch(self) -> Batch:
        return Batch(128)

    @cached_property
    def chain(self) -> SamplerChain:
        return SamplerChain(self.vocab)

    def new_context(self, **parameters: Any) -> Context:
        return Context(self.model, **{**SMALL, **parameters})

    def decode(
        self, n_tokens: int = 4, *, seq_id: int = 0, p0: int = 0, context: Context | None = None
    ) -> Logits:
        """Decode one batch of one sequence, and return the logits of its last row."""
        self.batch.clear()
        self.batch.add(seq_id, range(97, 97 + n_tokens), p0, n_outputs=1)
        return (context or self.context).decode(self.batch)

    def decoded(self, n_tokens: int = 4) -> Context:
        """Decode tokens in sequence 0, and return the context."""
        self.decode(n_tokens)
        return self.context

    def split_decoded(self) -> Context:
        self.decode(context=self.split)
        return self.split

    def file(self, name: str, content: bytes) -> Path:
        path = self.directory / name
        path.write_bytes(content)
        return path

    def lora(self) -> Path:
        """Write a LoRA adapter for the query matrix of the tiny model's second layer."""
        path = self.directory / "lora.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 4.0)
        for name, shape in (("lora_a", (4, 64)), ("lora_b", (128, 4))):
            data = np.full(shape, 0.1, np.float32)
            writer.add_tensor(f"blk.1.attn_q.weight.{name}", data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def check_alive(self) -> None:
        """Check that every open context still decodes a valid batch to finite logits."""
        for name in ("context", "split"):
            context = self.__dict__.get(name)
            if context is not None and not context.closed:
                context.set_abort(False)
                context.memory_clear()
                assert np.isfinite(self.decode(context=context).rows).all(), "logits not finite"


@dataclass(frozen=True)
class Case:
    """`act(scene)` must raise `error` and say all of `says`."""

    claim: str
    act: Callable[[Scene], object]
    says: tuple[str, ...]
    error: type[Exception] = InvalidArgumentError


@dataclass
class Topic:
    """Cases of one kind."""

    cases: list[Case] = field(default_factory=list)

    def refuse(
        self,
        claim: str,
        act: Callable[..., object],
        *says: str,
        error: type[Exception] = InvalidArgumentError,
        **bound: Any,
    ) -> None:
        """Add a case; `bound` are further arguments of `act`."""

        def bound_act(scene: Scene) -> object:
            return act(scene, **bound)

        self.cases.append(Case(claim, bound_act, says, error))


def candidates(*logits: float, ids: list[int] | None = None) -> Candidates:
    """Return candidates with these logits; their tokens are `ids`, by default 0, 1, ..."""
    all_ids = np.array(range(len(logits)) if ids is None else ids, np.int32)
    return Candidates(all_ids, np.array(logits, np.float32))
