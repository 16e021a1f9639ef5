"""check_gbnf reads GBNF as llama.cpp does, and refuses what would hang, crash or mislead it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm import InvalidRequestError
from cllm.engine.constraints.gbnf import check_gbnf
from cllm.engine.constraints.gbnf_rules import components, mask_of

N_VOCAB = 128_000


def grammar_files() -> list[Path]:
    """The grammars that come with llama.cpp, where `build_llama.sh` has put its source."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return sorted(cache.glob("cllm/src/llama.cpp-*/grammars/*.gbnf"))


@pytest.fixture
def llama_cpp_grammars() -> list[str]:
    """Real grammars."""
    files = grammar_files()
    if not files:
        pytest.skip("the source of llama.cpp is not in the cache: build_llama.sh puts it there")
    return [file.read_text(encoding="utf-8") for file in files]


def refusal(text: str) -> str | None:
    """What a grammar should have been, or None if it may be used."""
    try:
        check_gbnf(text, N_VOCAB)
    except InvalidRequestError as error:
        return error.limit if error.field == "grammar" else ""
    return None


def rules(*lines: str) -> str:
    return "\n".join(lines)


def chain(n: int, form: str, end: str = '"a"') -> str:
    """N rules, each of which is `form` of the next."""
    links = [f"r{i} ::= {form.format(next=f'r{i + 1}')}" for i in range(n)]
    return rules("root ::= r0", *links, f"r{n} ::= {end}")


# As llama.cpp's converter writes them: nested counts, each ending where something else begins.
JSON_OF_A_SCHEMA = rules(
    r'char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})',
    'item ::= "{" space item-name-kv "," space item-age-kv "}" space',
    'item-age ::= ([0-9] | ([1-8] [0-9] | [9] [0-9]) | "1" ([0-4] [0-9] | [5] "0")) space',
    r'item-age-kv ::= "\"age\"" space ":" space item-age',
    r'item-name ::= "\"" char{1,100} "\"" space',
    r'item-name-kv ::= "\"name\"" space ":" space item-name',
    'root ::= "[" space item ("," space item){9,99} "]" space',
    r'space ::= | " " | "\n" [ \t]{0,20}',
)
# Of all that the syntax has; llama.cpp accepts each of them (`test_trial` asks it).
GOOD = {
    "star of a star": 'root ::= ("a"*)* "b"',
    "star of an optional rule": "root ::= (x)+\nx ::= [a-z]?",
    "string": 'root ::= "ab"',
    "empty": "root ::=",
    "empty string": 'root ::= "" | "a"',
    "empty alternative": 'root ::= | "a" |',
    "escapes": r'root ::= "\x41\u00e9\U0001F600\t\r\n\\\"\[\]\-"',
    "classes": r"root ::= [a-z] [^a-z] [-a] [a-] [\]\-x] [--/] [^\x00-\x1F] [é-ü]",
    "any": "root ::= . .*",
    "repetitions": 'root ::= "a"* "b"+ "c"? "d"{2} "e"{2,} "f"{2,4} "g"{ 0 , 3 } "h"{0}',
    "repetition of a repetition": 'root ::= "a"{2}{3} "b"+? "c"?{2}',
    "names": 'root ::= A-1 2b\nA-1 ::= "a"\n2b ::= -\n- ::= "c"',
    "comments": '# before\nroot ::= "a" # after\n  # between\nx ::= "b"#',
    "lines": 'root ::= (\n "a" # why\n | \n "b"\n) |\n "c"\r\n\r\nx ::=\n"d"\r',
    "no spaces": 'root::="a"|("b")x\nx::="c"',
    "recursion": 'root ::= "(" root ")" | "a" root | ""',
    "tokens": "root ::= <[5]> !<[6]>* <[0]>",
    "unused rules": 'root ::= "a"\nx ::= y\ny ::= "b"',
    "names that are not words": 'root ::= "日本" [ぁ-ゟ]',
    "counts that end": JSON_OF_A_SCHEMA,
    "counts of other characters": 'root ::= x{1,200}\nx ::= [a-z]{1,200} "."',
    "few empty parts": 'root ::= ("a"? "b"?){8} "c"? "d"?',
    "all repetitions": 'root ::= "a"{1000} "b"{0,500} "c"{1000,}',
}
# What was found to hang llama.cpp or to end the process, and its relatives.
HAZARDS = {
    "fewer at most than at least": ('root ::= "a"{5,2}', "m <= n"),
    "50,000 brackets": ("root ::= " + "(" * 50_000, "at most 64 brackets"),
    "65 brackets": ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "at most 64 brackets"),
    "chain of 3,000": (chain(3000, "{next}"), "at most 2000 rules"),
    "chain of 257": (chain(257, "{next}"), "at most 256 deep"),
    "chain with two ways": (chain(40, "{next} | {next}"), "fewer ways"),
    "chain with two ways, again and again": (
        rules(chain(16, "{next} | {next}"), 'x ::= "b" r0{0,900}'),
        "fewer ways",
    ),
    "chain behind what may be empty": (chain(40, 'e {next} | {next} "b"') + "\ne ::= |", "ways"),
    "400 empty parts": ("root ::= " + '"a"? ' * 400 + '"a"', "at most 64 parts in a row"),
    "400 times an empty part": ('root ::= ("a"?){400} "a"', "at most 16 times"),
    "empty parts multiplied": ('root ::= ((("a"?){100}){100}){100}', "at most 16 times"),
    "few empty parts multiplied": ('root ::= ((("a"?){3}){3}){3}', "at most 16 times"),
    "empty rule repeated": ('root ::= x{0,20}\nx ::= y\ny ::= "a"?', "at most 16 times"),
    "star of several empty parts": ("root ::= ([a-z]? [a-z]*)*", "may all be empty"),
    "star of an option": ('root ::= "a"?*', "something that may be empty"),
    "plus of a star": ('root ::= "a"*+', "something that may be empty"),
    "counts of the same": ("root ::= x{1,100}\nx ::= [a-z]{1,100}", "multiply to at most 2000"),
    "counts through three rules": (
        "root ::= x{2,20} x\nx ::= y{3} y\ny ::= (z | z)\nz ::= [a-z]{1,50}",
        "multiply to at most 2000",
    ),
    "counts in brackets": ('root ::= (("a"{1,100}){1,100}){1,100}', "rules times their repet"),
    "counts stacked": ('root ::= "a"{100}{100}', "rules times their repet"),
    "a long string repeated": ('root ::= "' + "a" * 60_000 + '"{1000}', "at most 200000"),
    "many repetitions": ("root ::= " + '"a"* ' * 2001, "at most 2000 rules"),
    "a large repetition": ('root ::= "a"{1001}', "at most 1000 repetitions"),
    "a larger repetition": ('root ::= "a"{0,' + "9" * 9000 + "}", "at most 1000 repetitions"),
    "left recursion": ('root ::= root "a" | "b"', "left recursion"),
    "left recursion of two": ('root ::= "x" a\na ::= b "y"\nb ::= a', "left recursion"),
    "left recursion in brackets": ('root ::= ("a" | (root "b"))', "left recursion"),
    "left recursion in a repetition": ('root ::= (root "b")* "a"', "left recursion"),
    # llama.cpp sees only alternatives that are written empty, and hangs.
    "left recursion behind what may be empty": (
        'root ::= a root "z" | "x"\na ::= b\nb ::= c\nc ::= "" | "e"',
        "left recursion",
    ),
    "NUL": ('root ::= "\0"', "without NUL"),
    "escaped NUL": (r'root ::= "a\x00"', "a character that text can have"),
    "beyond Unicode": (r'root ::= "\U00110000"', "a character that text can have"),
    "lone surrogate": ('root ::= "\ud800"', "without lone surrogates"),
    "range downwards": ("root ::= [z-a]", "a range that goes up"),
    "class of nothing": ("root ::= []", "a class that some character is in"),
    "class of NUL": (r"root ::= [\x00]", "a class that some character is in"),
    "class of all but all": (r"root ::= [^\x00-zz-\U0010FFFF]", "some character is in"),
    "token out of range": ("root ::= <[99999999]>", "token ids 0 to 127999"),
    "token far out of range": ("root ::= <[" + "9" * 9000 + "]>", "token ids 0 to 127999"),
    "a long token": ("root ::= <" + "a" * 300 + ">", "at most 256 bytes"),
    # `ab` fits `"a"` and is not token 5; told that it was sampled, llama.cpp ends the process.
    "any token after a character": ('root ::= "a" !<[5]>', "no token after a character"),
    "token after a class": ("root ::= x <[5]>\nx ::= [a-z]*", "no token after a character"),
    "token after what it begins with": ('root ::= "<" <think>', "no token after a character"),
    "token after some of it": ('root ::= "th" "x"? <think>', "no token after a character"),
    "token after any character": ("root ::= <think> .* </think>", "no token after a character"),
    "a rule twice": ('root ::= "a"\nroot ::= "b"', "one definition of each rule"),
}
MALFORMED = {
    "nothing": ("", "named root"),
    "comments alone": ("# a\n# b", "named root"),
    "no root": ('a ::= "b"', "named root"),
    "undefined": ("root ::= x", "a rule that is defined"),
    "root undefined": ("x ::= root", "a rule that is defined"),
    "no name": ('::= "a"', "the name of a rule"),
    "underscore": ('root_1 ::= "a"', "::= after"),
    "no rule": ("root", "::= after"),
    "open string": ('root ::= "a', 'a closing "'),
    "open class": ("root ::= [a", "or ]"),
    "open range": ("root ::= [a-", "or ]"),
    "open escape": ('root ::= "\\', 'a closing "'),
    "unknown escape": (r'root ::= "\q"', r"\u1234"),
    "short escape": (r'root ::= "\u12"', r"\u1234"),
    "open group": ('root ::= ("a"', "a group, or )"),
    "closed twice": ('root ::= "a")', "a new line"),
    "line in a rule": ('root ::= "a"\n"b"', "the name of a rule"),
    "nothing to repeat": ("root ::= *", "a repetition of something"),
    "empty string repeated": ('root ::= "a" ""*', "a repetition of something"),
    "no repetition repeated": ('root ::= "a"{0}{2}', "a repetition of something"),
    "no least": ('root ::= "a"{,3}', "{m,n}"),
    "open count": ('root ::= "a"{2', "{m,n}"),
    "count of nothing": ('root ::= "a"{}', "{m,n}"),
    "no token": ("root ::= !x", "a token"),
    "open token": ("root ::= <x", "a token"),
    "token id without end": ("root ::= <[5>", "a token"),
    "too long": ("#" + "é" * 40_000, "at most 65536 bytes"),
    "far too long": ("#" * 100_000, "at most 65536 bytes"),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_llama_cpp_can_follow_is_accepted(name: str) -> None:
    assert refusal(GOOD[name]) is None


def test_all_grammars_of_llama_cpp_are_accepted(llama_cpp_grammars: list[str]) -> None:
    assert [refusal(text) for text in llama_cpp_grammars] == [None] * len(llama_cpp_grammars)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= <think> !</think>* </think> .*",
        'root ::= <|channel|> "analysis" <|message|> !<|end|>* <|end|>',
        r'root ::= <tool_call> "{" [^}]* "}" [ \n]* </tool_call>',
    ],
)
def test_tokens_between_texts_that_are_not_part_of_them_are_accepted(text: str) -> None:
    assert refusal(text) is None


@pytest.mark.parametrize("name", HAZARDS)
def test_what_would_hang_or_end_the_process_is_refused(name: str) -> None:
    text, limit = HAZARDS[name]
    assert limit in (refusal(text) or "accepted")


@pytest.mark.parametrize("name", MALFORMED)
def test_what_llama_cpp_cannot_read_is_refused(name: str) -> None:
    text, limit = MALFORMED[name]
    assert limit in (refusal(text) or "accepted")


def test_a_grammar_that_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must be a string"):
        check_gbnf(b'root ::= "a"', N_VOCAB)  # type: ignore[arg-type]  # what is refused


def test_the_error_says_the_line_and_what_is_there() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_gbnf('root ::= x\n\nx ::= "a"{7,3} | "b"\n', N_VOCAB)
    assert caught.value.value == 'line 3: {7,3} | "b"'
    assert str(caught.value).startswith("grammar is 'line 3: {7,3}")


def test_64_brackets_within_each_other_are_not_too_many() -> None:
    check_gbnf("root ::= " + "(" * 64 + '"a"' + ")" * 64, N_VOCAB)


def test_a_chain_behind_characters_may_be_long() -> None:
    """llama.cpp walks along first parts alone."""
    check_gbnf(chain(1500, '"a" {next}'), N_VOCAB)


def fill(start: str, unit: str, end: str = "") -> str:
    """A grammar of almost 64 KiB."""
    return start + unit * ((65_536 - len(start) - len(end)) // len(unit)) + end


@pytest.mark.full
@pytest.mark.timeout(20)
def test_the_largest_grammars_take_no_time() -> None:
    """A few hundred milliseconds in all; what is not linear would take minutes."""
    accepted = [
        fill('root ::= "', "a", '"'),
        fill("root ::= [", "a-z", "]"),
        fill('root ::= "a"', '|"b"'),
        fill('root ::= "a"', "|"),
        fill('x ::= "a"\nroot ::= x', " x"),
        fill('x ::= "a"\nroot ::= x', "|x"),
        fill('root ::= "a"\n', "#\n"),
        fill("root ::= <a>", "<a>"),
        rules("root ::= r0", *(f'r{i} ::= "a" r{i * i % 1500} | "b"' for i in range(1500))),
    ]
    assert [refusal(text) for text in accepted] == [None] * len(accepted)
    for text in (fill("root ::= ", '("a")'), fill("root ::= ", '"a"? '), fill("root ::= ", "(")):
        assert refusal(text)


ALPHABET = 'abrot ::=\n"[]^-()|*+?{},123<>!.\\x#é'
PIECES = st.sampled_from(["root ::= ", "root", '"a"', "[a-z]", "(", ")", "|", "{1,3}", "\nx ::= "])


@given(st.lists(st.one_of(PIECES, st.text(ALPHABET, max_size=4)), max_size=30).map("".join))
def test_any_text_is_accepted_or_refused_as_a_request(text: str) -> None:
    assert refusal(text) != ""


N_RULES = 5
SYMBOLS = st.sampled_from(["t", *map(str, range(N_RULES))])
SMALL_GRAMMARS = st.lists(
    st.lists(st.lists(SYMBOLS, max_size=3), min_size=1, max_size=3),
    min_size=N_RULES,
    max_size=N_RULES,
)


@given(SMALL_GRAMMARS)
def test_left_recursion_is_found_exactly(grammar: list[list[list[str]]]) -> None:
    empty: set[str] = set()
    begins: set[tuple[int, int]] = set()
    for _ in range(N_RULES + 1):
        for i, alternatives in enumerate(grammar):
            if any(all(s in empty for s in symbols) for symbols in alternatives):
                empty.add(str(i))
    for i, alternatives in enumerate(grammar):
        for symbols in alternatives:
            for symbol in symbols:
                if symbol != "t":
                    begins.add((i, int(symbol)))
                if symbol not in empty:
                    break
    for k in range(N_RULES):
        begins |= {(i, j) for i, m in begins if m == k for n, j in begins if n == k}
    written = [
        " | ".join(
            " ".join('"t"' if s == "t" else f"r{s}" for s in symbols) or '""' for symbols in a
        )
        for a in grammar
    ]
    text = rules("root ::= r0", *(f"r{i} ::= {line}" for i, line in enumerate(written)))
    if any(i == j for i, j in begins):
        assert "left recursion" in (refusal(text) or "accepted")
    else:
        assert refusal(text) is None


@given(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=8, max_size=8))
def test_components_are_those_that_reach_each_other_and_come_after_what_they_reach(
    graph: list[list[int]],
) -> None:
    reach = {(i, i) for i in range(8)} | {(i, j) for i in range(8) for j in graph[i]}
    for k in range(8):
        reach |= {(i, j) for i, m in reach if m == k for n, j in reach if n == k}
    found = components(graph)
    place = {node: index for index, nodes in enumerate(found) for node in nodes}
    assert sorted(place) == list(range(8))
    for i in range(8):
        for j in range(8):
            if (i, j) in reach:
                assert place[j] <= place[i]
                assert (place[i] == place[j]) == ((j, i) in reach)


def test_sets_of_characters_tell_ascii_apart_and_leave_nul_out() -> None:
    assert mask_of(ord("a"), ord("c")) == mask_of(ord("a")) | mask_of(ord("b")) | mask_of(ord("c"))
    assert mask_of(0) == 0
    assert mask_of(0x80, 0x10FFFF) == mask_of(0xE9) == mask_of(0, 0xE9) & mask_of(0xE9)
    assert mask_of(0x110000, 0x110001) == 0
