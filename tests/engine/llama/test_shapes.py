"""A model that llama.cpp computes wrongly is found out: its answers depend on the shape of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import EngineConfig
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.llama import shapes
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.llama.shapes import SHAPES, are_alike
from tests.conftest import some_in_fast
from tools import make_model

CONFIG = EngineConfig(model=EMBEDDED_MODEL, n_gpu_layers=0, n_threads=1)


def row(**logits: float) -> NDArray[np.float32]:
    """Logits of 50 tokens, those named as `t3` with these."""
    values = np.zeros(50, np.float32)
    for name, logit in logits.items():
        values[int(name[1:])] = logit
    return values


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (row(t1=5.0), row(t1=5.0), True),
        (row(t1=5.0, t2=4.0), row(t1=5.1, t2=4.1), True),
        (row(t1=5.0, t2=4.0), row(t1=4.0, t2=5.0), False),
        (row(t1=5.0, t2=4.95), row(t1=4.95, t2=5.0), True),
        (row(t1=5.0, t2=4.8), row(t1=4.8, t2=5.0), False),
        (row(t1=9.0, t2=5.0), row(t1=9.0, t2=4.0), False),
        (row(t1=np.nan), row(t1=1.0), False),
        (np.full(50, np.nan, np.float32), np.full(50, np.nan, np.float32), True),
    ],
)
def test_rows_are_alike_where_rounding_may_explain_it(
    one: NDArray[np.float32], other: NDArray[np.float32], expected: bool
) -> None:
    assert are_alike(one, other) is expected


@pytest.mark.parametrize(
    "name", some_in_fast(["tiny-llama", "tiny-swa", "tiny-hybrid", "tiny-recurrent"])
)
def test_a_model_that_is_computed_rightly_passes(name: str) -> None:
    assert shapes.misfit(EngineConfig(model=make_model.ensure(name, "F16"))) is None


class WrongRows(LlamaDecoder):
    """Gives the rows of a batch in another order, as where output ids are forgotten."""

    def decode(self) -> NDArray[np.float32]:
        return super().decode()[::-1]


class WrongRowsOfShares(LlamaDecoder):
    """The same in one layout."""

    def decode(self) -> NDArray[np.float32]:
        rows = super().decode()
        return rows if self.context.kv_unified else rows[::-1]


def test_one_whose_rows_are_mixed_up_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "LlamaDecoder", WrongRows)
    reason = shapes.misfit(CONFIG)
    assert reason is not None
    assert "than at once" in reason
    assert any(shape in reason for shape in SHAPES)
    assert "works" not in reason


def test_where_one_layout_is_right_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "LlamaDecoder", WrongRowsOfShares)
    reason = shapes.misfit(CONFIG)
    assert reason is not None
    assert "kv_unified=True works" in reason
