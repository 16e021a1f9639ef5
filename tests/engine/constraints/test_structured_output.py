"""Constrained outputs keep to their constraint, at no cost to anybody else."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import anyio
import jsonschema
import pytest

from cllm import Engine, FinishReason, GenerationError, InvalidRequestError
from cllm.engine.constraints.llguidance import Guidance
from cllm.engine.constraints.trial import ConstraintTrial
from tests.conftest import QUIET, on_either_loop

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

N_SCHEMAS = {"asyncio": 200, "trio": 40}
# A random-weight model closes what it opened sooner this way; the vocabulary has a token a byte.
CLOSING = {ord(character): 5.0 for character in '"]}'}


@pytest.fixture
async def random_engine(anyio_backend: str, tiny_model_path: Path) -> AsyncIterator[Engine]:
    """A model that says anything, and never twice the same."""
    async with Engine(tiny_model_path, n_ctx=16384, n_seq_max=16, **QUIET) as engine:
        yield engine


def schema_of(number: int) -> dict[str, Any]:
    """One of many schemas: nesting, enums, bounds, arrays, unions, references."""
    choose = random.Random(number)
    defs: dict[str, Any] = {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 99},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
    }
    return {**_part(choose, 3), "$defs": defs}


def _part(choose: random.Random, depth: int) -> dict[str, Any]:
    low = choose.randint(-1000, 1000)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + choose.choice([0, 7, 5000])},
        {"type": "number", "exclusiveMinimum": low / 8, "maximum": low / 8 + 10},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": choose.sample(["red", "grün", "🙂", 1, 2.5, None, True, ["a"], {"b": 1}], 3)},
        {"const": choose.choice(["only", 42, None])},
        {"type": "string", "maxLength": choose.randint(0, 12)},
        {"type": "string", "pattern": choose.choice(["^[a-f0-9]{4}$", "^(yes|no)!*$", "^[A-Z][a-z]+$"])},
        {"type": "string", "format": choose.choice(["date", "time", "uuid", "ipv4"])},
        {"type": ["string", "null"], "maxLength": 4},
        {"type": "integer", "multipleOf": choose.choice([2, 5, 7])},
        {"$ref": "#/$defs/name"},
        {"$ref": "#/$defs/tree"},
    ]  # fmt: skip
    if depth == 0 or choose.random() < 0.15:
        return choose.choice(leaves)
    kind = choose.choice(["object", "array", "anyOf", "tuple"])
    if kind == "anyOf":
        return {"anyOf": [_part(choose, depth - 1) for _ in range(choose.randint(2, 3))]}
    if kind == "tuple":
        parts = [_part(choose, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == "array":
        n_least = choose.randint(0, 2)
        return {
            "type": "array",
            "items": _part(choose, depth - 1),
            "minItems": n_least,
            "maxItems": n_least + choose.randint(0, 2),
        }
    names = choose.sample(["a", "b", "long name", "ключ", 'quo"te'], choose.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _part(choose, depth - 1) for name in names},
        "required": names[: choose.randint(0, len(names))],
        "additionalProperties": choose.choice([False, False, {"type": "integer"}]),
    }


@pytest.mark.full
async def test_every_completed_output_validates_against_its_schema(
    random_engine: Engine, anyio_backend: str
) -> None:
    schemas = [schema_of(number) for number in range(N_SCHEMAS[anyio_backend])]
    outputs: dict[int, str] = {}

    async def run(number: int, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            completion = await random_engine.generate(
                "anything",
                json_schema=schemas[number],
                max_tokens=600,
                seed=number,
                temperature=choice(number, [0.0, 0.7, 1.5]),
                top_k=choice(number // 3, [0, 1, 40]),
                repeat_penalty=choice(number // 9, [1.0, 1.2]),
                logit_bias=CLOSING,
            )
        if completion.finish_reason is FinishReason.STOP:
            outputs[number] = completion.text

    limiter = anyio.CapacityLimiter(32)
    async with anyio.create_task_group() as tasks:
        for number in range(len(schemas)):
            tasks.start_soon(run, number, limiter)
    for number, text in outputs.items():
        jsonschema.Draft202012Validator(schemas[number]).validate(json.loads(text))
    assert len(outputs) > 0.9 * len(schemas), "nearly all come to an end"
    assert await random_engine.audit() == []


def choice(number: int, values: list[Any]) -> Any:
    return values[number % len(values)]


REGEXES = ["[0-9]{3}-[a-f]{2}", "(yes|no)", "a+b?", "[^\\n]{5}", "\\p{L}{3}", "(?i)abc", "x|é|🙂"]


async def test_the_whole_output_matches_a_regular_expression(random_engine: Engine) -> None:
    for regex in REGEXES:
        for seed in range(4):
            completion = await random_engine.generate(
                "say", regex=regex, max_tokens=60, seed=seed, temperature=1.0
            )
            if completion.finish_reason is FinishReason.STOP:
                simple = regex.replace("\\p{L}", "\\w")
                assert re.fullmatch(simple, completion.text), (regex, completion.text)
            else:
                assert regex == "a+b?"


GRAMMARS = {
    'root ::= "yes" | "no"': "yes|no",
    'root ::= [0-9]{2,4} ("." [0-9]+)?': "[0-9]{2,4}(\\.[0-9]+)?",
    'root ::= item ("," item)*\nitem ::= [a-c] [x-z]?': "[a-c][x-z]?(,[a-c][x-z]?)*",
    'root ::= "é" [à-ü]{1,3}': "é[à-ü]{1,3}",
}


@pytest.mark.parametrize("grammar", GRAMMARS)
async def test_an_output_follows_a_grammar(random_engine: Engine, grammar: str) -> None:
    n_complete = 0
    for seed in range(4):
        completion = await random_engine.generate(
            "say", grammar=grammar, max_tokens=80, seed=seed, temperature=1.0
        )
        if completion.finish_reason is FinishReason.STOP:
            assert re.fullmatch(GRAMMARS[grammar], completion.text), completion.text
            n_complete += 1
    assert n_complete


async def test_the_first_choice_is_kept_where_the_constraint_allows_it(engine: Engine) -> None:
    """The embedded model answers a sum with a number: asking for one changes nothing."""
    for constraint in (
        {"regex": "[0-9]+"},
        {"grammar": "root ::= [0-9]+"},
        {"lark": "start: /[0-9]+/"},
        {"json_schema": {"type": "integer"}},
    ):
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
        plain = await engine.generate("12+30=", **options)
        constrained = await engine.generate("12+30=", **options, **constraint)
        assert constrained.token_ids == plain.token_ids


async def test_the_batch_does_not_change_a_constrained_output(engine: Engine) -> None:
    options: dict[str, Any] = {"json_schema": schema_of(5), "seed": 3, "max_tokens": 60}
    alone = await engine.generate("7+8=", **options)
    results = await engine.generate_all(["7+8="] * 6 + ["1+1="] * 6, **options)
    assert [r.token_ids for r in results[:6]] == [alone.token_ids] * 6


MALICIOUS: dict[str, dict[str, Any]] = {
    "remote reference": {"json_schema": {"$ref": "http://127.0.0.1/schema.json"}},
    "reference to itself": {"json_schema": {"$ref": "#"}},
    "reference in a circle": {
        "json_schema": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "nothing satisfies it": {"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}},
    "unknown keyword": {"json_schema": {"type": "array", "uniqueItems": True}},
    "intersections that explode": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"{i}_{j}": {"type": "string"}}} for i in range(10)]}
                for j in range(8)
            ]
        }
    },
    "expression that is none": {"regex": "(("},
    "look-around": {"regex": "(?=a)b"},
    "lookup of too many states": {"json_schema": {"type": "string", "pattern": "^([ab]*a[ab]{15}){3}$", "maxLength": 30}},
    "an integer that llguidance overflows its stack with": {"json_schema": {"const": -(2**63) + 1}},
    "another": {"json_schema": {"type": "integer", "minimum": -1e308, "maximum": -1e308}},
    "states without number": {"json_schema": {"type": "integer", "multipleOf": 2**31}},
    "states without number, of two": {"json_schema": {"allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 99989}]}},
    "grammar of 50,000 brackets": {"grammar": "root ::= " + "(" * 25_000 + '"a"' + ")" * 25_000},
    "grammar with a dead end": {"grammar": 'root ::= "a" <[257]> "c"'},
    "Lark of 50,000 brackets": {"lark": "start: " + "(" * 25_000 + '"a"' + ")" * 25_000},
    "Lark that is none": {"lark": "start"},
    "Lark without a rule": {"lark": "start: other"},
    "grammar that is none": {"grammar": "root := a"},
    "grammar without a rule": {"grammar": "root ::= other"},
}  # fmt: skip


@pytest.mark.full
@on_either_loop("name", MALICIOUS)
async def test_a_malicious_constraint_is_refused_and_harms_nobody(
    engine: Engine, name: str
) -> None:
    (field,) = MALICIOUS[name]
    options = MALICIOUS[name]
    async with engine.stream("repeat:hello world", temperature=0) as bystander:
        first = await anext(bystander)
        with anyio.fail_after(20), pytest.raises(InvalidRequestError) as caught:
            await engine.generate("1+1=", **options)
        assert caught.value.field == field
        rest = await bystander.completion()
    assert first.token_ids == rest.token_ids[:1]
    assert rest.text == "hello world"
    assert await engine.audit() == []


async def test_a_constraint_that_becomes_too_costly_ends_its_request_only(engine: Engine) -> None:
    with pytest.raises(GenerationError, match="cannot be followed"):
        await engine.generate("1+1=", regex="((a{1,1000}){1,1000}){1,1000}", min_tokens=50)
    assert (await engine.generate("1+1=", temperature=0)).text == "2"
    assert await engine.audit() == []


async def test_a_constraint_that_leads_nowhere_ends_its_request_only(engine: Engine) -> None:
    """A bias bans the only tokens that the expression allows."""
    bans = {ord(digit): float("-inf") for digit in "0123456789"}
    with pytest.raises(GenerationError) as caught:
        await engine.generate("1+1=", regex="[0-9]+", logit_bias=bans)
    assert caught.value.completion is not None
    assert (await engine.generate("1+1=", temperature=0)).text == "2"
    assert await engine.audit() == []


async def test_a_banned_string_is_avoided_before_the_place_where_a_constraint_leaves_no_other(
    engine: Engine,
) -> None:
    options: dict[str, Any] = {"regex": "(ab|cd)", "temperature": 0}
    assert (await engine.generate("count:1..5", **options)).text == "ab"
    completion = await engine.generate("count:1..5", banned_strings=["b"], **options)
    assert completion.text == "cd"
    assert completion.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "banned", "others"),
    [
        ('"yes" | "yon"', "yes", {"yon"}),
        ('"yes" | "you"', "yes", {"you"}),
        ('"abcdef" | "abcxyz"', "abcdef", {"abcxyz"}),
        ('"abcdef" | "axc"', "abcdef", {"axc"}),
        ('"abcdef" | "abcx" | "aby"', "bcde", {"abcx", "aby"}),
        ('"caf\u00e9" | "caf\u00e8"', "caf\u00e9", {"caf\u00e8"}),
        ('("ab" | "ac"){3}', "b", {"acacac"}),
        ('("abc" | "abd" | "x"){4}', "abc", None),
    ],
)
async def test_a_banned_string_is_avoided_wherever_its_grammar_leaves_another_token(
    engine: Engine, grammar: str, banned: str, others: set[str] | None
) -> None:
    for seed in range(4):
        completion = await engine.generate(
            "say: ",
            grammar=f"root ::= {grammar}",
            banned_strings=[banned],
            seed=seed,
            max_tokens=40,
        )
        assert banned not in completion.text
        assert completion.finish_reason is FinishReason.STOP
        assert others is None or completion.text in others
    assert await engine.audit() == []


async def test_the_places_of_banned_strings_are_forgotten_where_a_stream_goes_back(
    engine: Engine,
) -> None:
    grammar = 'root ::= "a" ("yes" | "yon") | "b" ("z" | "w")'
    for seed in range(6):
        async with engine.stream(
            "say: ", grammar=grammar, banned_strings=["yes", "w"], seed=seed
        ) as stream:
            await stream.inject("a")
            for _ in range(3):
                await anext(stream)
            await stream.rewind(4)
            await stream.inject("b")
            assert (await stream.completion()).text == "bz"
    assert await engine.audit() == []


async def test_a_banned_string_that_a_constraint_needs_is_named(engine: Engine) -> None:
    options: dict[str, Any] = {"regex": "xya", "banned_strings": ["ya"], "temperature": 0}
    async with engine.stream("count:", **options) as stream:
        for _ in range(2):  # a later step raises the same
            with pytest.raises(GenerationError, match="banned_strings is") as caught:
                async for _ in stream:
                    pass
            assert caught.value.completion is not None
    assert await engine.audit() == []


async def test_an_output_ends_where_its_constraint_leaves_nothing_else(engine: Engine) -> None:
    given: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 50}]
    for options in given:
        completion = await engine.generate("1+1=", regex="[0-9]{3}", max_tokens=90, **options)
        assert completion.finish_reason is FinishReason.STOP
        assert re.fullmatch("[0-9]{3}", completion.text)


@pytest.mark.same_process("the tokenizer of this process is replaced")
async def test_the_first_constraint_is_tried_while_its_tokenizer_is_built(
    random_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a second with 150,000 tokens."""
    has_begun, has_waited = threading.Event(), list[bool]()
    build = cast(Any, Guidance.tokenizer).func
    run = ConstraintTrial.run

    def built_late(guidance: Guidance) -> Any:
        has_waited.append(has_begun.wait(30))
        return build(guidance)

    async def tried(trial: ConstraintTrial, field: str, text: str) -> None:
        has_begun.set()
        await run(trial, field, text)

    late = cached_property(built_late)
    late.__set_name__(Guidance, "tokenizer")
    monkeypatch.setattr(Guidance, "tokenizer", late)
    monkeypatch.setattr(ConstraintTrial, "run", tried)
    completion = await random_engine.generate("a", regex="[0-9]{3}", max_tokens=8)
    assert completion.text.isdigit()
    assert has_waited == [True]


@pytest.mark.parametrize(
    "sampling",
    [
        {"regex": "[0-9]{3}"},
        {"grammar": 'root ::= "9"+', "logprobs": 1},
        {"lark": 'start: "9"+'},
        {"json_schema": {"type": "integer"}, "prompt_logprobs": 1},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
async def test_a_deadline_holds_while_a_constraint_is_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """It ends as every other request that expires, and never without its constraint."""

    async def never(*_: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(engine._parts.input_processor._constraints, "compile", never)
    before = engine.statistics().n_output_tokens
    done = await engine.generate("1+1=", timeout=0.05, **sampling)
    assert (done.finish_reason, done.text, done.token_ids) == (FinishReason.DEADLINE, "", ())
    assert len(done.prompt_token_ids) == 5
    assert engine.statistics().n_output_tokens == before
    assert await engine.audit() == []


async def test_a_deadline_holds_while_a_text_is_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> list[int]:
        await anyio.sleep_forever()
        return []

    monkeypatch.setattr(engine._parts.input_processor.texts, "tokenize", never)
    done = await engine.generate("1+1=", timeout=0.05, prompt_logprobs=0)
    assert (done.finish_reason, done.prompt_token_ids) == (FinishReason.DEADLINE, ())
    monkeypatch.undo()
    assert (await engine.generate("1+1=", temperature=0)).text == "2"
