"""Child process that renders chat templates (`chat_template.template_child`).

A template that never ends, or takes too much memory, ends this process alone.
`python -m cllm.engine.chat.template_child MEMORY_BYTES` reports that it is ready.  It then answers each
line of standard input with a line of standard output, until standard input ends.  Both are JSON: a request is
`{"source": …, "variables": …, "now": …}`, an answer `{"text": …}` or `{"error": …, "kind": …}`.

The environment is that of transformers, in jinja2's sandbox, which keeps a template away from Python.
Unlike in transformers, a template may change lists, which are copies: Kimi-K2's does, as llama.cpp allows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from cllm.engine.child_process import answer_requests, answers_of_this_process
from cllm.system import limit_memory

MAX_TEXT = 4 << 20  # characters of the output
MAX_PROGRAMS = 4  # compiled: a model has one template, or two
ALARM_S = 10


class RefusedError(Exception):
    """A template called `raise_exception`."""


class Generation(Extension):
    """Tag `{% generation %}`, which marks the assistant's text for training.

    The text is rendered as without the tag, but variables that the block sets have their former values after it.
    """

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the parsed block, which has a scope of its own as in transformers."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(lineno)

    def _rendered(self, caller: Macro) -> str:
        text: str = caller()
        return text


class CheckedNamespace(Namespace):
    """`namespace(...)` that rejects names with an underscore at the beginning, as in transformers."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` is allowed
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a template may not set attributes that begin with an underscore")


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML of jinja2's own filter."""
    return json.dumps(
        x,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """Return the result of a filter such as `map` as a list: it is lazy in jinja2, and a list in llama.cpp's jinja."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def raise_exception(message: object) -> NoReturn:
    """Raise an error: templates call it to reject messages."""
    raise RefusedError(str(message))


def environment() -> SandboxedEnvironment:
    """Return a sandboxed environment as transformers configures it, but templates may change lists."""
    made = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["namespace"] = CheckedNamespace
    made.globals["raise_exception"] = raise_exception
    return made


@lru_cache(MAX_PROGRAMS)
def compiled(source: str) -> Template:
    """Return the compiled template; the last `MAX_PROGRAMS` are cached."""
    return environment().from_string(source)


def answer(source: str, variables: dict[str, Any], now: str) -> dict[str, str]:
    """Return `text`; or `error`, and `kind`: "compile", "refused" (`raise_exception`), "limit" or "failed".

    `now` is the time for `strftime_now`, in ISO format.
    """
    variables = {"strftime_now": datetime.fromisoformat(now).strftime, **variables}
    try:
        template = compiled(source)
    except MemoryError:
        raise
    except Exception as error:  # the parser, the generator and Python's compiler
        return {"kind": "compile", "error": shown(error)}
    try:
        parts, n_characters = [], 0
        for part in template.generate(variables):
            n_characters += len(part)
            if n_characters > MAX_TEXT:
                return {"kind": "limit", "error": f"one that writes up to {MAX_TEXT} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except RefusedError as error:
        return {"kind": "refused", "error": shown(error)}
    except (MemoryError, OverflowError) as error:
        return {"kind": "limit", "error": f"one that takes less memory ({type(error).__name__})"}
    except Exception as error:  # whatever a template can make Python raise
        return {"kind": "failed", "error": shown(error)}


def shown(error: Exception) -> str:
    """Return the message of an error, after the name of its type for Python's built-in errors."""
    text = str(error)
    if type(error).__module__ == "builtins":
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    if (line := getattr(error, "lineno", None)) is not None:  # of a jinja2.TemplateSyntaxError
        return f"line {line}: {getattr(error, 'message', text)}"
    return text


def main(memory_bytes: int) -> None:
    """Answer requests until standard input ends; the process may grow by `memory_bytes`."""
    answers = answers_of_this_process()
    limit_memory(memory_bytes)
    answer_requests(answers, {"text": ""}, answer, alarm_s=ALARM_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
