"""Strategies of the API fuzzer: calls of an engine with valid and invalid arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from cllm.sampling_limits import FLOAT_RANGES, INTEGER_RANGES

N_VOCAB = 260

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**400, 0.5, 1e-40,
    1e308, float("nan"), float("inf"), float("-inf"), "", "1", "a\0b", "\ud800", b"", b"a", (), [],
    [None], {}, {"a": 1}, {5: 5}, set(), frozenset({1}), object, 1j, range(3), ["a", 1], [[1]],
    bytearray(b"a"), memoryview(b"ab"), ..., Exception("x"),
)  # fmt: skip
# Only a few constraints, always the same: each new one is compiled in another process first, which is slow.
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"grammar": "root ::= [0-9]+"}, {"grammar": 'root ::= "a"{5,2}'}, {"grammar": "root ::="},
    {"grammar": "root ::= ("}, {"grammar": "root ::= <[999]>"}, {"regex": "[a-z]{1,3}"},
    {"regex": "(("}, {"regex": ""}, {"json_schema": {"type": "integer"}}, {"json_schema": "{"},
    {"json_schema": {"type": "nope"}}, {"json_schema": []}, {"regex": "a", "grammar": "a"},
)  # fmt: skip

ODD = st.one_of(
    st.sampled_from(ODD_VALUES), st.integers(), st.floats(), st.text(max_size=4),
    st.lists(st.integers(-2, 300), max_size=3),
)  # fmt: skip


@st.composite
def usually(draw: st.DrawFn, good: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> Any:
    """Draw from `good` two times in three, otherwise from `odd`."""
    return draw(odd if draw(st.integers(0, 2)) == 2 else good)


# Texts of any characters, with lone surrogates, which `st.text()` leaves out; or empty.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
TEXT = st.one_of(
    st.sampled_from(("1+1=", "repeat:ab", "count:1..3", "reverse:abc", "<|im_end|>", "a\0b")),
    st.text(max_size=12),
)
IDS = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=12)
ODD_IDS = st.lists(st.integers(-2, 300), max_size=6) | st.lists(ODD, min_size=1, max_size=3)
LONG = st.sampled_from(("a" * 2000, [97] * 600, [97] * 500, "a" * 500, "\n" * 300))
PROMPTS = usually(TEXT | IDS, st.one_of(ANY_TEXT, ODD_IDS, ODD, LONG))

LEGAL: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.integers(low, min(high, 100)) for name, (low, high) in INTEGER_RANGES.items()},
    **{name: st.floats(low, high) for name, (low, high) in FLOAT_RANGES.items()},
    "max_tokens": st.integers(1, 3),
    "logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 5),
    "temperature": st.just(0.0) | st.floats(0.001, 100.0),
    "logit_bias": st.dictionaries(st.integers(0, N_VOCAB - 1), st.floats(-1e4, 1e4), max_size=3),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, N_VOCAB - 1), max_size=3),
    "ignore_eos": st.booleans(),
    "samplers": st.lists(st.sampled_from(("top_k", "top_p", "min_p", "xtc", "dry")), unique=True),
    "dry_sequence_breakers": st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=2),
}
# Odd values of `max_tokens`, without valid ones that would make an output of hundreds of tokens.
ODD_COUNTS = ODD.filter(lambda value: value is not None and not (type(value) is int and value > 3))
NAMES = st.sampled_from((*LEGAL, *LEGAL, "grammar", "json_schema", "no_such_field"))
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.integers(-5, 5) | ODD,
    "timeout": st.sampled_from((0.0, 5.0, 60.0, None)) | ODD,
    "request_id": st.text(min_size=1, max_size=5) | ODD,
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
ROLES = st.sampled_from(("user", "user", "assistant", "system", "tool", "root", 5))
CONTENTS = usually(TEXT, st.one_of(ANY_TEXT, JSON, ODD))
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}) | JSON, min_size=1, max_size=2
)
GOOD_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}), min_size=1, max_size=2
)
CHATS = usually(GOOD_MESSAGES, MESSAGES | ODD)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes
    ----------
    n_deltas : int or None
        Number of deltas after which a stream is closed; None: it is read to the end.
    number : int
        Random number that makes calls without arguments distinct: hypothesis draws no value twice.
    """

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    n_deltas: int | None = None
    number: int = 0


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the options of a request."""
    drawn: dict[str, Any] = {"max_tokens": draw(st.integers(1, 3))}
    for name in draw(st.lists(NAMES, max_size=3)):
        odd = ODD_COUNTS if name == "max_tokens" else ODD
        drawn[name] = draw(usually(LEGAL[name], odd) if name in LEGAL else odd)
    if draw(st.integers(0, 9)) == 9:
        name = draw(st.sampled_from(tuple(OPTIONS)))
        drawn[name] = draw(OPTIONS[name])
    if draw(st.integers(0, 49)) == 49:
        drawn.update(draw(st.sampled_from(CONSTRAINTS)))
    return drawn


def n_deltas_of(method: str) -> st.SearchStrategy[int | None]:
    """Return a strategy for `Call.n_deltas`; None for methods that are not streams."""
    return st.none() | st.integers(0, 2) if method.startswith("stream") else st.none()


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call of any method, most often one that makes requests."""
    method = draw(
        st.sampled_from(
            ("generate", "generate", "stream", "stream", "generate_all", "chat", "stream_chat",
             "score", "tokenize", "detokenize", "pieces", "none of these")
        )
    )  # fmt: skip
    if method in ("generate", "stream"):
        return Call(method, (draw(PROMPTS),), draw(sampling()), draw(n_deltas_of(method)))
    if method == "generate_all":
        options = {**draw(sampling()), "return_exceptions": draw(st.booleans())}
        options.pop("request_id", None)
        return Call(method, (draw(usually(st.lists(PROMPTS, max_size=3), ODD)),), options)
    if method in ("chat", "stream_chat"):
        options = draw(sampling())
        if draw(st.integers(0, 4)) == 4:
            name = ("tools", "chat_template_kwargs", "add_generation_prompt")[
                draw(st.integers(0, 2))
            ]
            options[name] = draw(JSON | ODD)
        return Call(method, (draw(CHATS),), options, draw(n_deltas_of(method)))
    if method == "score":
        return Call(method, (draw(PROMPTS), draw(PROMPTS)), {})
    if method == "tokenize":
        flags = draw(st.fixed_dictionaries({}, optional={"add_special": st.booleans(),
                                                         "parse_special": st.booleans()}))  # fmt: skip
        return Call(method, (draw(usually(TEXT, st.one_of(ANY_TEXT, LONG, ODD))),), flags)
    if method in ("detokenize", "pieces"):
        return Call(method, (draw(usually(IDS, ODD_IDS | ODD)),), {})
    method = draw(st.sampled_from(("slots", "reset_prefix_cache")))
    return Call(method, (), {}, number=draw(st.integers(0, 2**32)))
