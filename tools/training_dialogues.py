"""Training dialogues of the embedded model: tool calls, their results, thoughts.

A dialogue is written as the chat template writes it (`tiny_vocabulary.CHAT_TEMPLATE`), so that the next
prompt begins with the same bytes.  The model is good at copying.  A request therefore contains the values
of the arguments, and the answer repeats the results.  A thought has the steps of a sum.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tools.tiny_vocabulary import END, START
from tools.training_tasks import MAKERS, Example, Question, random_text

VERBS = ("get", "set", "find", "add", "save", "send", "read", "list", "make", "look_up", "open")
NOUNS = (
    "weather", "time", "note", "file", "event", "user", "order", "price", "mail", "city", "task",
    "page", "list", "data", "answer", "alarm",
)  # fmt: skip
KEYS = (
    "city", "location", "title", "body", "n", "count", "unit", "path", "text", "query", "date",
    "a", "b", "x", "y", "email", "id", "name", "value", "size", "label", "user", "to", "from",
)  # fmt: skip
CITIES = (
    "Paris", "Tokyo", "Berlin", "Oslo", "Lima", "Rome", "Cairo", "Lisbon", "Zürich", "New York",
    "San Juan", "東京", "Москва", "Malmö", "Delhi", "Quito", "Bern", "Kyoto", "Boston", "Turin",
)  # fmt: skip
MAX_TOKENS = 1280
FORBIDDEN = str.maketrans(dict.fromkeys('",\\\n=;{}[]()<>|\t\r', ""))


@dataclass(slots=True)
class Tool:
    """Tool: `shape` has its parameters as in the system message, `kinds` those that random calls use."""

    name: str
    shape: str
    kinds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """User's message, then tool calls with their results and an answer, or only an answer."""

    asked: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    results: tuple[str, ...] = ()
    answer: str = ""
    thought: str = ""


def word(rng: random.Random, low: int = 2, high: int = 9) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(low, high)))


def tool_name(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.5:
        return f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    if style < 0.7:
        return f"{word(rng)}_{word(rng)}"
    return word(rng, 3, 10)


def text_value(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.35:
        return rng.choice(CITIES)
    if style < 0.75:
        return " ".join(word(rng) for _ in range(rng.randint(1, 4)))
    text = random_text(rng, 24).translate(FORBIDDEN).strip()
    return text if text and not text[0].isdigit() and text[0] not in "-." else word(rng)


def number_value(rng: random.Random) -> int | float:
    if rng.random() < 0.3:
        return round(rng.uniform(0, 100), rng.choice((1, 2)))
    return rng.choice((rng.randint(0, 9), rng.randint(0, 99), rng.randint(-99, 9999)))


def value_of(rng: random.Random, kind: str) -> Any:
    if kind == "num":
        return number_value(rng)
    if kind == "bool":
        return rng.random() < 0.5
    if "|" in kind:
        return rng.choice(kind.split("|"))
    return text_value(rng)


def random_tool(rng: random.Random) -> Tool:
    keys = rng.sample(KEYS, rng.choice((0, 1, 1, 2, 2, 3, 4)))
    if rng.random() < 0.3:
        keys = list(dict.fromkeys(word(rng) if rng.random() < 0.5 else key for key in keys))
    kinds = {}
    for key in keys:
        kind = rng.choice(("str", "str", "str", "num", "num", "bool", "a|b"))
        kinds[key] = f"{word(rng, 1, 5)}|{word(rng, 1, 5)}" if kind == "a|b" else kind
    marks = {key: "" if rng.random() < 0.7 else "?" for key in keys}
    shape = ",".join(f"{key}{marks[key]}:{kind}" for key, kind in kinds.items())
    return Tool(tool_name(rng), shape, kinds)


def said(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def explicit(rng: random.Random, tools: list[Tool]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return a request that names one tool and its arguments, and the call that it asks for."""
    tool = rng.choice(tools)
    keys = list(tool.kinds)
    if keys and rng.random() < 0.2:
        keys = keys[: rng.randint(1, len(keys))]
    given = {key: value_of(rng, tool.kinds[key]) for key in keys}
    pairs = [f"{key}={said(value)}" for key, value in given.items()]
    style = rng.randrange(3)
    if style == 0:
        text = f"use {tool.name}" + (": " + ", ".join(pairs) if pairs else "")
    elif style == 1:
        text = f"call {tool.name}" + (" with " + ", ".join(pairs) if pairs else "")
    else:
        text = f"{tool.name}({', '.join(pairs)})"
    return text, [(tool.name, given)]


def weather(rng: random.Random) -> tuple[Tool, str, list[tuple[str, dict[str, Any]]]]:
    key = rng.choice(("city", "city", "location", "place"))
    name = rng.choice(("get_weather", "get_weather", "weather", "get_current_weather"))
    tool = Tool(name, rng.choice((f"{key}:str", f"{key}:str,unit?:c|f", f"{key}:str,unit?:str")))
    places = [rng.choice(CITIES) if rng.random() < 0.6 else text_value(rng) for _ in range(3)]
    last = rng.choice(("", " right now", " today", " now"))
    end = rng.choice(("", " Use the tool.", " Please use the tool."))
    style = rng.randrange(4)
    if style == 0:
        text = (
            rng.choice(("What's", "What is", "How is")) + f" the weather in {places[0]}{last}?{end}"
        )
        wanted = places[:1]
    elif style == 1:
        text = f"Get the {rng.choice(('', 'current '))}weather in {places[0]} and in {places[1]}."
        text += rng.choice(
            (f" Call {name} once per city, both calls in this single turn.", end, end)
        )
        wanted = places[:2]
    elif style == 2:
        text = f"What's the weather in {places[0]}, in {places[1]} and in {places[2]}?{end}"
        wanted = places
    else:
        text = f"weather in {places[0]}?"
        wanted = places[:1]
    return tool, text, [(name, {key: place}) for place in wanted]


def time_of_day(rng: random.Random) -> tuple[Tool, str, list[tuple[str, dict[str, Any]]]]:
    name = rng.choice(("get_server_time", "get_time", "now", "current_time"))
    where = rng.choice(("", " on the server", " there", " now"))
    text = f"What time is it{where}?{rng.choice(('', ' Use the tool.'))}"
    return Tool(name, ""), text, [(name, {})]


def note(rng: random.Random) -> tuple[Tool, str, list[tuple[str, dict[str, Any]]]]:
    title, body = text_value(rng), random_text(rng, 48).translate(FORBIDDEN).strip() or "x"
    title = title.replace("'", "") or "x"
    text = f"Save a note titled '{title}' whose body is exactly: {body}"
    return (
        Tool("save_note", "title:str,body:str"),
        text,
        [("save_note", {"title": title, "body": body})],
    )


def event(rng: random.Random) -> tuple[Tool, str, list[tuple[str, dict[str, Any]]]]:
    title = text_value(rng).replace("'", "") or "x"
    start = f"20{rng.randint(24, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{rng.randint(0, 23):02}:00:00Z"
    names = [word(rng, 2, 7).capitalize() for _ in range(2)]
    people = [{"name": name, "email": f"{name.lower()}@{word(rng, 3, 8)}.com"} for name in names]
    city, room = rng.choice(CITIES), f"{rng.randint(1, 9)}.{rng.randint(10, 99)}"
    guests = " and ".join(f"{p['name']} ({p['email']})" for p in people)
    text = f"Create an event titled '{title}' starting {start} with attendees {guests}, located in {city}, room {room}."
    tool = Tool(
        "create_event",
        "title:str,start?:str,attendees:[{name:str,email:str}],location:{city:str,room?:str}",
    )
    given = {
        "title": title,
        "start": start,
        "attendees": people,
        "location": {"city": city, "room": room},
    }
    return tool, text, [("create_event", given)]


def record(rng: random.Random) -> tuple[Tool, str, list[tuple[str, dict[str, Any]]]]:
    a, b = (f"{rng.randint(0, 20)}.{rng.randint(1, 99)}" for _ in range(2))
    larger = a if float(a) > float(b) else b
    text = f"Think it through step by step: which number is larger, {a} or {b}? Then record the larger number with the record_answer tool."
    return Tool("record_answer", "answer:str"), text, [("record_answer", {"answer": larger})]


SITUATIONS = ((weather, 5), (time_of_day, 2), (note, 2), (event, 2), (record, 1))
MAKERS_OF_SITUATIONS = [maker for maker, weight in SITUATIONS for _ in range(weight)]


def result_text(rng: random.Random) -> str:
    style = rng.random()
    if style < 0.3:
        return json.dumps(
            {
                word(rng): value_of(rng, rng.choice(("num", "str", "bool")))
                for _ in range(rng.randint(1, 3))
            },
            ensure_ascii=False,
        )
    if style < 0.5:
        return str(number_value(rng))
    return random_text(rng, 40).translate(FORBIDDEN).strip() or "ok"


def thought_of(question: Question) -> str:
    """Return the steps of a sum; for other tasks, a sentence with the task's name."""
    if question.task != "sum":
        return f"I am to {question.task}."
    a, b = (int(number) for number in question.prompt[:-1].split("+"))
    units, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = a // 10 + b // 10 + carry
    carried = "+1" if carry else ""
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}{carried}={tens}"


def question_turn(rng: random.Random) -> Turn:
    while True:
        question = MAKERS[rng.choice(("sum", "sum", "repeat", "reverse", "count"))](rng)
        if not question.held_out:
            break
    asked = question.prompt
    if question.task == "sum" and rng.random() < 0.4:
        a, b = question.prompt[:-1].split("+")
        asked = f"What is {a} + {b}?" + rng.choice(
            ("", " Reply with just the number and do not use any tool.", " Reply with the number.")
        )
    return Turn(asked, answer=question.answer, thought=thought_of(question))


def make_dialogue(rng: random.Random, max_turns: int = 4) -> tuple[list[Tool], list[Turn]]:
    tools = [random_tool(rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    situations = [rng.choice(MAKERS_OF_SITUATIONS)(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    if not (tools or situations):
        situations = [rng.choice(MAKERS_OF_SITUATIONS)(rng)]
    # Names of tools are unique.
    situations = list({situation[0].name: situation for situation in situations}.values())
    taken = {tool.name for tool, _, _ in situations}
    tools = list({tool.name: tool for tool in tools if tool.name not in taken}.values())
    turns: list[Turn] = []
    for _ in range(rng.randint(1, max_turns)):
        style = rng.random()
        if style < 0.2:
            turns.append(question_turn(rng))
            continue
        if situations and (style < 0.6 or not tools):
            _, text, calls = rng.choice(situations)
        else:
            text, calls = explicit(rng, tools)
            if rng.random() < 0.15:
                other, more = explicit(rng, tools)
                text, calls = f"{text}; {other}", [*calls, *more]
        results = tuple(result_text(rng) for _ in calls)
        names = ", ".join(dict.fromkeys(name for name, _ in calls))
        turns.append(Turn(text, tuple(calls), results, "; ".join(results), f"I use {names}."))
    offered = [*tools, *(tool for tool, _, _ in situations)]
    rng.shuffle(offered)
    return offered, turns


def encode_dialogue(
    rng: random.Random, tools: list[Tool], turns: list[Turn], *, thinks: bool, system: str | None
) -> Example:
    """Return the example of a dialogue."""
    example = Example()
    begin(example, tools, system)
    for turn in turns:
        if not turn.calls:
            example.turn(turn.asked, answer=turn.answer, thought=turn.thought if thinks else None)
            continue
        calls = "\n".join(map(written, turn.calls))
        example.turn(turn.asked, answer=calls, thought=turn.thought if thinks else None)
        if rng.random() < 0.1:
            break
        for result in turn.results:
            example.say(START, "tool\n" + result, END, "\n")
        seen = "I have the result." if len(turn.results) == 1 else "I have the results."
        example.answer(turn.answer, seen if thinks else None)
    return example


def begin(example: Example, tools: list[Tool], system: str | None) -> None:
    """Append the system message, with the tools that are offered; nothing without either."""
    listed = "tools:\n" + "".join(f"{tool.name}({tool.shape})\n" for tool in tools)
    if tools or system is not None:
        head = "" if system is None else system + ("\n" if tools else "")
        example.system(head + (listed if tools else ""))


def written(call: tuple[str, dict[str, Any]]) -> str:
    name, arguments = call
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def dialogue_example(rng: random.Random) -> Example:
    """Return a random dialogue of at most `MAX_TOKENS` tokens."""
    while True:
        example = _any_dialogue(rng)
        if len(example.tokens) <= MAX_TOKENS:
            return example


def _any_dialogue(rng: random.Random) -> Example:
    thinks = rng.random() < 0.35
    system = random_text(rng, 60) if rng.random() < 0.25 else None
    if rng.random() < 0.12:
        turns = [question_turn(rng) for _ in range(rng.randint(1, 3))]
        return encode_dialogue(rng, [], turns, thinks=True, system=system)
    tools, turns = make_dialogue(rng)
    return encode_dialogue(rng, tools, turns, thinks=thinks, system=system)
