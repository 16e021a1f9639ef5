"""Questions whose answers are known, and an engine that is small enough for lavapipe, Mesa's software Vulkan driver."""

from __future__ import annotations

from typing import Any

from cllm import Engine
from tests.conftest import QUIET

# Small batches: lavapipe takes 20 ms for each row.
SMALL: dict[str, Any] = {"n_batch": 64, "n_ubatch": 64, "n_threads": 1, **QUIET}
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, **SMALL}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
ANSWERS = {
    "37+58=": "95",
    "count:1..12": " ".join(map(str, range(1, 13))),
    "repeat:你好 🙂": "你好 🙂",
    "reverse:streams": "smaerts",
    "count:98..104": " ".join(map(str, range(98, 105))),
    "9+9=": "18",
}
N_LAYERS = 5  # of the embedded model, with its output


async def check_answers(engine: Engine) -> None:
    """All answers at once are right, and nothing is left of them."""
    completions = await engine.generate_all([*ANSWERS], **GREEDY)
    assert [c.text for c in completions] == [*ANSWERS.values()]
    assert await engine.audit() == []
    assert engine.statistics().n_kv_cells_used == 0
