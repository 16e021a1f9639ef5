"""What cannot be served is refused before it is submitted, by field, value and limit."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pytest

from cllm.engine.loop import request_call
from cllm.engine.loop.request_call import RequestCall
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import InvalidRequestError, PromptTooLongError

NAN, INFINITE = float("nan"), float("inf")


class Index:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


def test_numbers_of_other_types_become_those_of_python() -> None:
    """An unsigned priority overflows as it ages, and no priority without arithmetic can be compared."""
    for number in (np.uint8(7), np.int64(7), Index(7)):
        given = cast(Any, number)
        call = RequestCall(
            "a", SamplingParams(top_k=given, logit_bias={given: 1.5}),
            priority=given, seed=given, first_scored=given, generated=cast(Any, [given]),
            excluded=cast(Any, [given]), timeout=7, lora={"a": 1},
        )  # fmt: skip
        numbers = [
            call.priority, call.seed, call.first_scored, *call.generated, *call.excluded,
            call.params.top_k, *call.params.logit_bias,
        ]  # fmt: skip
        assert [(type(each), each) for each in numbers] == [(int, 7)] * 7
        assert repr((call.timeout, call.lora)) == "(7.0, {'a': 1.0})"


@pytest.mark.parametrize(
    "bias", [Decimal("-Infinity"), np.array(-np.inf), np.array([1.0, 2.0]), "-inf", None]
)
def test_a_bias_is_a_number_even_if_it_bans(bias: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias is .*, must be a number"):
        SamplingParams(logit_bias={3: bias})
    banned = SamplingParams(logit_bias={3: np.float64("-inf")}).logit_bias[3]
    assert (type(banned), banned) == (float, -np.inf)


def test_fewer_tokens_than_the_least_cannot_be_the_most() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, must be at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=4, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=None)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "1 to 2147483647"),
        ("max_tokens", 2**31, "1 to 2147483647"),
        ("max_tokens", 1.5, "an integer"),
        ("max_tokens", True, "an integer"),
        ("temperature", -0.1, "0 to 100"),
        ("temperature", 100.5, "0 to 100"),
        ("temperature", 1e-4, "0 or at least 0.001"),
        ("temperature", NAN, "finite"),
        ("temperature", INFINITE, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", "hot", "a number"),
        ("temperature", None, "a number"),
        ("top_k", -2, "-1 to 2147483647"),
        ("top_k", 2**31, "-1 to 2147483647"),
        ("top_k", 40.0, "an integer"),
        ("top_p", -0.01, "0 to 1"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", NAN, "finite"),
        ("min_p", -0.01, "0 to 1"),
        ("min_p", 1.01, "0 to 1"),
        ("min_p", True, "a number"),
        ("min_tokens", -1, "0 to 2147483647"),
        ("typical_p", 1.5, "0 to 1"),
        ("top_n_sigma", -2.0, "-1 to 10000"),
        ("xtc_probability", NAN, "finite"),
        ("xtc_threshold", -0.1, "0 to 1"),
        ("dynatemp_range", 101.0, "0 to 100"),
        ("dynatemp_exponent", -1.0, "0 to 100"),
        ("repeat_penalty", 0.0, "0.001 to 1000"),
        ("repeat_last_n", -2, "-1 to 1048576"),
        ("presence_penalty", 101, "-100 to 100"),
        ("frequency_penalty", INFINITE, "finite"),
        ("dry_multiplier", -1.0, "0 to 100"),
        ("dry_base", NAN, "finite"),
        ("dry_allowed_length", -1, "0 to 1048576"),
        ("dry_penalty_last_n", 2**31, "-1 to 1048576"),
        ("dry_sequence_breakers", "abc", "a sequence of strings"),
        ("mirostat", 3, "0 to 2"),
        ("mirostat_tau", -1.0, "0 to 10000"),
        ("mirostat_eta", NAN, "finite"),
        ("logit_bias", [1], "a mapping of token ids to numbers"),
        ("samplers", "top_k", "a sequence of names"),
        ("min_keep", -1, "0 to 1048576"),
        ("ignore_eos", 1, "True or False"),
        ("seed", -1, "0 to 4294967294"),
        ("seed", 2**32 - 1, "0 to 4294967294"),
        ("seed", "7", "an integer"),
        ("stop", b"bytes", "a string or a sequence of strings"),
        ("stop", 7, "a string or a sequence of strings"),
        ("stop", None, "a string or a sequence of strings"),
        ("stop_token_ids", "12", "a sequence of token ids"),
        ("stop_token_ids", b"12", "a sequence of token ids"),
        ("stop_token_ids", 12, "a sequence of token ids"),
        ("stop_token_ids", None, "a sequence of token ids"),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_field_value_and_limit(
    field: str, value: object, limit: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**cast(dict[str, Any], {field: value}))
    error = caught.value
    assert (error.field, error.limit) == (field, limit)
    assert error.value is value
    assert str(error).startswith(f"{field} is ")
    assert str(error).endswith(f"must be {limit}")


@pytest.mark.parametrize(
    ("field", "value", "shown", "limit"),
    [
        ("stop", "", "", "a string that is not empty"),
        ("stop", ["a", ""], "", "a string that is not empty"),
        ("stop", ["a", 7], 7, "a string that is not empty"),
        ("stop", ["a", "\ud800"], "\ud800", "text without lone surrogates"),
        ("stop", ["x"] * 65, 65, "at most 64 strings"),
        ("stop", "é" * 513, "é" * 513, "at most 1024 bytes long"),
        ("stop_token_ids", [1, -1], -1, "0 to 2147483647"),
        ("stop_token_ids", range(1025), 1025, "at most 1024 token ids in the list"),
        ("stop_token_ids", [2**31], 2**31, "0 to 2147483647"),
        ("stop_token_ids", [1, "a"], "a", "an integer"),
    ],
)
def test_a_bad_item_is_refused_by_itself(
    field: str, value: object, shown: object, limit: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**cast(dict[str, Any], {field: value}))
    assert (caught.value.field, caught.value.value, caught.value.limit) == (field, shown, limit)
    assert len(str(caught.value)) < 200, "a long value is shown in part"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"max_tokens": 2**31 - 1},
        {"temperature": 0},
        {"temperature": 0.001},
        {"temperature": 100},
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 0.0, "min_p": 1.0},
        {"top_p": 1, "min_p": 0},
        {"seed": 0},
        {"seed": 2**32 - 2},
        {"stop": ["x"] * 64},
        {"stop": "é" * 512},
        {"stop_token_ids": [0, 2**31 - 1]},
    ],
)
def test_values_at_the_limits_are_accepted(options: SamplingOptions) -> None:
    assert request_call.params_from(options) == SamplingParams(**options)


def test_stop_strings_and_token_ids_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()
    assert SamplingParams().stop_token_ids == ()


def test_only_temperature_0_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.001).is_greedy
    assert not SamplingParams().is_greedy


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ("temprature", "called 'temperature'"),
        ("max_token", "called 'max_tokens'"),
        ("priorty", "called 'priority'"),
        ("tool_choise", "called 'tool_choice'"),
        ("tools", "left out: it is an option of chats"),
        ("parse_special", "left out: it is an option of raw prompts"),
        ("zzz", "one of adaptive_decay, "),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_probably_meant(
    given: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError, match=given) as caught:
        request_call.params_from(cast(SamplingOptions, {given: 1.0}))
    assert (caught.value.field, caught.value.value) == (given, 1.0)
    assert caught.value.limit.startswith(limit)


GOOD_CALL: dict[str, Any] = {
    "prompt": "a", "params": SamplingParams(), "priority": 0, "timeout": None, "request_id": "r",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("params", {"temperature": 0}, "a SamplingParams"),
        ("priority", 2**31, "-2147483648 to 2147483647"),
        ("priority", 0.5, "an integer"),
        ("timeout", -1.0, "0 to 1e+09"),
        ("timeout", INFINITE, "finite"),
        ("timeout", "1", "a number"),
        ("request_id", "", "a string of 1 to 256 characters"),
        ("request_id", "x" * 257, "a string of 1 to 256 characters"),
        ("request_id", 7, "a string of 1 to 256 characters"),
        ("request_id", "\ud800", "text without lone surrogates"),
    ],
)
def test_a_bad_argument_of_a_call_is_refused_by_field_value_and_limit(
    field: str, value: object, limit: str
) -> None:
    RequestCall(**GOOD_CALL)
    with pytest.raises(InvalidRequestError) as caught:
        RequestCall(**{**GOOD_CALL, field: value})
    assert (caught.value.field, caught.value.value, caught.value.limit) == (field, value, limit)


@pytest.mark.parametrize(
    ("prompt", "value", "limit"),
    [
        (b"bytes", b"bytes", "a string or a sequence of token ids"),
        (None, None, "a string or a sequence of token ids"),
        (7, 7, "a string or a sequence of token ids"),
        ([1, -1], -1, "0 to 2147483647"),
        ([1, 2**31], 2**31, "0 to 2147483647"),
        ([1, "a"], "a", "an integer"),
        ([True], True, "an integer"),
    ],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, value: object, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_call.check_prompt(prompt)
    error = caught.value
    assert (error.field, error.value, error.limit) == ("prompt", value, limit)


def test_a_good_prompt_is_text_or_a_tuple() -> None:
    assert request_call.check_prompt("") == ""
    assert request_call.check_prompt([1, 2]) == (1, 2)
    assert request_call.check_prompt(range(3)) == (0, 1, 2)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    request_call.check_length("a" * 640, 10)
    with pytest.raises(PromptTooLongError) as caught:
        request_call.check_length("a" * 1000, 10)
    assert (caught.value.n_prompt, caught.value.n_ctx) == (15, 10)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_call.check_length("ab\ud800c", 10)
    assert (caught.value.field, caught.value.value) == ("prompt", "\ud800")
    assert caught.value.limit == "text without lone surrogates"


@pytest.mark.parametrize(
    ("tokens", "stop_token_ids", "field", "value", "limit"),
    [
        ((), (), "prompt", "", "at least one token"),
        ((1, 50), (), "prompt", 50, "token ids 0 to 49"),
        ((1,), (50,), "stop_token_ids", 50, "token ids 0 to 49"),
    ],
)
def test_tokens_the_vocabulary_has_no_place_for_are_refused(
    tokens: tuple[int, ...], stop_token_ids: tuple[int, ...], field: str, value: object, limit: str
) -> None:
    params = SamplingParams(stop_token_ids=stop_token_ids)
    with pytest.raises(InvalidRequestError) as caught:
        request_call.check_tokens(tokens, params, 8, 50)
    assert (caught.value.field, caught.value.value, caught.value.limit) == (field, value, limit)


def test_a_prompt_may_fill_the_context_and_not_exceed_it() -> None:
    params = SamplingParams(stop_token_ids=[49])
    request_call.check_tokens((49,) * 8, params, 8, 50)
    with pytest.raises(PromptTooLongError, match="9 tokens > 8 maximum") as caught:
        request_call.check_tokens((49,) * 9, params, 8, 50)
    assert (caught.value.n_prompt, caught.value.n_ctx) == (9, 8)


@pytest.mark.parametrize(
    ("field", "given", "value"),
    [
        ("logit_bias", {-1: 0.0}, -1),
        ("logit_bias", {1: 1e5}, 1e5),
        ("logit_bias", dict.fromkeys(range(1025), 0.0), 1025),
        ("samplers", ["top_k", "best"], "best"),
        ("samplers", ["top_k", "top_k"], ["top_k", "top_k"]),
        ("dry_sequence_breakers", [""], ""),
        ("dry_sequence_breakers", ["a"] * 65, 65),
        ("dry_sequence_breakers", ["\ud800"], "\ud800"),
    ],
)
def test_the_bad_part_of_a_collection_is_named(field: str, given: Any, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**cast(dict[str, Any], {field: given}))
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_bias_for_a_token_that_the_model_does_not_have_is_refused() -> None:
    params = SamplingParams(logit_bias={50: 1.0})
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        request_call.check_tokens((1,), params, 8, 50)


def test_a_collection_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids is 'more than 1024'"):
        SamplingParams(stop_token_ids=itertools.repeat(1))  # type: ignore[arg-type]


def test_a_text_of_more_than_a_mebibyte_is_a_bad_request_whatever_the_context() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_call.check_length("é" * (1 << 19) + "x", n_ctx=1 << 20)
    assert (caught.value.field, caught.value.value) == ("prompt", "1048577 bytes")
    request_call.check_length("é" * (1 << 19), n_ctx=1 << 20)
