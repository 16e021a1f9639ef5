"""jinja2 as transformers sets it up, for templates that nobody has read.  Pure; needs jinja2.

The sandbox of jinja2 keeps a template away from Python; it does not keep it from running for ever
or from filling the memory.  Here every step of a template goes past a `Meter`: the syntax tree is
rewritten so that loops, output, operators and literals do, filters and tests are wrapped, calls and
subscripts go through the environment anyway.

Left out, because nothing bounds them and no chat needs them: autoescaping, `lipsum`, the filters in
`DROPPED_FILTERS`, and methods other than those that `template_meter` lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from cllm.engine.chat import template_meter
from cllm.engine.chat.template_meter import (
    METER,
    UNITS_PER_REFERENCE,
    LimitError,
    Meter,
    fit,
    metered_filter,
    metered_test,
    taken,
)

__all__ = ("LimitError", "Program", "RefusedError")

DROPPED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# glibc pads a date to any width that its format asks for; Python stops it at 256 × the length.
MAX_DATE_FORMAT = 1024


class RefusedError(Exception):
    """A template called `raise_exception`."""


class Program:
    """A compiled template.

    Parameters
    ----------
    source : str

    Raises
    ------
    jinja2.TemplateError
        Or what Python raises for what jinja2 makes of the source.
    """

    def __init__(self, source: str) -> None:
        self._template = _Environment().from_string(source)

    def run(self, variables: dict[str, Any], clock: Callable[[], float]) -> str:
        """The text that the template makes of its variables.  From any thread.

        Raises
        ------
        RefusedError, LimitError
            Or whatever else a template can make Python raise.
        """
        token = METER.set(Meter(clock))
        try:
            parts, n_characters = [], 0
            # Not `Template.render`: it would rewrite the traceback of a failure, frame by frame.
            for text in self._template.root_render_func(self._template.new_context(variables)):
                n_characters += len(text)
                fit(n_characters)
                parts.append(text)
            return "".join(parts)
        finally:
            METER.reset(token)


class _Rewriter(NodeTransformer):
    """Leads every loop, output, comparison and literal of a template past the meter.

    The filters it puts in have names that begin with a space: no expression can spell them.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, " each")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        # As a constant, the template's own text goes through `_emit` like all other output.
        node.nodes = [
            nodes.Const(child.data, lineno=child.lineno)
            if isinstance(child, nodes.TemplateData)
            else child
            for child in node.nodes
        ]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, " measured")
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = _filtered(operand.expr, " searched" if is_search else " measured")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), " concatenated")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, " made") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, " made") if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, " made") if node.items and node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _filtered(pair.key, " measured")
        return _filtered(node, " made") if node.items else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> NoReturn:  # noqa: N802
        raise TemplateAssertionError("a prompt is not HTML: no autoescape", node.lineno)


def _filtered(node: Any, name: str) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _each(iterable: Iterable[Any]) -> Iterator[Any]:
    spend = METER.get().spend
    for item in iterable:
        spend()
        yield item


def _measured(value: Any) -> Any:
    METER.get().measure(value)
    return value


def _searched(value: Any) -> Any:
    # A mapping is not searched but asked.
    return value if isinstance(value, dict) else _measured(value)


def _made(value: Any) -> Any:
    return METER.get().made(value)


def _concatenated(values: list[Any]) -> Any:
    fit(sum(METER.get().measure(value)[1] for value in values))
    return METER.get().made("".join(map(str, values)))


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    " each": _each,
    " measured": _measured,
    " searched": _searched,
    " made": _made,
    " concatenated": _concatenated,
}


@pass_context
def _emit(context: Context, value: Any) -> Any:
    """The text of whatever is written."""
    METER.get().measure(value)
    return METER.get().made(str(value))


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """A block with a scope of its own, as in transformers."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(lineno)

    def _rendered(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, metered."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_emit,
            optimized=False,  # nothing is computed before there is a meter
            cache_size=0,
        )
        kept = {name: f for name, f in self.filters.items() if name not in DROPPED_FILTERS}
        kept["tojson"] = _tojson
        self.filters = {name: metered_filter(name, f) for name, f in kept.items()} | OWN_FILTERS
        tests: dict[str, Any] = self.tests
        self.tests = {name: metered_test(name, f) for name, f in tests.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self._functions = tuple(self.globals.values())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Rewriter().visit(super()._parse(source, name, filename))
        return tree

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error as it is, without a traceback of template lines."""
        raise

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator."""
        METER.get().spend()
        template_meter.price_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        # A list of what is there already: templates collect messages one by one.
        return METER.get().made(result, UNITS_PER_REFERENCE)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """A subscript; it is hashed, and if there is no such item, it is in the message."""
        if not isinstance(argument, str | int):
            METER.get().measure(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map`, metered."""
        if not isinstance(value, BuiltinMethodType | MethodType):
            return None
        text, name = value.__self__, value.__name__
        if not isinstance(text, str) or name not in ("format", "format_map"):
            return None
        if isinstance(text, Markup):
            raise SecurityError(f"a template may not {name} escaped text")
        return _Format(self, text, is_map=name == "format_map")

    def call(
        __self,  # noqa: N805
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A call, of what is known to end soon."""
        meter = METER.get()
        meter.spend(len(args) + len(kwargs))
        owner = None
        if isinstance(__obj, BuiltinMethodType | MethodType):
            owner = __obj.__self__
        if isinstance(owner, str | dict | list | tuple):
            name = __obj.__name__
            args = template_meter.price_method(owner, name, args, kwargs)
            result = super().call(__context, __obj, *args, **kwargs)
            return result if name == "get" else meter.made(result)
        if not (
            isinstance(__obj, Macro | LoopContext | BlockReference | Undefined)
            or isinstance(owner, Extension)
        ):  # these go step by step themselves
            if not (
                isinstance(__obj, _Format | Joiner)
                or isinstance(owner, LoopContext | Cycler | _Dict)
                or any(__obj is function for function in __self._functions)
            ):
                raise SecurityError("a template may not call this")
            args = tuple(taken(arg) if isinstance(arg, Iterator) else arg for arg in args)
            for value in (*args, *kwargs.values()):
                meter.measure(value)
        return meter.made(super().call(__context, __obj, *args, **kwargs))


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        METER.get().measure(value)
        template_meter.price_format_spec(format_spec)
        return METER.get().made(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        METER.get().measure(value)
        return super().convert_field(value, conversion)


class _Format:
    """The method `format` or `format_map` of a text."""

    def __init__(self, environment: _Environment, text: str, is_map: bool) -> None:
        self._formatter = _Formatter(environment)
        self._text = text
        self._is_map = is_map

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._is_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            return self._formatter.vformat(self._text, (), args[0])
        return self._formatter.vformat(self._text, args, kwargs)


class _Dict:
    """`dict(...)` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As the method of dict."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)`; names that begin with an underscore are for Python."""

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


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes what has a meaning in HTML.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise RefusedError(str(message))


def _strftime_now(format: str) -> str:
    fit(len(format), MAX_DATE_FORMAT)
    return datetime.now().strftime(format)
