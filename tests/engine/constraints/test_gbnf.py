"""lark_of_gbnf reads GBNF as llama.cpp does, and what it writes means the same to llguidance."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.bindings import Model
from cllm.engine.constraints.gbnf import GbnfError, lark_of_gbnf
from cllm.engine.constraints.llguidance import Guidance
from cllm.errors import CllmError
from tests.engine.constraints.llama_grammar import (
    LlamaGrammar,
    grammars_of,
    random_grammar,
    write_vocabulary,
)

N_VOCAB = 128_000
CONTROL_NAMES = ("<think>", "</think>", "<|end|>", "<a>")


def token_of(text: str) -> int | None:
    """Return a token for each name that the vocabulary would have."""
    return CONTROL_NAMES.index(text) if text in CONTROL_NAMES else None


def refusal(text: str) -> str | None:
    """Return what a grammar must have been, or None if it can be read."""
    try:
        lark_of_gbnf(text, N_VOCAB, token_of)
    except GbnfError as error:
        return str(error)
    return None


def rules(*lines: str) -> str:
    return "\n".join(lines)


def chain(n: int, form: str, end: str = '"a"') -> str:
    """Return n rules, each of which is `form` of the next."""
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
# All that the syntax has.
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
    "a maximum that is none": 'root ::= "a"{0,2001}',
    "all repetitions": 'root ::= "a"{1000} "b"{0,500} "c"{1000,}',
}
MALFORMED = {
    "nothing": ("", "named root"),
    "comments alone": ("# a\n# b", "named root"),
    "no root": ('a ::= "b"', "named root"),
    "undefined": ("root ::= x", "a rule that is defined"),
    "root undefined": ("x ::= root", "named root"),
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
    "fewer at most than at least": ('root ::= "a"{5,2}', "m <= n"),
    "50,000 brackets": ("root ::= " + "(" * 50_000, "at most 64 brackets"),
    "65 brackets": ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "at most 64 brackets"),
    "65 repetitions": ('root ::= "a"' + "{1}" * 65, "at most 64 brackets and repetitions"),
    "a large repetition": ('root ::= "a"{2001}', "at most 2000 repetitions"),
    "a larger repetition": ('root ::= "a"{' + "9" * 9000 + ",}", "at most 2000 repetitions"),
    "NUL": ('root ::= "\0"', "without NUL"),
    "escaped NUL": (r'root ::= "a\x00"', "a character that text can have"),
    "beyond Unicode": (r'root ::= "\U00110000"', "a character that text can have"),
    "surrogate": (r'root ::= "\ud800"', "a character that text can have"),
    "range downwards": ("root ::= [z-a]", "a range that goes up"),
    "class of nothing": ("root ::= []", "a class that some character is in"),
    "class of NUL": (r"root ::= [\x00]", "a class that some character is in"),
    "class of all but all": (r"root ::= [^\x00-zz-\U0010FFFF]", "some character is in"),
    "token out of range": ("root ::= <[99999999]>", "token ids 0 to 127999"),
    "token far out of range": ("root ::= <[" + "9" * 9000 + "]>", "token ids 0 to 127999"),
    "token that is none": ("root ::= <nothing>", "one token of the vocabulary"),
    "a rule twice": ('root ::= "a"\nroot ::= "b"', "one definition of each rule"),
}


@pytest.mark.parametrize("name", GOOD)
def test_every_part_of_the_syntax_is_read(name: str) -> None:
    assert refusal(GOOD[name]) is None


@pytest.mark.parametrize("name", MALFORMED)
def test_text_that_is_not_gbnf_is_refused(name: str) -> None:
    text, limit = MALFORMED[name]
    assert limit in (refusal(text) or "accepted")


def test_the_error_names_the_line_and_what_stands_there() -> None:
    expected = "{m,n} with m <= n, in place of '{7,3} | \"b\"' (line 3)"
    with pytest.raises(GbnfError) as caught:
        lark_of_gbnf('root ::= x\n\nx ::= "a"{7,3} | "b"\n', N_VOCAB, token_of)
    assert str(caught.value) == expected


def test_every_character_is_a_lexeme_of_its_own() -> None:
    """A longer lexeme would match longest first, and change the language."""
    assert lark_of_gbnf('root ::= "ab" [a-c]', N_VOCAB, token_of) == (
        'start: ("a" "b") /[\\u{61}-\\u{63}]/\n'
    )
    assert lark_of_gbnf("root ::= <think> !<[7]>", N_VOCAB, token_of) == "start: <[0]> <[^7]>\n"


def test_64_brackets_within_each_other_are_not_too_many() -> None:
    assert refusal("root ::= " + "(" * 64 + '"a"' + ")" * 64) is None
    assert refusal("root ::= " + "(" * 63 + '"a"' + ")*" * 63) is not None


def fill(start: str, unit: str, end: str = "") -> str:
    """Return a grammar of almost 64 KiB."""
    return start + unit * ((65_536 - len(start) - len(end)) // len(unit)) + end


@pytest.mark.full
@pytest.mark.timeout(20)
def test_the_largest_grammars_are_read_in_time_that_grows_with_their_length() -> None:
    """A few hundred milliseconds in all; what is not linear would take minutes."""
    accepted = [
        fill('root ::= "', "a", '"'),
        fill("root ::= [", "a-z", "]"),
        fill("root ::= [^", "a-z", "]"),
        fill('root ::= "a"', '|"b"'),
        fill('root ::= "a"', "|"),
        fill('x ::= "a"\nroot ::= x', " x"),
        fill('root ::= "a"\n', "#\n"),
        fill("root ::= <a>", "<a>"),
        rules("root ::= r0", *(f'r{i} ::= "a" r{i * i % 1500} | "b"' for i in range(1500))),
    ]
    assert [refusal(text) for text in accepted] == [None] * len(accepted)
    assert refusal(fill("root ::= ", "("))


ALPHABET = 'abrot ::=\n"[]^-()|*+?{},123<>!.\\x#é'
PIECES = st.sampled_from(["root ::= ", "root", '"a"', "[a-z]", "(", ")", "|", "{1,3}", "\nx ::= "])


@given(st.lists(st.one_of(PIECES, st.text(ALPHABET, max_size=4)), max_size=30).map("".join))
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    assert "(line " in (refusal(text) or "(line ")


# --- Beside llama.cpp's own sampler ----------------------------------------------------------
@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A vocabulary whose tokens are bytes, parts of characters and pieces of several characters."""
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "pieces.gguf")
    with Model(path, vocab_only=True) as model:
        yield model


@pytest.fixture(scope="module")
def guidance(vocabulary: Model) -> Guidance:
    return Guidance(vocabulary.vocab, 1)


def is_prefix_of_text(data: bytes) -> bool:
    """True if some UTF-8 text without NUL begins with these bytes."""
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False


def is_text(data: bytes) -> bool:
    """True if the bytes are whole UTF-8 text."""
    return data.decode("utf-8", "ignore").encode() == data


def walk(model: Model, guidance: Guidance, text: str, draw: random.Random, n_tokens: int) -> int:
    """Follow a grammar in both, by tokens that are drawn; return the number of equal masks.

    Compared are tokens that go on with UTF-8 text, and the end where the text is whole: llama.cpp
    does not check either.  It also refuses the first bytes of a character if *some* character that
    begins so is excluded by `[^…]`, and for `!<…>`; such tokens are not compared there.
    The name of a control token is text to llama.cpp, and not here; so control tokens are compared
    where the grammar names tokens.  Where only one text is possible, llguidance allows only the
    tokens that the tokenizer makes of it; the comparison switches that off.
    """
    vocab = model.vocab
    is_end = np.array([vocab.is_eog(token) for token in range(vocab.n_tokens)])
    pieces = [vocab.piece(token) for token in range(vocab.n_tokens)]
    lark = lark_of_gbnf(text, vocab.n_tokens, guidance._token_of)
    exact = guidance.compile("lark", '%llguidance {"no_forcing": true}\n' + lark).start()
    used = guidance.compile("grammar", text).start()
    names_tokens = "<[" in lark
    is_compared = names_tokens | np.array([bool(piece) for piece in pieces])
    written, is_used = b"", True
    with LlamaGrammar(vocab, text) as grammar:
        for n_equal in range(n_tokens):
            start = b"" if names_tokens else written
            compared = (
                np.array([is_prefix_of_text(start + piece) for piece in pieces]) & is_compared
            )
            if names_tokens or "[^" in text:
                compared &= np.array([is_text(start + piece) for piece in pieces])
            compared |= is_end & is_text(written)
            expected = grammar.mask()
            (mask,) = guidance.masks([exact])
            if isinstance(mask, Exception):
                raise mask
            different = np.flatnonzero((mask != expected) & compared)
            assert not len(different), (text, n_equal, [vocab.spelling(t) for t in different[:5]])
            if is_used:
                (narrowed,) = guidance.masks([used])
                assert not isinstance(narrowed, Exception), (text, n_equal, narrowed)
                assert narrowed.any()
                assert not (narrowed & compared & ~expected).any()
            (tokens,) = (expected & compared & ~is_end).nonzero()
            if not len(tokens):
                return n_equal + 1
            token = int(draw.choice(tokens.tolist()))
            grammar.accept(token)
            exact.accept(token)
            is_used = is_used and used.allows(token)
            if is_used:
                used.accept(token)
            written += pieces[token]
    return n_tokens


# In llama.cpp a token behind a character that could be part of it ends the process: not here.
WITH_TOKENS = {
    "a thought": "root ::= <think> !</think>* </think>",
    "by number": 'root ::= <[65]> !<[66]>* <[66]> "c"',
    "tokens alone": "root ::= (<[70]> | <[71]>){3} !<[72]>",
}


@pytest.mark.parametrize("name", [name for name in GOOD | WITH_TOKENS if name != "tokens"])
def test_masks_are_those_of_llama_cpp_for_every_part_of_the_syntax(
    vocabulary: Model, guidance: Guidance, name: str
) -> None:
    text = (GOOD | WITH_TOKENS)[name]
    assert sum(walk(vocabulary, guidance, text, random.Random(i), 20) for i in range(3))


def test_masks_are_those_of_llama_cpp_for_its_own_grammars(
    vocabulary: Model, guidance: Guidance, llama_cpp_source: Path
) -> None:
    n_compared, refused = 0, []
    for name, text in grammars_of(llama_cpp_source).items():
        try:
            LlamaGrammar(vocabulary.vocab, text).close()
        except ValueError:  # its tests of errors
            refused.append(refusal(text) or name)
            continue
        n_compared += sum(walk(vocabulary, guidance, text, random.Random(i), 40) for i in range(2))
    assert n_compared > 1200
    # No root twice, a rule that is not defined, and left recursion, which llguidance can follow.
    assert [why.split(", in place of ")[0] for why in refused] == [
        "a grammar with a rule that is named root",
        "the name of a rule that is defined",
        *(f"integration test {i}" for i in range(16, 20)),
        "a grammar with a rule that is named root",
    ]


def test_left_recursion_is_followed(guidance: Guidance) -> None:
    matcher = guidance.compile("grammar", 'root ::= "a" | root "b"').start()
    for token in b"abb":
        assert not matcher.allows(ord("c"))
        matcher.accept(token)
    assert matcher.allows(guidance.ends[0])


def compare_random_grammars(model: Model, guidance: Guidance, seeds: range) -> tuple[int, int]:
    """Return the number of equal masks, and of grammars that llguidance gives up as too ambiguous."""
    n_compared = n_given_up = 0
    for seed in seeds:
        draw = random.Random(seed)
        try:
            n_compared += walk(model, guidance, random_grammar(draw), draw, 12)
        except CllmError as error:
            if "Too many items" not in str(error):
                raise
            n_given_up += 1
    return n_compared, n_given_up


def test_masks_are_those_of_llama_cpp_for_random_grammars(
    vocabulary: Model, guidance: Guidance
) -> None:
    n_compared, n_given_up = compare_random_grammars(vocabulary, guidance, range(60))
    assert n_compared > 500
    assert not n_given_up


@pytest.mark.full
@pytest.mark.parametrize("n", [100, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_masks_are_those_of_llama_cpp_for_many_random_grammars(
    vocabulary: Model, guidance: Guidance, n: int
) -> None:
    n_compared, n_given_up = compare_random_grammars(vocabulary, guidance, range(1000, 1000 + n))
    assert n_compared > 8 * n
    assert n_given_up < max(5, n / 50)
