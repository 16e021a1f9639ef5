"""Values are short in a REPL, and a Completion is Markdown in Jupyter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cllm import Completion, Engine, Timings, ToolCall, Usage
from cllm.engine.output import N_SHOWN, FinishReason
from tests.conftest import QUIET

DONE = Completion(
    request_id="r",
    text="4 is **even**",
    token_ids=(1, 2, 3),
    prompt_token_ids=(5, 6),
    finish_reason=FinishReason.STOP,
    stop_reason=None,
    usage=Usage(n_prompt=2, n_cached=0, n_output=3),
    timings=Timings(0.0, 0.0, 0.0, 0.0, 0.0, None, None, 0),
)
CALL = replace(DONE, text="", tool_calls=(ToolCall("c", "add", '{"a": 1}'),))


def test_a_completion_is_its_text_its_end_and_its_tokens() -> None:
    assert repr(DONE) == "Completion('4 is **even**', 'stop', 2 + 3 tokens)"
    assert repr(CALL) == """Completion('', add({"a": 1}), 'stop', 2 + 3 tokens)"""


def test_a_long_text_is_cut_in_a_repr_only() -> None:
    long = replace(DONE, text="a" * 10_000)
    assert len(repr(long)) < N_SHOWN + 100
    assert long._repr_markdown_() == long.text
    calls = replace(DONE, tool_calls=(ToolCall("c", "add", "1" * 10_000),))
    assert len(repr(calls)) < N_SHOWN + 100


def test_a_completion_is_markdown_in_jupyter() -> None:
    assert DONE._repr_markdown_() == DONE.text
    assert CALL._repr_markdown_() == """```\nadd({"a": 1})\n```"""
    assert replace(DONE, text="")._repr_markdown_() is None  # Jupyter shows the repr


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_model_is_its_name_architecture_and_size() -> None:
    async with Engine(n_ctx=256, n_seq_max=1, **QUIET) as engine:
        shown = repr(engine.model)
    assert shown.startswith("ModelInfo('cllm-tiny', ")
    assert shown.endswith(" parameters, 1 MiB, n_ctx=256)")
    assert len(shown) < 120
