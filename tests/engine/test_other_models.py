"""Architectures other than the embedded one: the books agree, and what cannot work says so."""

from __future__ import annotations

import pytest

from cllm import Engine
from cllm.errors import CllmError, ContextError
from tests.conftest import QUIET
from tools import make_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What a model can do does not depend on the event loop."""
    return "asyncio"


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-qwen3", "tiny-swa", "tiny-recurrent", "tiny-hybrid"]
)
async def test_every_architecture_generates_in_company_and_leaves_nothing(
    name: str, file_type: make_model.FileType
) -> None:
    path = make_model.ensure(name, file_type)
    async with Engine(path, n_ctx=1024, n_seq_max=4, n_batch=64, **QUIET) as engine:
        prompts = [f"{'some text ' * n} {n}" for n in range(8)]
        results = await engine.generate_all(prompts, max_tokens=12, seed=3)
        assert all(1 <= r.usage.n_output <= 12 for r in results)
        async with engine.stream("to be cancelled", max_tokens=500, temperature=0) as stream:
            await stream.__anext__()
        assert await engine.audit() == []
        while engine.statistics().n_running:
            await engine.audit()
        assert engine.statistics().n_kv_cells_used == 0


@pytest.mark.parametrize("name", ["tiny-encoder", "tiny-t5-encoder"])
async def test_an_encoder_is_refused_with_a_clear_error(name: str) -> None:
    with pytest.raises(ContextError, match="cannot generate text"):
        async with Engine(make_model.ensure(name, "F16"), n_ctx=256, **QUIET):
            raise AssertionError("it loaded")
    assert issubclass(ContextError, CllmError)
