"""What is wrong in a body is described once, however often it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cllm.server.bodies.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerateBody
from cllm.server.http.problems import Problem

MANY = 2000  # more than any of these may have, and each one wrong
N_OF_A_UNION = 2  # each of its members says why it does not match


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateBody, {"prompt": ["x"] * MANY}),
        (GenerateBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
        (GenerateBody, {"prompt": "a", "stop": [1] * MANY}),
        (GenerateBody, {"prompt": "a", "dry_sequence_breakers": [1] * MANY}),
        (GenerateBody, {"prompt": "a", **{f"k{n}": 1 for n in range(MANY)}}),
        (CompletionBody, {"prompt": [[None]] * MANY}),
        (ChatBody, {"messages": [1] * MANY}),
        (DetokenizeBody, {"tokens": ["x"] * MANY}),
    ],
    ids=[
        "tokens", "biases", "stops", "breakers", "unknown fields", "prompts", "messages",
        "ids to detokenize",
    ],
)  # fmt: skip
def test_the_first_thing_that_is_wrong_is_enough(model: Any, body: dict[str, Any]) -> None:
    """Each description costs the event loop time, and a body has room for a million of them."""
    with pytest.raises((Problem, ValidationError)) as caught:
        model.model_validate(body)
    if isinstance(caught.value, ValidationError):
        assert caught.value.error_count() <= N_OF_A_UNION
