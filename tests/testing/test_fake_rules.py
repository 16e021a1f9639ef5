"""Rules of a server without a model: which is taken, what it answers, and what a file may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cllm import InvalidArgumentError
from cllm.testing.fake_engine import FakeAnswer
from cllm.testing.fake_rules import FakeRule, FakeRules

YAML = """
rules:
  - when: weather
    role: user
    reasoning: I look it up.
    tool_calls: [{name: get_weather, arguments: {city: Oslo}}]
  - role: tool
    text: "It is {0}."
    when: .+
  - when: once
    times: 1
    status: 429
    retry_after_s: 2
  - when: (\\w+), please
    text: "Here: {1}"
  - text: Hello!
"""


def answered(rules: FakeRules, question: str, role: str = "user") -> FakeAnswer:
    rule = rules.choose(question, role)
    assert rule is not None
    with rules.answering("", rule, [question]) as request_id:
        return rules.answer(request_id, f"system: be nice\nuser: {question}\nassistant: ")


def test_the_first_rule_that_is_for_a_question_and_is_left_answers_it(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(YAML)
    rules = FakeRules.read(path)
    called = answered(rules, "What is the weather?")
    assert (called.reasoning, called.tool_calls) == (
        "I look it up.", (("get_weather", '{"city": "Oslo"}'),),
    )  # fmt: skip
    assert answered(rules, "20 C", "tool").text == "It is 20 C."
    assert answered(rules, "tea, please").text == "Here: tea"
    first = rules.choose("once")
    assert first is not None
    assert (first.status, first.retry_after_s) == (429, 2)
    assert answered(rules, "once").text == "Hello!"


def test_each_request_is_answered_by_its_own_rule_beside_others_with_the_same_prompt() -> None:
    rules = FakeRules.of([{"times": 1, "text": "first {0}", "when": ".*"}, {"text": "second"}])
    first, second = rules.choose("a"), rules.choose("a")
    assert first is not None
    assert second is not None
    with (
        rules.answering("x", first, ["a", "b"]) as one,
        rules.answering("x", second, ["a"]) as two,
    ):
        assert one == "x" != two
        assert rules.answer(two, "a").text == "second"
        assert [rules.answer(f"{one}/{n}", "a").text for n in range(2)] == ["first a"] * 2
        assert rules.answer(one, "user: b\nassistant: ").text == "first b"
        assert rules.answer(one, "a prompt that is written another way").text == "first a"
    assert rules.answer(one, "a").text == "second"  # like a request that no rule was chosen for
    with pytest.raises(LookupError):
        FakeRules.of([{"when": "b"}]).answer("y", "a")


def test_placeholders_are_filled_in_once_and_as_json_in_arguments() -> None:
    calls = [{"name": "f", "arguments": {"city": "{1}", "all": "{0}", "none": "{7}"}}]
    rule = FakeRule(when="in (.*)", text="{1} of {0}, {7}", tool_calls=calls)
    for city in ('"Paris"', "C:\\x", "{0}", "é\n"[:1]):
        answer = rule.answer(f"in {city}")
        assert answer.text == f"{city} of in {city}, {{7}}"
        ((_, arguments),) = answer.tool_calls
        assert json.loads(str(arguments)) == {"city": city, "all": f"in {city}", "none": "{7}"}


def test_a_mapping_has_whole_questions_and_where_nothing_fits_there_is_no_rule() -> None:
    rules = FakeRules.of({"1+1=": "2", "a.c": "dot"})
    assert answered(rules, "1+1=").text == "2"
    assert answered(rules, "a.c").text == "dot"
    assert rules.choose("abc") is None


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_other_kinds_of_files_say_the_same(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rules{suffix}"
    text = {
        ".json": json.dumps([{"when": "a", "text": "b"}]),
        ".toml": '[[rules]]\nwhen = "a"\ntext = "b"',
    }
    path.write_text(text[suffix])
    assert answered(FakeRules.read(path), "a").text == "b"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("text", "rules is 'text', must be a list of rules"),
        (["a"], "rules[0] is 'a', must be a mapping"),
        ([{}, {"txt": "a"}], "rules[1].txt is 'a', must be called 'text'"),
        ([{}, {"zzz": "a"}], "rules[1].zzz is 'a', must be of "),
        ([{"when": "("}], "rules[0].when is '(', must be a regular expression"),
        ([{"role": "system"}], "rules[0].role is 'system', must be one of user, tool"),
        ([{"times": -1}], "rules[0].times is -1, must be a number from 0 on"),
        ([{"text": 1}], "rules[0].text is 1, must be a text"),
        ([{"token_s": "1"}], "rules[0].token_s is '1', must be a number"),
        (
            [{"first_token_s": 1e9}],
            "rules[0].first_token_s is 1000000000.0, must be 0 to 3600 seconds",
        ),
        ([{"status": 200}], "rules[0].status is 200, must be an error, 400 to 599"),
        ([{"status": 404.0}], "rules[0].status is 404.0, must be an error, 400 to 599"),
        ([{"when": b"a"}], "rules[0].when is b'a', must be a regular expression"),
        ([{1: "a"}], "rules[0].1 is 'a', must be of "),
        ([{"tool_calls": None}], "rules[0].tool_calls is None, must be a list"),
        (
            [{"tool_calls": [{"name": "f", "args": {}}]}],
            "rules[0].tool_calls is {'name': 'f', 'args'",
        ),
        ([{"tool_calls": [{"name": 3}]}], "rules[0].tool_calls is {'name': 3}, must be a name"),
        ([{"tool_calls": [1]}], "rules[0].tool_calls is 1, must be a name and its arguments"),
    ],
)
def test_what_a_rule_cannot_say_is_refused_with_its_number_and_field(given: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        FakeRules.of(given)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "a: ["), ("a.json", "{"), ("a.toml", "="), ("missing.yaml", None)],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_name(
    name: str, text: str | None, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError) as caught:
        FakeRules.read(path)
    assert name in str(caught.value)
