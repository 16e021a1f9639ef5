"""Cases of hazard table 1.6 for the engine: grammars, schemas and regular expressions."""

from __future__ import annotations

import re
from typing import Any

from cllm import Completion, GenerationError
from cllm.engine.sampling_params import (
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
)
from tests.engine.constraints.test_gbnf import MALFORMED, chain
from tests.reliability.engine_hazard_case import (
    INF,
    N_VOCAB,
    NAN,
    Scene,
    Topic,
    WrongAnswerError,
)

TOPIC = Topic()
wrong: Any  # a loop variable of this file; some of its values have a wrong type
EXPONENTIAL = "1.6 exponential ways to the first character"
EMPTY = "1.6 optional parts by the hundred"
DEEP = "1.6 deep brackets and long chains of rules"
DEAD_END = "1.6 dead ends"
SYNTAX = "1.6 grammars that llama.cpp cannot read"
LARGE = "1.6 repetitions"
SCHEMA, REGEX = "1.6 schemas that cost too much or are none", "1.6 regular expressions"
# Rows of the malformed grammars of `tests/engine/constraints/test_gbnf.py`, by a word in the grammar's name;
# the first match counts.
ROWS = (
    ("fewer at most", "1.6 max < min in a repetition"), ("bracket", DEEP), ("65 rep", DEEP),
    ("token", "1.6 token references out of range"), ("range downwards", DEAD_END),
    ("class", DEAD_END), ("NUL", DEAD_END), ("beyond Unicode", DEAD_END), ("surrogate", DEAD_END),
    ("repetition", LARGE),
)  # fmt: skip
# Grammars that hang llama.cpp or end its process, and that llguidance follows quickly.
FOLLOWED = {
    "a chain of 3,000 rules": (DEEP, chain(3000, "{next}"), "a"),
    "chain with two ways": (EXPONENTIAL, chain(40, "{next} | {next}"), "a"),
    "400 empty parts": (EMPTY, "root ::= " + '"a"? ' * 400 + '"a"', "a+"),
    "empty parts multiplied": (EMPTY, 'root ::= ((("a"?){100}){100}){100} "b"', "a*b?"),
    "star of several empty parts": (EMPTY, "root ::= ([a-z]? [a-z]*)* [.]", r"[a-z]*\.?"),
    "left recursion": ("1.6 left recursion", 'root ::= root "a" | "b"', "ba*"),
    "left recursion behind what may be empty": (
        "1.6 left recursion", 'root ::= a root "z" | "x"\na ::= b\nb ::= c\nc ::= "" | "e"', "e*xz*",
    ),
    "any token after a character": (
        "1.6 accept of a token that does not match", 'root ::= "a" !<[5]>', "a.?",
    ),
}  # fmt: skip


async def ask(scene: Scene, **sampling: Any) -> Completion:
    return await scene.ask(temperature=0, **sampling)


# --- Grammars that are refused as they are read ----------------------------------------------
TOPIC.row = SYNTAX
for name, (text, limit) in MALFORMED.items():
    row = next((row for word, row in ROWS if word in name), SYNTAX)
    # The messages in `MALFORMED` are for a vocabulary of 128,000 tokens.
    says = "token ids 0 to 259" if "127999" in limit else limit
    TOPIC.refuse(
        f"malformed grammar: {name}", ask, "grammar is ", says if text else "must be text that is not empty",
        row=row, grammar=text, in_full_only=row == SYNTAX,
    )  # fmt: skip
for wrong in (b'root ::= "a"', 5, ["root"], True):
    TOPIC.refuse(
        f"a grammar that is {wrong!r}", ask, f"grammar is {wrong!r}, must be text", grammar=wrong
    )
TOPIC.refuse(
    "a grammar of more than 64 KiB", ask, f"at most {MAX_GRAMMAR_BYTES} bytes", row=LARGE,
    grammar='root ::= "a"\n' + "#" * MAX_GRAMMAR_BYTES,
)  # fmt: skip
for token in (N_VOCAB, 2**31, 2**64):
    TOPIC.refuse(
        f"token {token} in a grammar", ask, f"token ids 0 to {N_VOCAB - 1}",
        row="1.6 token references out of range", grammar=f"root ::= <[{token}]>",
    )  # fmt: skip

# --- Grammars that are refused by a trial in another process ---------------------------------
TOPIC.refuse(
    "a long string repeated", ask, "one that can be followed", row=LARGE,
    grammar='root ::= "' + "a" * 60_000 + '"{1000}',
)  # fmt: skip
TOPIC.refuse(
    "a dead end", ask, "no other may come", row=DEAD_END, grammar='root ::= "a" <[257]> "c"'
)
TOPIC.refuse(
    "a grammar of a token by an unknown name", ask, "one token of the vocabulary",
    row="1.6 token references out of range", grammar="root ::= <|nope|>",
)  # fmt: skip


async def follow(scene: Scene, says: str, **sampling: Any) -> Completion:
    """Ask for a constrained answer; raise `WrongAnswerError` if it does not match the expression `says`."""
    completion = await scene.ask(**{"seed": 1, **sampling})
    if not re.fullmatch(says, completion.text, re.DOTALL):
        raise WrongAnswerError(f"{completion.text!r} does not match {says}")
    return completion


for sampling in (
    {}, {"temperature": 0}, {"top_k": 1}, {"top_p": 0.0}, {"mirostat": 2}, {"temperature": 100},
    {"ignore_eos": True}, {"min_tokens": 4}, {"stop": "x"},
):  # fmt: skip
    TOPIC.accept(
        f"a grammar with {sampling or 'the defaults'}", follow,
        row="1.6 samplers before the grammar", says="xyz|x?", grammar='root ::= "xyz"',
        in_full_only=len(sampling) > 0 and "top_k" not in sampling, **sampling,
    )  # fmt: skip
for name, (row, text, says) in FOLLOWED.items():
    TOPIC.accept(f"grammar: {name}", follow, row=row, says=says, grammar=text, max_tokens=12)
TOPIC.accept(
    "the end of an output before its grammar's", follow, row="1.6 accept of EOG before the end",
    says="a{4}", grammar='root ::= "a"{1000}', temperature=0,
)  # fmt: skip


async def ban(scene: Scene, *tokens: int, **sampling: Any) -> Completion:
    return await scene.ask(logit_bias=dict.fromkeys(tokens, -INF), **sampling)


DIGITS = list(b"0123456789")
TOPIC.refuse(
    "a ban of the only token that a grammar allows", lambda s: ban(s, 97, grammar='root ::= "a"'),
    "", error=GenerationError, row="1.6 samplers before the grammar",
)  # fmt: skip
TOPIC.refuse(
    "a ban of all that a regular expression allows", lambda s: ban(s, *DIGITS, regex="[0-9]+"),
    "", error=GenerationError, row="1.6 samplers before the grammar", in_full_only=True,
)  # fmt: skip

# --- Schemas ---------------------------------------------------------------------------------
TOPIC.row = SCHEMA
deep_schema: dict[str, Any] = {}
for _ in range(MAX_SCHEMA_DEPTH + 1):
    deep_schema = {"items": deep_schema}
circular: dict[str, Any] = {}
circular["items"] = circular
for claim, schema, limit in (
    ("a schema that is a number", 5, "json_schema is 5, must be a mapping, or one as JSON text"),
    ("a schema that is a list", [], "json_schema is [], must be a mapping, or one as JSON text"),
    ("a schema that is true", True, "json_schema is True, must be a mapping"),
    ("a schema of no text", "", "json_schema is '', must be text that is not empty"),
    ("a schema that is not JSON", "{", "json_schema is '{', must be JSON"),
    ("a schema of another type", "[]", "json_schema is '[]', must be an object"),
    ("a schema of NaN", {"const": NAN}, "must be JSON (Out of range float values"),
    ("a schema of 1e999", '{"const": 1e999}', "must be JSON (Out of range float values"),
    ("a schema of a lone surrogate", {"const": "\ud800"}, "must be text without lone surrogates"),
    ("a schema of an object", {"const": object()}, "must be JSON (Object of type object"),
    ("a schema nested deep", deep_schema, f"must be at most {MAX_SCHEMA_DEPTH} levels deep"),
    ("a schema of 100,000 brackets", "[" * 100_000, "must be JSON ("),
    ("a schema that contains itself", circular, "must be JSON (Circular reference"),
    ("a schema of more than 256 KiB", {"const": "x" * MAX_SCHEMA_BYTES}, f"most {MAX_SCHEMA_BYTES}"),
    ("a schema of thousands of digits", '{"const": ' + "9" * 9000 + "}", "must be JSON ("),
):  # fmt: skip
    TOPIC.refuse(claim, ask, "json_schema is ", limit, json_schema=schema)
for claim, schema, in_default in (
    ("an unknown type", {"type": "nope"}, True),
    ("a reference to nowhere", {"$ref": "#/$defs/nope"}, True),
    ("what nothing satisfies", {"type": "integer", "minimum": 3, "maximum": 2}, False),
    ("a keyword that is not supported", {"type": "array", "uniqueItems": True}, False),
    ("a pattern that is none", {"type": "string", "pattern": "(("}, False),
    ("a constant that overflows", {"const": -(2**63) + 1}, False),
    ("states without number", {"type": "integer", "multipleOf": 2**31}, False),
    ("intersections that explode", {
        "allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {"type": "string"}}} for i in range(10)]}
                  for j in range(8)]}, False),
    ("two multiples of primes", {
        "allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 99989}]}, False),
):  # fmt: skip
    TOPIC.refuse(
        f"a schema of {claim}", ask, "json_schema is ", in_full_only=not in_default,
        json_schema=schema,
    )  # fmt: skip
TOPIC.accept("a schema of an integer", follow, says="-?[0-9]+", json_schema={"type": "integer"})

# --- Regular expressions ---------------------------------------------------------------------
TOPIC.row = REGEX
for claim, regex, limit, in_default in (
    ("open brackets", "((", "must be usable", True),
    ("look-around", "(?=a)b", "must be usable", False),
    ("a back-reference", r"(a)\1", "must be usable", False),
    ("a repetition of nothing", "*", "must be usable", False),
    ("a range downwards", "[z-a]", "must be usable", False),
    ("max < min", "a{5,2}", "must be usable", False),
    ("10,000 brackets", "(" * 5000 + ")" * 5000, "must be ", False),
):
    TOPIC.refuse(
        f"an expression of {claim}", ask, "regex is ", limit, in_full_only=not in_default,
        regex=regex,
    )  # fmt: skip
TOPIC.refuse(
    "an expression that becomes too costly", ask, "cannot be followed", error=GenerationError,
    regex="((a{1,1000}){1,1000}){1,1000}", min_tokens=50, max_tokens=100, in_full_only=True,
)  # fmt: skip
for wrong in ("", 5, b"a", ["a"], True):
    TOPIC.refuse(
        f"an expression that is {wrong!r}", ask, f"regex is {wrong!r}, must be text", regex=wrong
    )
TOPIC.refuse("an expression of a lone surrogate", ask, "text without lone", regex="\ud800")
TOPIC.refuse(
    "an expression of more than 16 KiB", ask, f"at most {MAX_REGEX_BYTES} bytes",
    regex="a" * (MAX_REGEX_BYTES + 1),
)  # fmt: skip
TOPIC.accept("an expression of a star of a star", follow, says="a*", regex="(a*)*", temperature=0)
for pair in (("grammar", "regex"), ("json_schema", "regex"), ("grammar", "json_schema")):
    texts: dict[str, Any] = {"grammar": 'root ::= "a"', "json_schema": "{}", "regex": "a"}
    TOPIC.refuse(
        f"{pair[0]} and {pair[1]}", ask, f"{pair[1]} is ", f"must be left out beside {pair[0]}",
        **{name: texts[name] for name in pair},
    )  # fmt: skip

CASES = TOPIC.cases
