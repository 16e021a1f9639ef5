"""Results of tools as text, whatever they have."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.engine.chat.readable import MIN_FILE, words_of


def nested(n: int, inner: Any) -> dict[str, Any]:
    data = {"a": inner}
    for _ in range(n):
        data = {"a": [data]}
    return data


@pytest.mark.parametrize("n", [100, 10_000])
def test_data_of_a_tool_may_be_nested_as_deep_as_it_likes(n: int) -> None:
    assert "something nested" in words_of(nested(n, "deep"))


def test_data_is_complete_and_has_no_files_at_any_depth_that_is_written() -> None:
    assert words_of(nested(20, "deep")).count('"deep"') == 1
    text = words_of(nested(20, "A" * (MIN_FILE + 1)))
    assert "[a file]" in text
    assert len(text) < MIN_FILE
