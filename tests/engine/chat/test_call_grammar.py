"""What a grammar of calls asks for is what templates write, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cllm.bindings import Model
from cllm.engine.chat.call_grammar import CallGrammar, RoutedCallGrammar
from cllm.engine.chat.call_syntax import JsonCalls
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import ChatTokenizer
from cllm.engine.chat.output_parser import OutputParser
from cllm.engine.chat.routed_turn import HARMONY
from cllm.engine.chat.tool_schema import parameters_of
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraints.llguidance import Guidance
from cllm.errors import InvalidRequestError
from tests.conftest import examples
from tests.engine.chat.referee import Referee
from tests.engine.chat.test_chat_template import FEW_IN_FAST, TEMPLATES
from tests.engine.chat.test_formats import TOOL, USER, call, read_back
from tests.engine.chat.test_output_parser import channels_of
from tests.engine.chat.tool_schemas import cases

# What these write has more in it than a call needs, ids, indentation, Python's notation of lists, the
# recipient in another place, or elements for the items of lists, which are JSON in a call that is asked for.
WRITES_MORE = (
    "Cohere2MoE", "CohereForAI-c4ai-command-r-plus-tool_use", "ByteDance-Seed-OSS",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "openbmb-MiniCPM5-1B",
    "MiniMax-M3", "openai-gpt-oss-120b", "mistralai-Mistral-Nemo-Instruct-2407", "ibm-granite-granite-3.3-2B-Instruct",
    "llm-jp-llm-jp-4.1-8b-thinking",
)  # fmt: skip
ARGUMENTS = {"city": "Zurich", "n_days": 3, "units": ["a", "b"]}
pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason="no source of llama.cpp in the cache: tools/make_model.py"
)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(EMBEDDED_MODEL, vocab_only=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def guidance(model: Model) -> Guidance:
    return Guidance(model.vocab, 1)


def grammar_of(chat: ChatTokenizer, **options: Any) -> str:
    answer = chat.render(ChatPrompt.of([USER], tools=[TOOL], **options)).answer
    assert answer is not None
    assert answer.grammar is not None
    return answer.grammar


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", FEW_IN_FAST, ids=lambda path: path.stem)
def test_a_call_that_is_asked_for_may_be_what_the_template_writes(
    path: Any, model: Model, guidance: Guidance
) -> None:
    chat = ChatTokenizer(model.vocab, path.read_text(), None)
    matcher = guidance.compile("tools", grammar_of(chat, tool_choice="required")).start().matcher
    message: dict[str, Any] = {"role": "assistant", "content": None}
    message["tool_calls"] = [call(ARGUMENTS, "call12345")]
    if chat.abilities.thinking:
        message["reasoning_content"] = "Hm."
    text, (_, _, calls) = read_back(chat, message)
    assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS]
    chat.close()
    if path.stem in WRITES_MORE:
        return
    # The end of the turn is no part of the call, and neither is a thought before it.
    found = chat.output_format
    begins = [text.find(t) for t in (found.calls.triggers if found.calls else ()) if t in text]
    begin = min(begins, default=0)
    accepted = max(
        (end for end in range(begin, len(text) + 1) if is_whole(matcher, model, text[begin:end])),
        default=None,
    )
    assert accepted is not None, text
    assert "units" in text[:accepted]


def is_whole(matcher: Any, model: Model, text: str) -> bool:
    tokens, again = model.vocab.tokenize(text, add_special=False), matcher.deep_copy()
    return bool(tokens) and again.try_consume_tokens(tokens) == len(tokens) and again.is_accepting()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", FEW_IN_FAST, ids=lambda path: path.stem)
def test_a_call_that_is_asked_for_satisfies_any_schema_and_whatever_one_allows_can_be_called(
    path: Path, model: Model, guidance: Guidance
) -> None:
    referee = Referee(path, model, guidance)
    referee.judge(7, cases(7, examples(16).max_examples))
    assert referee.faults == []
    assert referee.counts["drawn"] > 0


def properties(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [*members][:1]}


LONG = {"type": "string", "minLength": 1, "maxLength": 100_000}
LONG_AT_LEAST = {"type": "string", "minLength": 4000, "maxLength": 5000}
# Random schemas do not have these.
AWKWARD: list[tuple[Any, list[dict[str, Any]]]] = [
    (properties(a=LONG, b=LONG), [{"a": "it is" * 800, "b": "x"}]),
    (properties(a=LONG_AT_LEAST), [{"a": "y" * 4010}]),
    (
        properties(a={"anyOf": [{"type": "string", "maxLength": 1000}, {"type": "integer"}]}),
        [{"a": "12"}, {"a": 12}, {"a": "b" * 1000}],
    ),
    (
        properties(invoke={"type": "string"}, parameter={"type": "integer"}, item={}, name={}),
        [{"invoke": "a", "parameter": 1, "item": 2}, {"invoke": "b", "name": "c"}],
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", FEW_IN_FAST, ids=lambda path: path.stem)
def test_long_texts_and_names_of_the_notations_can_be_called(
    path: Path, model: Model, guidance: Guidance
) -> None:
    referee = Referee(path, model, guidance)
    referee.judge(11, AWKWARD)
    assert referee.faults == []
    assert referee.counts["written"] > 0


def test_a_named_tool_is_the_only_one(model: Model, guidance: Guidance) -> None:
    (path,) = (path for path in TEMPLATES if path.stem == "Qwen-Qwen3-0.6B")
    chat = ChatTokenizer(model.vocab, path.read_text(), None)
    other = {"type": "function", "function": {"name": "add", "parameters": {}}}
    prompt = ChatPrompt.of([USER], tools=[TOOL, other], tool_choice="add")
    answer = chat.render(prompt).answer
    chat.close()
    assert answer is not None
    assert answer.grammar is not None
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    right = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert is_whole(matcher, model, right)
    assert not is_whole(matcher, model, wrong)
    assert not is_whole(matcher, model, "Hello")


def test_calls_or_an_answer_of_a_schema(model: Model, guidance: Guidance) -> None:
    (path,) = (path for path in TEMPLATES if path.stem == "Qwen-Qwen3-0.6B")
    chat = ChatTokenizer(model.vocab, path.read_text(), None)
    prompt = replace(ChatPrompt.of([USER], tools=[TOOL]), json_schema='{"type": "integer"}')
    answer = chat.render(prompt).answer
    chat.close()
    assert answer is not None
    assert answer.grammar is not None
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    assert is_whole(matcher, model, "42")
    assert is_whole(
        matcher, model,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "A"}}\n</tool_call>',
    )  # fmt: skip
    assert not is_whole(matcher, model, '"text"')


ROUTED = {
    "openai-gpt-oss-120b": (
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        "<|channel|>final<|message|>",
    ),
    "muse-glimmer": (
        " to=self<|message|>Hm <b>.<|eom|><|start|>assistant",
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n',
        " to=user<|message|>",
    ),
    "meetkai-functionary-medium-v3.2": ("all\nLet me look.>>>", "get_weather\n", "all\n"),
}


@pytest.mark.parametrize("name", ROUTED)
def test_strict_tools_of_a_model_that_routes_leave_messages_free_and_calls_right(
    name: str, model: Model, guidance: Guidance
) -> None:
    before, header, answer_header = ROUTED[name]
    is_tagged = "atem" in header

    def call_of(key: str) -> str:
        if not is_tagged:
            return header + json.dumps({key: "Oslo"})
        argument = f'<atem:parameter name="{key}">Oslo</atem:parameter>'
        return f"{header}{argument}\n</atem:invoke>\n</atem:function_calls>"

    answer = answer_of(model, name, strict=True)
    assert answer.thinking is None, "the grammar has the thought in it"
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    for text in ("", before, before * 2):
        assert is_whole(matcher, model, f"{text}{answer_header}Hello, <there> {{}}!")
        assert is_whole(matcher, model, text + call_of("city"))
        assert not is_whole(matcher, model, text + call_of("town"))
        _, _, calls = channels_of(answer.parser("x"), [text + call_of("city")])
        assert [(one, json.loads(two)) for one, two in calls] == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("name", ROUTED)
def test_calls_or_an_answer_of_a_schema_of_a_model_that_routes(
    name: str, model: Model, guidance: Guidance
) -> None:
    before, header, answer_header = ROUTED[name]
    answer = answer_of(model, name, json_schema='{"type": "integer"}')
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    thought = before if "Hm" in before else ""
    assert is_whole(matcher, model, f"{thought}{answer_header}42")
    assert not is_whole(matcher, model, f"{thought}{answer_header}Hello")
    if "atem" not in header:
        assert is_whole(matcher, model, thought + header + '{"city": "Oslo"}')


def test_an_answer_of_a_model_that_routes_may_be_continued(
    model: Model, guidance: Guidance
) -> None:
    answer = answer_of(model, "openai-gpt-oss-120b", strict=True, continue_final_message=True)
    _, header, _ = ROUTED["openai-gpt-oss-120b"]
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    behind = " Oslo is fine.<|end|><|start|>assistant"
    assert is_whole(matcher, model, " Oslo is fine.")
    assert is_whole(matcher, model, behind + header + '{"city": "Oslo"}')
    assert not is_whole(matcher, model, behind + header + '{"town": "Oslo"}')
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        answer_of(model, "openai-gpt-oss-120b", json_schema="{}", continue_final_message=True)


def test_a_budget_for_a_thought_that_the_grammar_has_in_it_is_rejected(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="reasoning_budget"):
        answer_of(model, "openai-gpt-oss-120b", strict=True, reasoning_budget=10)


def test_markers_of_routed_messages_may_be_control_tokens(model: Model, guidance: Guidance) -> None:
    tokens = {256: b"<|end|>", 258: b"<|message|>", 259: b"<|channel|>"}
    numbers = {name.decode(): token for token, name in tokens.items()}
    grammar = RoutedCallGrammar(HARMONY, parameters_of([TOOL]), False, tokens)
    matcher = guidance.compile("tools", grammar.strict()).start().matcher

    def is_taken(text: str) -> bool:
        found: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, numbers))})", text):
            known = [numbers[part]] if part in numbers else None
            found += known or model.vocab.tokenize(part, add_special=False)
        again = matcher.deep_copy()
        return bool(again.try_consume_tokens(found) == len(found) and again.is_accepting())

    thought, header, answer_header = ROUTED["openai-gpt-oss-120b"]
    right = json.dumps({"city": "Oslo"})
    assert is_taken(f"{thought}{answer_header}Hello")
    assert is_taken(f"{thought * 2}{header}{right}")
    assert not is_taken(f'{thought}{header}{{"city": 5}}')
    assert not is_taken(f"{thought}Hello")


def answer_of(model: Model, name: str, *, strict: bool = False, **changes: Any) -> Any:
    """The answer to a chat with a tool, of the model with this template."""
    (path,) = (path for path in TEMPLATES if path.stem == name)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "strict": strict, "parameters": schema}
    chat = ChatTokenizer(model.vocab, path.read_text(), None)
    prompt = ChatPrompt.of([USER], tools=[{"type": "function", "function": function}])
    try:
        return chat._plain._answer(replace(prompt, **changes), "")
    finally:
        chat.close()


def test_strict_tools_leave_text_free_and_calls_right(model: Model, guidance: Guidance) -> None:
    (path,) = (path for path in TEMPLATES if path.stem == "Qwen-Qwen3-0.6B")
    chat = ChatTokenizer(model.vocab, path.read_text(), None)
    function: dict[str, Any] = {"strict": True}
    function.update(TOOL["function"])
    strict = {"type": "function", "function": function}
    answer = chat.render(ChatPrompt.of([USER], tools=[strict])).answer
    chat.close()
    assert answer is not None
    assert answer.grammar is not None
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    begin = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": '
    assert is_whole(matcher, model, "Hello <b>there</b>.")
    assert is_whole(matcher, model, begin + '{"city": "A"}}\n</tool_call>')
    tokens = model.vocab.tokenize(begin + '{"town": 5', add_special=False)
    assert matcher.try_consume_tokens(tokens) < len(tokens)


RIGHT, WRONG = '{"city": "A"}', '{"town": 5}'
CODED = "<function=get_weather>\n<parameter=city>\n@\n</parameter>\n</function>"
LLAMA_CALL = '{"name": "get_weather", "parameters": @}'
# Calls as models write them, with the arguments left out, by the stem of the template; and if the grammar of calls
# has this spelling too.
SPELLED: list[tuple[str, str, bool]] = [
    ("meta-llama-Llama-3.1-8B-Instruct", LLAMA_CALL, True),
    ("meta-llama-Llama-3.1-8B-Instruct", f" \n[{LLAMA_CALL}]", False),
    ("meta-llama-Llama-3.1-8B-Instruct", f"It is<|python_tag|>{LLAMA_CALL}", True),
    ("meta-llama-Llama-3.1-8B-Instruct", f"{LLAMA_CALL}; {LLAMA_CALL}", False),
    ("Qwen3-Coder", f"<tool_call>\n{CODED}\n</tool_call>", True),
    ("Qwen3-Coder", f"Let me see.\n{CODED}", True),
    ("ibm-granite-granite-3.3-2B-Instruct", 'Hm <tool_call>[{"name": "get_weather", "arguments": @}]', False),
    ("CohereForAI-c4ai-command-r-plus-tool_use", 'Action: ```json\n[{"tool_name": "get_weather", "parameters": @}]\n```', True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "is_written"), SPELLED, ids=range(len(SPELLED)))
def test_strict_tools_constrain_every_spelling_of_a_call_that_is_read_as_one(
    name: str, text: str, is_written: bool, model: Model, guidance: Guidance
) -> None:
    answer = answer_of(model, name, strict=True)
    assert answer.grammar is not None
    matcher = guidance.compile("tools", answer.grammar).start().matcher
    right, wrong = (RIGHT, WRONG)
    if CODED in text:
        right, wrong = "A", "A\n</parameter>\n<parameter=x>\n5"
    called = text.replace("@", right)
    _, _, calls = channels_of(OutputParser(answer.output_format, answer.tools), [called])
    assert {name for name, _ in calls} == {"get_weather"}
    assert is_whole(matcher, model, called) is is_written
    # The last call is wrong.
    begin, _, end = text.rpartition("@")
    written = begin.replace("@", right) + wrong + end
    tokens = model.vocab.tokenize(written, add_special=False)
    assert matcher.deep_copy().try_consume_tokens(tokens) < len(tokens)
    for free in ("Hello <b>there</b>.", "A list: [1, {}]"):
        assert is_whole(matcher, model, free)


@pytest.mark.parametrize("is_bare", [True, False])
def test_strict_tools_of_a_notation_without_markers_leave_text_free(
    is_bare: bool, model: Model, guidance: Guidance
) -> None:
    grammar = CallGrammar(JsonCalls((), is_bare=is_bare), parameters_of([TOOL]), True, {})
    matcher = guidance.compile("tools", grammar.strict()).start().matcher
    assert is_whole(matcher, model, "Hello.")
    call = '{"name": "get_weather", "arguments": {"city": "A"}}'
    assert is_whole(matcher, model, call)
    assert is_whole(matcher, model, call.replace("city", "town")) is not is_bare


def only(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


# Schemas that some template cannot write.
UNUSUAL: list[Any] = [
    None, {}, {"type": "object"}, {"type": "object", "required": []}, only(description="x"),
    only(anyOf=[{"type": "string"}, {"type": "null"}], default=None),
    only(type=["string", "null"]), only(enum=["x", 1, None]), only(type="array"),
    only(type="array", items={"anyOf": [{"type": "string"}, {"type": "integer"}]}),
    only(type="array", prefixItems=[{"type": "string"}], items=False), only(type="object"),
    only(type="object", additionalProperties={"type": "integer"}),
    only(type="object", properties={"b": {"type": ["array", "null"], "items": only(enum=[1])}}),
    {"type": "object", "properties": {"a": True}},
    {**only(**{"$ref": "#/$defs/A"}), "$defs": {"A": only(type="integer")}},
    {"anyOf": [only(type="string"), only(type="integer")]},
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", FEW_IN_FAST, ids=lambda path: path.stem)
def test_every_template_writes_a_tool_whatever_its_schema_says(path: Path, model: Model) -> None:
    chat = ChatTokenizer(model.vocab, path.read_text(), None)
    for schema in UNUSUAL:
        function = {"name": "book_trip"} | ({} if schema is None else {"parameters": schema})
        prompt = ChatPrompt.of([USER], tools=[{"type": "function", "function": function}])
        text = "".join(piece.text for piece in chat.render(prompt).pieces)
        assert "book_trip" in text, schema
    chat.close()
