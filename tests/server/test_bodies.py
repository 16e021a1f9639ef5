"""What is wrong in a body is described once, however often it is wrong."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from cllm.server.bodies.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, GenerateBody
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


def bodies_below(body: type[Body]) -> set[type[Body]]:
    below = set(body.__subclasses__())
    return below.union(*map(bodies_below, below))


import_module("cllm.server.app")  # defines the bodies of all routes
BODIES = sorted(bodies_below(Body), key=lambda body: body.__name__)
KEYS = [str(n) for n in range(MANY)]
ITEMS: list[Any] = [1, "x", None, True, [1], {}]
WRONG: list[Any] = [
    *([item] * MANY for item in ITEMS),
    [{}, *[1] * MANY],
    *(dict.fromkeys(KEYS, item) for item in ITEMS),
    *([dict.fromkeys(KEYS, item)] for item in ITEMS),
    *({"a": dict.fromkeys(KEYS, item)} for item in ITEMS),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_field_describes_each_of_its_wrong_items(body: type[Body]) -> None:
    """A value of a mapping of a union has an error for its key, and one for each of its types."""
    for name, value in product(body.model_fields, WRONG):
        try:
            body.model_validate({name: value})
        except Problem:
            pass
        except ValidationError as error:
            wrong = [each for each in error.errors(include_url=False) if each["loc"][0] == name]
            assert len(wrong) <= N_OF_A_UNION + 1, name
