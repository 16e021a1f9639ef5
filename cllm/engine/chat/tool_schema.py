"""ToolParameters: the arguments that a tool allows, for every format of calls.  Pure.

The schema is resolved once, against its own root.  Grammars of calls and parsers of answers both use it,
so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from cllm.engine.json_schema import TYPES, ObjectSchema, SchemaDocument, without_nulls
from cllm.errors import InvalidRequestError

NO_ARGUMENTS: Mapping[str, object] = {"type": "object", "properties": {}}


class ValueSchema:
    """Schema of one value, inside a larger document.

    Attributes
    ----------
    document : SchemaDocument
    schema : schema
    """

    def __init__(self, document: SchemaDocument, schema: object) -> None:
        self.document = document
        self.schema = schema
        self._members: dict[str, ValueSchema] = {}

    @cached_property
    def types(self) -> frozenset[str]:
        """Types of the value, a subset of `TYPES`; all if unknown."""
        try:
            return self.document.types(self.schema) or TYPES
        except (InvalidRequestError, RecursionError):
            return TYPES

    def member(self, key: str) -> ValueSchema:
        """Return the schema of an object's member; if it is unknown, one that allows anything."""
        if key not in self._members:
            self._members[key] = self._inner(lambda: self.document.member(self.schema, key))
        return self._members[key]

    def item(self) -> ValueSchema:
        """Return the schema of an array's items; if it is unknown, one that allows anything."""
        return self._inner(lambda: self.document.item(self.schema))

    def _inner(self, find: Callable[[], object]) -> ValueSchema:
        try:
            return ValueSchema(self.document, find())
        except (InvalidRequestError, RecursionError):
            return ValueSchema(self.document, True)


ANYTHING = ValueSchema(SchemaDocument("", True, is_strict=False), True)


class ToolParameters:
    """The parameters of one tool.

    Parameters
    ----------
    tool : mapping
        Checked definition of a tool in OpenAI's form, or its `function` alone.
    number : int
        Index of the tool in the request, from 0.

    Attributes
    ----------
    name : str
    is_strict : bool
        True if a keyword of the schema that cannot be enforced is an error.
    field : str
        Name of the schema in errors, such as `tools[0].function.parameters`.
    """

    def __init__(self, tool: Mapping[str, Any], number: int = 0) -> None:
        inner = tool.get("function", tool)
        function = inner if isinstance(inner, Mapping) else {}
        self.name: str = str(function.get("name", ""))
        self.is_strict: bool = function.get("strict") is True
        self.field: str = f"tools[{number}].function.parameters"
        self._given = function.get("parameters")

    @cached_property
    def _root(self) -> object:
        root = without_nulls(self._given)
        return NO_ARGUMENTS if root is None or root == {} else root

    @cached_property
    def document(self) -> SchemaDocument:
        """Schema with its references."""
        return SchemaDocument(self.field, self._root, is_strict=self.is_strict)

    @cached_property
    def value(self) -> ValueSchema:
        """Return the schema of all arguments as one object, for a parser that accepts everything."""
        try:
            document = SchemaDocument(self.field, self._root, is_strict=False)
        except (InvalidRequestError, RecursionError):
            return ANYTHING
        return ValueSchema(document, self._root)

    @cached_property
    def objects(self) -> list[ObjectSchema]:
        """Return the kinds of objects that the arguments may be, one for each alternative of the schema.

        Raises
        ------
        InvalidRequestError
            No object is possible, or the schema is strict and cannot be enforced.
        """
        found = [kind for kind in self.document.objects(self._root) if self._is_possible(kind)]
        if not found:
            limit = "a schema of an object that the model can write"
            raise InvalidRequestError(self.field, self._root, limit)
        return found

    def _is_possible(self, kind: ObjectSchema) -> bool:
        """Return whether each key that is required may have a value."""
        return all(
            self.document.types(self.document.joined(kind.properties[key])) for key in kind.required
        )

    def json(self) -> dict[str, Any]:
        """Return a closed schema of the arguments as one JSON object (see `SchemaDocument.closed`)."""
        kinds = [self._json_of(kind) for kind in self.objects]
        return self.document.closed(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})

    def _json_of(self, kind: ObjectSchema) -> dict[str, Any]:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {
                key: self.document.joined(values) for key, values in kind.properties.items()
            },
            "required": list(kind.required),
            "additionalProperties": kind.rest,
            "patternProperties": kind.patterns,
            "minProperties": kind.n_min,
            "maxProperties": kind.n_max,
            "allOf": list(kind.others),
        }
        unsaid: dict[str, tuple[object, ...]] = {
            "patternProperties": ({},), "minProperties": (0,), "maxProperties": (None,), "allOf": ([],),
        }  # fmt: skip
        return {key: value for key, value in schema.items() if value not in unsaid.get(key, ())}


Tool = ToolParameters | Mapping[str, Any]


def parameters_of(tools: Iterable[Tool]) -> list[ToolParameters]:
    """Return the parameters of tools, in their order."""
    return [
        tool if isinstance(tool, ToolParameters) else ToolParameters(tool, i)
        for i, tool in enumerate(tools)
    ]
