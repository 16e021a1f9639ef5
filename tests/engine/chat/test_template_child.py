"""No template runs for long, takes much memory or reaches Python; each ends as a bad request."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from typing import Any

import pytest

from cllm.checks import MAX_TEMPLATE_BYTES
from cllm.engine.chat import chat_template
from cllm.engine.chat.chat_template import ChatTemplate, template_child
from cllm.engine.chat.chat_tokenizer import _KnownTemplate
from cllm.engine.chat.template_child import MAX_TEXT
from cllm.engine.child_process import EndedError, JsonChild, TooSlowError
from cllm.errors import ClosedError, InvalidRequestError, RequestError
from tests.conftest import IS_SANITIZED
from tests.engine.chat.conftest import CHILD

MANY = "{% for i in range(100000) %}"
END = "{% endfor %}"
# A list that holds a list twice, 80 levels deep: 2**80 numbers when it is written.
TWICE = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(80) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
# The same of tuples, which can be hashed.
PAIRS = "{% set ns = namespace(x=()) %}{% for i in range(80) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
# A tuple in a tuple, and so on: a little deeper, and Python's hash() of it is a stack overflow.
DEEP = "{% set ns = namespace(x=()) %}" + MANY + "{% set ns.x = (ns.x,) %}" + END
LONG = "('x' * 100000)"

# Those that go on and on: the clock stops them, or what they have allocated.
ENDLESS = {
    "loops": MANY * 4 + END * 4,
    "loops with output": MANY * 2 + "x" + END * 2,
    "loops in a macro": "{% macro m() %}" + MANY * 2 + "x" + END * 2 + "{% endmacro %}{{ m() }}",
    "loops in a call block": "{% macro m() %}{{ caller()|length }}{% endmacro %}{% call m() %}"
    + MANY * 2
    + "x"
    + END * 2
    + "{% endcall %}",
    "loops in a variable": "{% set x %}" + MANY * 2 + "x" + END * 2 + "{% endset %}",
    "loops in a filter block": "{% filter length %}" + MANY * 2 + "x" + END * 2 + "{% endfilter %}",
    "a filtered loop": "{% for i in range(100000) if false %}{% endfor %}" * 100,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loops": "{% for i in range(9) recursive %}{% if loop.depth < 40 %}{{ loop(range(9)) }}{% endif %}"
    + END,
    "blocks": "{% set ns = namespace(n=0) %}{% block a %}{% for i in range(2) %}{% if n is not defined %}"
    "{% endif %}{% endfor %}{% endblock %}" + MANY * 2 + "{{ self.a() }}" + END * 2,
    "lazy filters": MANY * 2
    + "{{ range(100000)|map('string')|select|map('upper')|list }}"
    + END * 2,
    "operators": MANY * 2 + "{% set x = i + 1 %}" + END * 2,
    "arguments": "{% macro m() %}{{ varargs|length }}{% endmacro %}"
    + MANY
    + "{{ m(*range(100000)) }}"
    + END,
    "measuring": "{% set x = range(100000)|list %}" + MANY + "{% if x == 1 %}{% endif %}" + END,
}
# Those that make something huge in one step, or in a few.
HUGE = {
    "range": "{{ range(10**9)|list }}",
    "long number": "{{ 2 ** 8000 * 2 ** 8000 }}",
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "a number that is text": "{{ '%1000000000d' is odd }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "text * number": "{{ 'x' * 10**9 }}",
    "number * text": "{{ 10**9 * 'x' }}",
    "list * number": "{{ [1] * 10**9 }}",
    "list * number twice": "{{ ([1] * 10**5) * 10**5 }}",
    "power": "{{ 2 ** (10**9) }}",
    "powers": MANY + "{% set x = 2 ** 16000 * 2 ** 16000 %}" + END,
    "text of numbers": "{{ ([2 ** 14000] * 200000)|join }}",
    "doubled text": "{% set ns = namespace(x='ab') %}"
    + MANY
    + "{% set ns.x = ns.x + ns.x %}"
    + END,
    "doubled ~": "{% set ns = namespace(x='ab') %}" + MANY + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "doubled list": "{% set ns = namespace(x=[1]) %}" + MANY + "{% set ns.x = ns.x + ns.x %}" + END,
    "%d": "{{ '%1000000000d' % 1 }}",
    "%*d": "{{ '%*d' % (10**9, 1) }}",
    "%.f": "{{ '%.1000000000f' % 1.0 }}",
    "%(a)d": "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "many %d": "{{ ('%9999d' * 100000) % 1 }}",
    "many %(a)s": "{{ ('%(a)s' * 100000) % {'a': " + LONG + "} }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format by argument": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format by attribute": "{{ ('{:1000000000}'|attr('format'))(1) }}",
    "many fields": "{{ ('{0}' * 100000).format(" + LONG + ") }}",
    "center": "{{ 'x'.center(10**9) }}",
    "subscript method": "{{ 'x'['ljust'](10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(tabsize=10**9) }}",
    "join": "{{ " + LONG + ".join(range(10000)|map('string')) }}",
    "join filter": "{{ range(100000)|join(" + LONG + ") }}",
    "replace": "{{ " + LONG + ".replace('x', " + LONG + ") }}",
    "replace nothing": "{{ " + LONG + ".replace('', " + LONG + ") }}",
    "replace filter": "{{ " + LONG + "|replace('x', " + LONG + ") }}",
    "center filter": "{{ 'x'|center(10**9) }}",
    "map center": "{{ range(100000)|map('string')|map('center', 100000)|list }}",
    "indent": "{{ ('\n' * 100000)|indent(100000, blank=true) }}",
    "indent by text": "{{ ('\n' * 100000)|indent(" + LONG + ", blank=true) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "round": "{{ 1|round(10**9, 'floor') }}",
    "round down": "{{ 1|round(-10**9) }}",
    "tojson indent": "{{ range(100000)|list|tojson(indent=100000) }}",
    "tojson separators": "{{ range(100000)|list|tojson(separators=(" + LONG + ", 'y')) }}",
    "strftime": "{{ strftime_now('%1000000000Y' * 1000) }}",
    "int of hexadecimal": "{{ ('f' * 4000000)|int(0, 16) }}",
    "rfind": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 2000000 ~ 'a') }}",
    "trim filter": "{{ ('a' * 4000000)|trim('b' * 2000000 ~ 'a') }}",
    "split": "{{ ('a,' * 2000000).split(',') }}",
    "characters": "{{ ('a' * 4000000)|list }}",
    "names of macros": "{% macro "
    + "m" * 9999
    + "() %}{% endmacro %}{{ ["
    + "m" * 9999
    + "] * 99999 }}",
    "bound methods": "{% set m = ('x' * 99999)|e %}{{ [m.strip] * 99999 }}",
    "hash of what is deep": DEEP + "{{ {}[ns.x] }}",
    "text of the template": "{% set x %}" + MANY + "x" * 10000 + END + "{% endset %}",
    "output": MANY + "{{ 'x' * 1000 }}" + END,
    "slices kept": "{% set s = 'x' * 4000000 %}{% set ns = namespace(x=[]) %}"
    + MANY
    + "{% set ns.x = ns.x + [s[1:]] %}"
    + END,
    "lists kept": "{% set ns = namespace(x=[]) %}"
    + MANY
    + "{% set ns.x = ns.x + [["
    + "1," * 10000
    + "]] %}"
    + END,
    "splits kept": "{% set ns = namespace(x=[]) %}"
    + MANY
    + "{% set ns.x = ns.x + [('ab,' * 80000).split(',')] %}"
    + END,
    **{
        f"twice {where}": TWICE + "{{ " + where + " }}"
        for where in (
            "ns.x",
            "ns",
            "ns.x ~ 'a'",
            "ns.x|string",
            "ns.x|tojson",
            "[ns.x]|join",
            "'%s' % ns.x",
            "'%s' % [ns.x]",
            "'{}'.format(ns.x)",
            "'{0!r}'.format(ns.x)",
            "{}[ns.x] + 1",
            "ns.x|upper",
            "ns.x|sort",
            "[ns.x]|unique|list",
            "[ns.x.items]|unique|list ~ ns.x.__len__ ~ ns.x",
            "raise_exception(ns.x)",
            "ns.x.index(1)",
            "ns.x is lower",
            "ns.x == ns.y",
            "ns.x in [ns.y]",
            "[ns.x]|select('in', [ns.y])|list",
            "[ns.x]|map('string')|list",
            "messages[0].get(ns.x)",
            "'a'|indent(ns.x)",
            "(1, ns.x) is in [(1, 2)]",
            "dict(a=ns.x)",
            "cycler(ns.x)",
        )
    },
    **{
        f"hash {where}": PAIRS + "{{ " + where + " }}"
        for where in (
            "{ns.x: 1}",
            "{}[ns.x]",
            "{}.get(ns.x)",
            "ns.x in {}",
            "[ns.x]|unique|list",
            "dict([(ns.x, 1)])",
            "dict.fromkeys([[ns.x]]|map('first'))",
            "{}.keys() - [ns.x]",
            "[{}]|map(attribute=ns.x)|list",
            "[{}]|groupby(ns.x)",
        )
    },
}
# Those that fail in another way: recursion, what is not there, what the sandbox forbids.
FAILING = {
    "macro in itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop in itself": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "iterator of iterators": "{% set ns = namespace(x=[1]) %}{% for i in range(5000) %}"
    "{% set ns.x = ns.x|map('string') %}{% endfor %}{{ ns.x|list }}",
    "function of Python": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "class": "{{ (''|attr('__class__')).mro() }}",
    "frame": "{{ ([1]|map('string')).gi_frame.f_globals }}",
    "division": "{{ 1 // 0 }}",
}
NOT_COMPILED = {
    "syntax": "{% for %}",
    "unknown filter": "{{ 1|nothing }}",
    "parentheses": "{{ " + "(" * 50000,
    "lists": "{{ " + "[" * 50000 + "]" * 50000 + " }}",
    "sum": "{{ " + "+".join("a" * 9999) + " }}",
    "attributes": "{{ a" + ".b" * 9999 + " }}",
    "elif": "{% if a %}" + "{% elif a %}" * 9999 + "{% endif %}",
    "nested loops": "{% for a in b %}" * 40 + "{% endfor %}" * 40,
    "nested macros": "{% macro m() %}" * 9999,
    "a number of 200,000 digits": "{{ " + "9" * 200000 + " }}",
    "comments": "{#" * 99999,
    "too long": "x" * (MAX_TEMPLATE_BYTES + 1),
}


MESSAGES = [{"role": "user", "content": "Hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="", eos_token="", control_names=["<s>"], child=CHILD)


def refusal_of(source: str) -> InvalidRequestError:
    """How a template ends; the next one is rendered all the same."""
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(MESSAGES)
    assert len(str(caught.value)) < 500
    [piece] = template("{{ messages[0].content }}").render(MESSAGES)
    assert piece.text == "Hi"
    return caught.value


@pytest.mark.sampled(3)
@pytest.mark.full
@pytest.mark.parametrize("source", [*ENDLESS.values(), *HUGE.values()], ids=[*ENDLESS, *HUGE])
def test_a_template_that_wants_too_much_is_refused_or_writes_little(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes is that process's; some find a way to end soon, and then its text is bounded."""
    n_characters, refusal = 0, None
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "RENDER_S", 2.0)  # an endless one is not worth nine seconds
        try:
            n_characters = sum(len(piece.text) for piece in template(source).render(MESSAGES))
        except InvalidRequestError as error:
            refusal = error
    assert n_characters <= MAX_TEXT
    assert refusal is None or refusal.field in ("chat_template", "messages")
    [piece] = template("{{ messages[0].content }}").render(MESSAGES)
    assert piece.text == "Hi"


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "writes up to 4194304 char"),
        ("{{ 'x' * 10**9 }}", "512 MiB" if IS_SANITIZED else "takes less memory"),
        pytest.param(
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
            "{% set ns.x = ns.x + [1] * 9999 %}{% endfor %}", r"less memory|within \d+ s|512 MiB",
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_text_and_memory_of_a_template_are_bounded(source: str, limit: str) -> None:
    error = refusal_of(source)
    assert error.field == "chat_template"
    assert re.search(limit, error.limit), error.limit


@pytest.mark.parametrize("source", FAILING.values(), ids=FAILING.keys())
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    assert refusal_of(source).field == "messages"


@pytest.mark.parametrize("source", NOT_COMPILED.values(), ids=NOT_COMPILED.keys())
def test_a_template_that_does_not_compile_is_named(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(MESSAGES)
    assert caught.value.field == "chat_template"
    assert len(str(caught.value)) < 500


def test_the_line_of_a_mistake_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="line 3: No filter named 'nothing'"):
        template("\n\n{{ 1|nothing }}").render(MESSAGES)


def test_an_endless_template_is_refused_in_time_and_the_next_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.05)
    with pytest.raises(InvalidRequestError, match=r"renders within 0\.05 s"):
        template(ENDLESS["loops"]).render(MESSAGES)
    monkeypatch.setattr(chat_template, "RENDER_S", 30.0)
    [piece] = template("{{ messages[0].content }}").render(MESSAGES)
    assert piece.text == "Hi"


def test_the_longest_chat_is_well_within_the_limits() -> None:
    # Messages collected one by one are quadratic in references, and the longest chat must do.
    source = (
        "{% set ns = namespace(m=[]) %}{% for m in messages %}{% set ns.m = ns.m + [m] %}{% endfor %}"
        "{% for m in ns.m %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    )
    [piece] = template(source).render([{"role": "user", "content": "Hi " * 60}] * 4096)
    assert piece.text == ("user: " + "Hi " * 59 + "Hi\n") * 4096


def test_closing_ends_what_is_rendered() -> None:
    child = template_child()
    endless = ChatTemplate(
        ENDLESS["loops"], bos_token="", eos_token="", control_names=[], child=child
    )
    ended: list[Exception] = []

    def render() -> None:
        try:
            endless.render(MESSAGES)
        except Exception as error:
            ended.append(error)

    ChatTemplate("", bos_token="", eos_token="", control_names=[], child=child).render(MESSAGES)
    thread = threading.Thread(target=render)
    thread.start()
    while child._asking.acquire(blocking=False):  # until it asks
        child._asking.release()
    child.close()
    thread.join()
    assert [type(error) for error in ended] == [ClosedError]
    child.close()


def test_a_process_that_was_killed_while_nobody_asked_is_replaced() -> None:
    child = template_child()
    chat = ChatTemplate("{{ 'text' }}", bos_token="", eos_token="", control_names=[], child=child)
    for _ in range(2):
        assert [piece.text for piece in chat.render(MESSAGES)] == ["text"]
        process = child._process
        assert process is not None
        process.kill()
        process.wait()
    child.close()


def test_a_closed_one_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    child = template_child()
    child.close()
    monkeypatch.delattr(subprocess, "Popen")
    with pytest.raises(ClosedError):
        child.ask({}, 1.0)


def test_a_process_that_does_not_start_is_no_fault_of_the_template() -> None:
    child = JsonChild("cllm.engine.chat.nowhere")
    chat = ChatTemplate("", bos_token="", eos_token="", control_names=[], child=child)
    with pytest.raises(RequestError, match=r"chat\.nowhere does not start"):
        chat.render(MESSAGES)
    child.close()


def test_a_forked_process_does_not_wait_for_its_parents_child() -> None:
    child = template_child()
    child.ask({"source": "", "variables": {}, "now": "2025-01-01"}, 30.0)
    assert child._process is not None
    pid = os.fork()
    if pid == 0:
        child._finalizer()  # what a collection, and the end of the interpreter, would call
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert child._process.poll() is None, "it is the parent's"
    child.close()


@pytest.mark.parametrize("error", [TooSlowError, EndedError, OSError(24, "Too many open files")])
def test_a_failure_that_may_pass_is_not_kept_as_a_property_of_the_template(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    known = _KnownTemplate(source, template(source), lambda _: {}, lambda _: ())
    with monkeypatch.context() as patch:
        patch.setattr(JsonChild, "ask", fail)
        for _ in range(2):
            with pytest.raises(RequestError):
                known.abilities  # noqa: B018
    assert known.abilities.system
