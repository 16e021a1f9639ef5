"""A prompt goes where the longest beginning of it is, unless that one has far more to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm import InvalidArgumentError
from cllm.routing.prefix_table import (
    BLOCK,
    N_BLOCKS_MAX,
    PrefixTable,
    keys_of,
    prompt_bytes,
    raw_prompt,
)

NAMES = ("a", "b", "c")
IDLE = dict.fromkeys(NAMES, 0)
PROMPTS = st.lists(st.integers(0, 2), max_size=4)


def prompt_of(parts: list[int]) -> bytes:
    return b"".join(bytes([part]) * BLOCK for part in parts)


def n_alike(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(NAMES)), max_size=12), PROMPTS)
def test_it_goes_where_the_longest_beginning_went_last(
    sent: list[tuple[list[int], str]], wanted: list[int]
) -> None:
    table = PrefixTable()
    for parts, name in sent:
        table.record(keys_of(prompt_of(parts)), name)
    lengths = [n_alike(parts, wanted) for parts, _ in sent]
    if (longest := max(lengths, default=0)) > 0:
        latest = max(i for i, n in enumerate(lengths) if n == longest)
        assert table.choose(keys_of(prompt_of(wanted)), IDLE) == sent[latest][1]
    else:
        assert table.choose(keys_of(prompt_of(wanted)), IDLE) in NAMES


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(NAMES)), max_size=30), st.integers(1, 5))
def test_it_is_bounded_and_never_names_one_that_cannot_be_chosen(
    sent: list[tuple[list[int], str]], n_keys_max: int
) -> None:
    table = PrefixTable(n_keys_max=n_keys_max)
    for parts, name in sent:
        table.record(keys_of(prompt_of(parts)), name)
        assert len(table) <= n_keys_max
        others = {other: 0 for other in NAMES if other != name}
        assert table.choose(keys_of(prompt_of(parts)), others) != name


@given(
    st.lists(PROMPTS, max_size=20),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 40), min_size=1),
)
def test_nobody_leads_by_more_than_max_lead_for_a_beginnings_sake(
    prompts: list[list[int]], load: dict[str, int]
) -> None:
    table = PrefixTable(max_lead=3)
    for parts in prompts:
        name = table.choose(keys_of(prompt_of(parts)), load)
        assert load[name] - min(load.values()) <= 3
        load[name] += 1


def test_prompts_that_begin_with_nothing_known_go_to_all_in_turn() -> None:
    table = PrefixTable()
    chosen = [table.choose(keys_of(bytes([i]) * BLOCK), IDLE) for i in range(30)]
    assert {name: chosen.count(name) for name in NAMES} == dict.fromkeys(NAMES, 10)


def test_who_is_gone_is_forgotten() -> None:
    table = PrefixTable()
    keys = keys_of(b"x" * BLOCK)
    table.record(keys, "a")
    table.forget("a")
    assert len(table) == 0
    assert table.choose(keys, {"b": 0}) == "b"


def test_a_prompt_of_any_length_has_few_keys() -> None:
    assert len(keys_of(bytes(BLOCK * N_BLOCKS_MAX * 3))) == N_BLOCKS_MAX
    assert len(keys_of(b"short")) == 1
    assert keys_of(b"") == []
    long = keys_of(b"y" * (2 * BLOCK + 10))
    assert long == keys_of(b"y" * (2 * BLOCK + 20))
    assert len(long) == 2


@pytest.mark.parametrize(
    ("body", "begins_like"),
    [
        ({"prompt": "Hello there"}, {"prompt": "Hello"}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2]}),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
         {"messages": [{"role": "user", "content": "a"}]}),
        ({"input": "Hello there", "instructions": "Be brief."}, {"input": "Hello", "instructions": "Be brief."}),
        ({"prompt": "a", "temperature": 1}, {"prompt": "a", "temperature": 0}),
    ],
)  # fmt: skip
def test_prompts_that_begin_alike_have_bytes_that_begin_alike(
    body: dict[str, Any], begins_like: dict[str, Any]
) -> None:
    assert prompt_bytes(body).startswith(prompt_bytes(begins_like))
    assert prompt_bytes(begins_like) != b""


def test_other_tools_are_another_beginning() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with_tools = chat | {"tools": [{"type": "function"}]}
    assert not prompt_bytes(with_tools).startswith(prompt_bytes(chat)[:10])


@pytest.mark.parametrize("options", [{"n_keys_max": 0}, {"max_lead": -1}])
def test_what_cannot_be_is_refused_by_name(options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        PrefixTable(**options)


TURNS = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 300}]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": TURNS[:1]}, {"messages": TURNS}),
        ({"model": "a", "messages": TURNS[:1], "seed": 1}, {"seed": 22, "messages": TURNS}),
        ({"prompt": "z" * 300}, {"stream": True, "prompt": "z" * 300 + "w"}),
        ({"prompt": [7] * 300}, {"model": "b", "prompt": [7] * 300 + [8]}),
        ({"input": "the input"  * 40}, {"input": "the input" * 40 + "and more"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_body_that_is_not_read_shows_its_beginning_whole_or_cut_off(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    whole, other = (raw_prompt(json.dumps(body).encode()) for body in (first, second))
    known = keys_of(whole)
    assert known[0] == keys_of(other)[0]
    for n in (BLOCK, len(other) - 1):
        assert keys_of(raw_prompt(json.dumps(second).encode()[: n + 40]))[0] == known[0]


@pytest.mark.parametrize("body", [b"", b"{}", b"not json", b'{"seed": 1}'])
def test_a_body_without_a_prompt_shows_nothing(body: bytes) -> None:
    assert raw_prompt(body) == b""


def shown(data: str, text: str, kind: str) -> dict[str, Any]:
    """A chat about an image, in the form of OpenAI or of Anthropic."""
    part: dict[str, Any] = {"type": "image", "source": {"type": "base64", "data": data}}
    if kind == "openai":
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}]}


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_prompts_about_one_large_image_share_its_key_and_not_what_differs_behind_it(
    kind: str,
) -> None:
    large = "A" * (BLOCK * N_BLOCKS_MAX * 2)
    first, again, longer, other = (
        keys_of(prompt_bytes(shown(data, text, kind)))
        for data, text in (
            (large, "x" * 900),
            (large, "x" * 900),
            (large, "x" * 300 + "y" * 600),
            (large + "B", "x" * 900),
        )
    )
    assert first == again
    assert first[0] == longer[0]
    assert first[-1] != longer[-1]
    assert first[0] != other[0]
    assert len(first) < 8
