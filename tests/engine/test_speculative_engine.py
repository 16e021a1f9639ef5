"""Speculation with a model: the same tokens and log probabilities, to the bit, in fewer ticks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cllm import (
    Completion,
    Engine,
    EngineConfig,
    InvalidArgumentError,
    InvalidRequestError,
    ModelLoadError,
)
from cllm.bindings import Model
from cllm.engine.core.speculation import BudgetedSpeculation, _Offer
from cllm.engine.llama import row_cost_cache
from cllm.engine.llama.decoder import make_context
from cllm.engine.llama.draft_model import check_vocabulary
from cllm.testing.reproducibility import difference
from tests.conftest import QUIET
from tests.engine.samplings import FEW_IN_FAST, PROMPTS, SAMPLINGS, SCHEMA
from tests.simulation.oracle_drafter import OracleDrafter, OracleEngine, known_answers
from tools import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.usefixtures("free_rows")]

EXACT: dict[str, Any] = {"deterministic": True, "n_ctx": 2048, "n_seq_max": 4, **QUIET}


async def answers(engine: Engine, **sampling: Any) -> list[Completion]:
    options = {"max_tokens": 24, "logprobs": 2, **sampling}
    return list(await engine.generate_all(PROMPTS, **options))


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for completion, alone in zip(found, expected, strict=True):
        assert not difference(completion, alone)
        assert completion.text == alone.text
        assert completion.finish_reason == alone.finish_reason


@pytest.mark.parametrize("name", FEW_IN_FAST)
async def test_no_sampler_constraint_or_stop_sees_that_tokens_were_guessed(name: str) -> None:
    async with Engine(**EXACT) as engine:
        plain = await answers(engine, **SAMPLINGS[name])
    for share in (0.6, 1.0):
        drafter = OracleDrafter(known_answers(plain), share)
        async with OracleEngine(drafter=drafter, **EXACT) as engine:
            assert_same(await answers(engine, **SAMPLINGS[name]), plain)
            told = engine.statistics()
            assert told.n_discrepancies == 0
        assert 0 < told.n_accepted_tokens <= told.n_drafted_tokens
        assert share == 1.0 or told.n_accepted_tokens < told.n_drafted_tokens


@pytest.mark.same_process("the cost of rows is replaced")
@pytest.mark.parametrize("guessing", ["auto", "ngram"])
async def test_what_a_schema_forces_takes_fewer_ticks(guessing: str) -> None:
    ticks, completions = [], []
    for speculation in (None, guessing):
        async with Engine(speculation=speculation, **EXACT) as engine:
            completions.append(
                await engine.generate("x", json_schema=SCHEMA, seed=3, max_tokens=100, logprobs=0)
            )
            ticks.append(engine.statistics().n_ticks)
    assert_same(completions[1:], completions[:1])
    assert json.loads(completions[0].text).keys() == SCHEMA["properties"].keys()
    assert ticks[0] >= 1.5 * ticks[1]


def test_the_default_is_to_guess_where_that_is_free() -> None:
    (default,) = [field.default for field in fields(EngineConfig) if field.name == "speculation"]
    assert default == "auto"


@pytest.mark.same_process("the cost of rows is replaced")
async def test_automatic_guesses_copy_text_in_fewer_ticks_with_the_same_tokens() -> None:
    prompt, ticks, completions = [7, 9, 11, 13] * 12, [], []
    for speculation in (None, "auto"):
        async with Engine(speculation=speculation, **EXACT) as engine:
            completions.append(
                await engine.generate(
                    prompt, max_tokens=60, logprobs=0, temperature=0, ignore_eos=True
                )
            )
            ticks.append(engine.statistics().n_ticks)
    assert_same(completions[1:], completions[:1])
    assert completions[1].usage.n_accepted > 0
    assert ticks[1] < ticks[0]


def test_automatic_guesses_take_no_output_rows_and_no_states() -> None:
    with Model(EngineConfig().model_path) as model:
        n_outputs = []
        for speculation in (None, "auto"):
            config = EngineConfig(speculation=speculation, n_ctx=256, n_seq_max=4)
            assert config.n_draft_states(1000) == 0
            with make_context(model, config) as context:
                n_outputs.append(context.n_outputs_max)
    assert n_outputs[0] == n_outputs[1]


@pytest.fixture
def four_drafts_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as large as the one it drafts for is not worth its time, and would not be asked."""

    def four(_self: object, _n: int, offers: Sequence[_Offer], *_limits: object) -> list[int]:
        return [min(4, len(offer.probabilities)) for offer in offers]

    monkeypatch.setattr(BudgetedSpeculation, "_choose", four)


@pytest.mark.same_process("the cost of drafts is replaced")
@pytest.mark.usefixtures("four_drafts_each")
async def test_a_model_that_drafts_for_itself_is_mostly_right_and_changes_nothing() -> None:
    path = make_model.ensure("tiny-llama", "F16")
    small: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, **QUIET}
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    async with Engine(path, deterministic=True, **small) as engine:
        plain = await engine.generate_all([[5, 6, 7], [8] * 90], logprobs=0, **options)
    async with Engine(path, deterministic=True, speculation=path, **small) as engine:
        found = await engine.generate_all([[5, 6, 7], [8] * 90], logprobs=0, **options)
        told = engine.statistics()
    assert_same(list(found), list(plain))
    assert told.n_drafted_tokens > 0
    assert told.n_accepted_tokens > 0.6 * told.n_drafted_tokens


class Words:
    """A vocabulary of these words."""

    def __init__(self, *words: bytes) -> None:
        self._words = words
        self.n_tokens = len(words)

    def pieces(self, *, special: bool = False) -> list[bytes]:
        assert special, "control tokens are compared too"
        return list(self._words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((b"a",), "it has 1 tokens, not 2"),
        ((b"a", b"c"), "its token 1 is b'c', not b'b'"),
    ],
)
def test_a_draft_model_with_other_tokens_is_refused_by_name(
    words: tuple[bytes, ...], reason: str
) -> None:
    check_vocabulary("small.gguf", Words(b"a", b"b"), Words(b"a", b"b"))
    with pytest.raises(ModelLoadError, match=r"small\.gguf.*cannot draft") as caught:
        check_vocabulary("small.gguf", Words(*words), Words(b"a", b"b"))
    assert reason in caught.value.reason


async def test_a_draft_model_that_cannot_forget_is_refused() -> None:
    path = make_model.ensure("tiny-recurrent", "F16")
    with pytest.raises(ModelLoadError, match="a recurrent model cannot draft"):
        async with Engine(speculation=path, n_ctx=256, n_seq_max=1, **QUIET):
            pass


async def test_a_model_that_cannot_forget_has_no_drafts_and_answers() -> None:
    path = make_model.ensure("tiny-recurrent", "F16")
    for speculation in ("auto", "ngram", path):
        async with Engine(path, speculation=speculation, n_ctx=256, n_seq_max=1, **QUIET) as engine:
            completion = await engine.generate([5, 6, 7] * 5, temperature=0, max_tokens=20)
        assert completion.usage.n_drafted == 0
        assert completion.usage.n_output > 0


@pytest.mark.same_process("the cost of rows is replaced")
async def test_a_request_may_refuse_guesses_and_cannot_ask_for_what_is_not_there() -> None:
    async with Engine(**EXACT) as engine:
        with pytest.raises(InvalidRequestError, match="speculation") as caught:
            await engine.generate("x", speculation=True)
        assert caught.value.field == "speculation"
        assert (await engine.generate("x", speculation=False, max_tokens=3)).usage.n_output
    async with Engine(speculation="ngram", **EXACT) as engine:
        options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 60, "seed": 1}
        without = await engine.generate("x", speculation=False, **options)
        with_them = await engine.generate("x", speculation=True, **options)
    assert without.usage.n_drafted == 0 < with_them.usage.n_drafted
    assert without.token_ids == with_them.token_ids


@pytest.mark.parametrize("given", ["", "a\0b", 3])
async def test_a_name_that_no_file_can_have_is_refused(given: object) -> None:
    with pytest.raises(InvalidArgumentError, match="speculation"):
        Engine(speculation=given)  # type: ignore[arg-type]


async def test_a_context_that_is_smaller_than_a_batch_has_room_for_guesses() -> None:
    small: dict[str, Any] = {"n_ctx": 16, "n_seq_max": 1, "prefix_cache": False, **QUIET}
    async with Engine(speculation="ngram", **small) as engine:
        completion = await engine.generate("x", regex="a{48}", max_tokens=60)
        assert completion.text == "a" * len(completion.text) != ""
        assert engine.statistics().n_rebuilds == 0


@pytest.mark.same_process("the cost of drafts is replaced")
@pytest.mark.usefixtures("four_drafts_each")
async def test_a_draft_model_has_room_for_some_where_not_for_all() -> None:
    path = make_model.ensure("tiny-llama", "F16")
    head = [7 + n % 50 for n in range(300)]
    prompts = [[*head, 9 + n] for n in range(4)]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    # The head is there once for the requests; the model that drafts shares nothing.
    async with Engine(path, speculation=path, n_ctx=600, n_seq_max=4, **QUIET) as engine:
        completions = await engine.generate_all(prompts, **options)
        told = engine.statistics()
    assert [c.usage.n_output for c in completions] == [30] * 4
    assert sum(c.usage.n_accepted > 0 for c in completions) in (1, 2, 3, 4)
    assert told.n_accepted_tokens > 20


@pytest.mark.same_process("the file of costs is replaced")
async def test_what_rows_cost_is_left_to_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, dict[int, float]] = {}
    monkeypatch.setattr("cllm.engine.llama.backend.save_table", kept.__setitem__)
    async with Engine(speculation="ngram", **EXACT) as engine:
        await engine.generate("x", max_tokens=10, ignore_eos=True)
    ((key, table),) = kept.items()
    assert 1 in table
    monkeypatch.setattr(
        "cllm.engine.llama.backend.load_table", lambda asked: {key: {60: 1.5}}[asked]
    )
    async with Engine(speculation="ngram", **EXACT) as engine:
        await engine.generate("x", max_tokens=10, ignore_eos=True)
    assert kept[key][60] == 1.5


TABLES = {
    "none": {},
    "another value": {"key": [1, 2]},
    "no numbers": {"key": {"one": 1.0}},
    "no times": {"key": {"1": "fast"}},
    "absurd": {"key": {"0": 1.0, "1": -1.0, "2": 0.0, "3": 1e9, "99999": 1.0}},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_makes_no_sense_is_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cost_cache, "read_cached", lambda _: TABLES[name])
    assert row_cost_cache.load_table("key") == {}


def test_a_table_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for n in range(row_cost_cache.MAX_TABLES + 1):
        row_cost_cache.save_table(f"key {n}", {1: 0.5, 8: 0.75 + n})
    row_cost_cache.save_table("nothing was measured", {})
    assert row_cost_cache.load_table(f"key {row_cost_cache.MAX_TABLES}") == {1: 0.5, 8: 64.75}
    assert row_cost_cache.load_table("key 0") == {}  # of many, the last are kept
    assert row_cost_cache.load_table("key 1") == {1: 0.5, 8: 1.75}
    assert [path.name for path in (tmp_path / "cllm").iterdir()] == [row_cost_cache.FILE]
