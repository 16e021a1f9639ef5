"""JSON schemas: references, types and kinds of values, for grammars and for parsers of tool calls.  Pure.

`SchemaDocument.closed` returns a self-contained schema.  It has only keywords that constrain an output,
and its references point to its own definitions.  A keyword that cannot be enforced is an error in a
strict schema; otherwise it is noted in `ignored`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, combinations
from math import inf
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin

from cllm.engine.patterns import is_irregular, with_escapes
from cllm.engine.schema_limits import enforceable_limit
from cllm.errors import InvalidRequestError
from cllm.log_once import log_once

logger: logging.Logger = logging.getLogger(__name__)
Kind = TypeVar("Kind")
Part = TypeVar("Part")
# Types of JSON values; "number" is split into "integer" and "fraction".
TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
N_ALTERNATIVES_MAX = 64
# Keywords with subschemas: in a mapping, in a list, or as the value itself.
IN_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ALONE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
# Keywords that llguidance enforces, besides those with subschemas.  It ignores unknown keywords.
ENFORCED = frozenset(
    [
        "type",
        "const",
        "enum",
        "minItems",
        "maxItems",
        "required",
        "minProperties",
        "maxProperties",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]
)
CLOSED_INSIDE = frozenset(
    [
        "properties",
        "patternProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "prefixItems",
        "items",
        "additionalProperties",
    ]
)
# Keywords that llguidance does not enforce, with the values that assert nothing.
NOT_ENFORCED: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,), "not": (False,), "if": (), "contains": (), "propertyNames": (True, {}),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
    "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "$dynamicRef": (),
    "$recursiveRef": (),
}  # fmt: skip
# Keywords of a schema of keys that assert something, besides `type`.
OF_NAMES = (ENFORCED | CLOSED_INSIDE | NOT_ENFORCED.keys() | {"pattern", "format", "$ref"}) - {
    "type"
}
# Types that a keyword's value may have, and the limit in the error for any other value.
SHAPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("format", "pattern", "$ref", "$id", "$anchor"), ((str,), "text")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        ((int, float), "a number that is not negative"),
    ),
    **dict.fromkeys(IN_MAPS, ((Mapping,), "a mapping of schemas")),
    **dict.fromkeys((*IN_LISTS, "enum", "required"), ((list,), "a list")),
}
N_KINDS_MAX = 20_000  # schemas of one document that are split into kinds of objects or arrays
MAX_SAID = 80  # characters of a keyword or a pattern in errors and logs
N_IGNORED_MAX = 100
IRREGULAR = "a pattern cannot look around, or back"
# Patterns of `patternProperties` in one document: each is searched in each key.
N_PATTERNS_MAX = 100
N_COMPARED_MAX = 200  # kinds of the parts of `oneOf` that are compared with each other
N_STEPS_MAX = 100_000  # steps of a search for a pattern in a key, some milliseconds with the GIL
N_STEPS_LEAST = 100  # steps that any search takes
N_ALL_STEPS_MAX = 2_000_000  # steps of all searches for the patterns of one schema
N_QUANTIFIERS_MAX = 20  # quantifiers and alternatives of a pattern that is searched
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)  # others are annotations


@dataclass(frozen=True, slots=True)
class ObjectSchema:
    """One kind of object that a schema allows.

    Attributes
    ----------
    properties : mapping of str to tuple of schema
        Each value satisfies all schemas of its key.
    required : tuple of str
    additional : schema or None
        `additionalProperties`: schema of all other keys; None if the keyword is missing.
    patterns : mapping of str to schema
        `patternProperties`.
    n_min, n_max : int, int or None
        Smallest and largest number of keys; None: no limit.
    others : tuple of mapping
        Schemas with the keywords that have no attribute here: `const` and `enum`.
    names_keys : bool
        True if the schema has `properties`.
    """

    properties: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    additional: object = None
    patterns: Mapping[str, object] = field(default_factory=dict)
    n_min: int = 0
    n_max: int | None = None
    others: tuple[Mapping[str, object], ...] = ()
    names_keys: bool = False

    @property
    def rest(self) -> object:
        """Schema of other keys: `additional`; if that is None, False (no key) with `properties`, else True."""
        return not self.names_keys if self.additional is None else self.additional

    def takes(self, key: str) -> bool:
        """Return True if an object may have this key."""
        is_named = key in self.properties or any(searches(p, key) for p in self.patterns)
        return is_named or self.rest is not False


@dataclass(frozen=True, slots=True)
class ArraySchema:
    """One kind of array that a schema allows.

    Attributes
    ----------
    first : tuple of tuple of schema
        One tuple for each of the first items; an item satisfies all schemas of its tuple.
    items : tuple of schema
        Schemas that each further item satisfies.
    n_min, n_max : int, int or None
        Smallest and largest number of items; None: no limit.
    others : tuple of mapping
        As for `ObjectSchema`.
    """

    first: tuple[tuple[object, ...], ...] = ()
    items: tuple[object, ...] = ()
    n_min: int = 0
    n_max: int | None = None
    others: tuple[Mapping[str, object], ...] = ()

    def at(self, i: int) -> tuple[object, ...]:
        """Return the schemas of the i-th item."""
        return self.first[i] if i < len(self.first) else self.items


class SchemaDocument:
    """A JSON schema whose references can be resolved.

    Parameters
    ----------
    name : str
        Field of the request, for errors.
    root : schema
        A mapping or a boolean.
    is_strict : bool
        True if a keyword that cannot be enforced is an error.

    Attributes
    ----------
    ignored : list of str
        Keywords that were left out because they cannot be enforced.
    """

    def __init__(self, name: str, root: object, *, is_strict: bool) -> None:
        self.root = root
        self.is_strict = is_strict
        self.ignored: list[str] = []
        self._name = name
        self._n_kinds = self._n_patterns = 0
        # Number of names of properties, and characters of the longest.
        self._n_names = self._n_longest = 0
        self._bases: dict[int, str] = {}  # base URI of each schema, by its identity
        self._known: dict[str, object] = {"": root}  # schemas by URI, some with an anchor
        # Caches by the identity of schemas.  All schemas stay alive with the document.
        self._types: dict[int, frozenset[str]] = {}
        self._constants: dict[tuple[int, object], bool] = {}
        self._found_kinds: dict[tuple[int, str], list[Any]] = {}
        self._exclusions = Exclusions(self)
        self.texts: dict[int, str | None] = {}  # cache of `argument_text.text_terminal`
        self._joined: dict[tuple[int, ...], tuple[dict[str, Any], Sequence[object]]] = {}
        self._index(root, "")

    def _index(self, schema: object, base: str) -> None:
        if not isinstance(schema, Mapping) or id(schema) in self._bases:
            return
        self._check_shape(schema)
        given = schema.get("$id")
        if isinstance(given, str) and not given.startswith("#"):
            try:
                base = urljoin(base, given).removesuffix("#")
            except ValueError:
                raise self._wrong("$id", given, "a URI") from None
            self._known.setdefault(base, schema)
        anchors = (schema.get("$anchor"), schema.get("$dynamicAnchor"), str(given or "")[1:])
        for anchor in anchors:
            if isinstance(anchor, str) and anchor:
                self._known.setdefault(f"{base}#{anchor}", schema)
        self._bases[id(schema)] = base
        names = [*_mapping(schema.get("properties")), *_list_of(schema, "required")]
        self._n_names += len(names)
        self._n_longest = max([self._n_longest, *map(len, map(str, names))])
        for part in _parts_of(schema):
            self._index(part, base)

    def _check_shape(self, schema: Mapping[str, Any]) -> None:
        for keyword, value in schema.items():
            kinds, said = SHAPES.get(keyword, ((object,), ""))
            is_right = isinstance(value, kinds) and not (
                kinds[0] is int and isinstance(value, bool)
            )
            if kinds[0] is int and is_right:
                is_right = value >= 0 and value == int(value)
            if keyword == "required" and is_right:
                is_right, said = all(isinstance(key, str) for key in value), "a list of names"
            if keyword == "patternProperties" and is_right:
                self._n_patterns += len(value)
                is_right = self._n_patterns <= N_PATTERNS_MAX
                said = f"of at most {N_PATTERNS_MAX} patterns in a schema"
            if not is_right:
                raise self._wrong(keyword, value, said)

    def _wrong(self, keyword: str, value: object, limit: str) -> InvalidRequestError:
        return InvalidRequestError(self._name, f"{keyword}: {value!r:.{MAX_SAID}}", limit)

    def target(self, schema: Mapping[str, Any]) -> object:
        """Return the target of a schema's `$ref`; True if it is in another document.

        Raises
        ------
        InvalidRequestError
            The target does not exist, or it is in another document and the schema is strict.
        """
        reference = schema["$ref"]
        uri = ""
        try:
            base = self._bases.get(id(schema), self._bases.get(id(self.root), ""))
            uri, _, fragment = urljoin(base, reference).partition("#")
            pointer = unquote(fragment)
            if pointer and not pointer.startswith("/"):
                return self._known[f"{uri}#{pointer}"]
            found: Any = self._known[uri]
            for part in pointer.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                found = found[int(key) if isinstance(found, list) else key]
        except (LookupError, ValueError, TypeError, AttributeError):
            if uri in self._known:
                limit = "a reference inside the schema"
                raise InvalidRequestError(self._name, f"$ref: {reference}", limit) from None
            self.cannot(f"$ref: {reference}", "it is in another document")
            return True
        self._index(found, base)
        return found

    def cannot(self, keyword: str, reason: str = "it cannot be enforced") -> None:
        """Note a keyword that is not enforced.

        Raises
        ------
        InvalidRequestError
            The schema is strict.
        """
        keyword = keyword if len(keyword) <= MAX_SAID else f"{keyword[: MAX_SAID - 3]}..."
        if self.is_strict:
            raise InvalidRequestError(self._name, keyword, f"left out: {reason}")
        if len(self.ignored) < N_IGNORED_MAX and keyword not in self.ignored:
            self.ignored.append(keyword)

    # --- Types ------------------------------------------------------------------------------
    def types(self, schema: object) -> frozenset[str]:
        """Return the types that a value may have, a subset of `TYPES`.

        Raises
        ------
        InvalidRequestError
            A type has no such name.
        """
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else TYPES
        if (known := self._types.get(id(schema))) is not None:
            return known
        # All schemas that apply to the same value; each one after the schemas that it refers to.
        nodes, order, seen = [(schema, False)], list[Mapping[str, Any]](), set[int]()
        users: dict[int, list[Mapping[str, Any]]] = {}  # schemas that refer to each
        while nodes:
            node, is_done = nodes.pop()
            if is_done:
                order.append(node)
            elif id(node) not in seen and id(node) not in self._types:
                seen.add(id(node))
                inner = (*self.all_of(node), *(p for parts in _choices_of(node) for p in parts))
                nodes.append((node, True))
                for part in {id(p): p for p in inner if isinstance(p, Mapping)}.values():
                    users.setdefault(id(part), []).append(node)
                    nodes.append((part, False))
        # Schemas may refer to themselves, so the least fixed point is computed, from empty sets.
        found: dict[int, frozenset[str]] = {id(node): frozenset() for node in order}
        waiting, n_waiting = deque(order), Counter(found.keys())
        while waiting:
            node = waiting.popleft()
            n_waiting[id(node)] -= 1
            types = self._own_types(node, found)
            if types != found[id(node)]:
                found[id(node)] = types
                again = [one for one in users.get(id(node), ()) if not n_waiting[id(one)]]
                n_waiting.update(map(id, again))
                waiting += again
        self._types.update({key: types for key, types in found.items() if key in self._bases})
        return found[id(schema)]

    def _own_types(
        self, schema: Mapping[str, Any], found: Mapping[int, frozenset[str]]
    ) -> frozenset[str]:
        def of(part: object) -> frozenset[str]:
            if not isinstance(part, Mapping):
                return frozenset() if part is False else TYPES
            return found.get(id(part)) or self._types.get(id(part), frozenset())

        kinds = schema.get("type")
        types = _named_types([kinds] if isinstance(kinds, str) else kinds)
        if types is None:
            raise self._wrong("type", kinds, "a type of JSON, or several")
        for values in values_of(schema):
            types &= frozenset(map(type_of, values))
        for part in self.all_of(schema):
            types &= of(part)
        for parts in _choices_of(schema):
            types &= frozenset[str]().union(*map(of, parts))
        return types

    def joined(self, schemas: Sequence[object]) -> object:
        """Return a schema for values that satisfy all given schemas; the same object for the same schemas."""
        parts = list({id(part): part for part in schemas}.values())
        if len(parts) < 2:
            return parts[0] if parts else True
        key = tuple(map(id, parts))
        if key not in self._joined:
            made: dict[str, Any] = {"allOf": parts}
            self._joined[key] = made, parts
            self._bases[id(made)] = ""
        return self._joined[key][0]

    def takes_constant(self, schema: object, value: bool | None) -> bool:
        """Return True if a schema allows `value`: None, True or False."""
        if not isinstance(schema, Mapping):
            return schema is not False
        key = (id(schema), value)
        if key not in self._constants:
            self._constants[key] = False  # ends the recursion if the schema refers to itself
            self._constants[key] = self._takes_constant(schema, value)
        return self._constants[key]

    def _takes_constant(self, schema: Mapping[str, Any], value: bool | None) -> bool:
        if type_of(value) not in self.types(schema):
            return False

        def takes(part: object) -> bool:
            return self.takes_constant(part, value)

        is_among = all(any(one is value for one in values) for values in values_of(schema))
        n_one_of = sum(map(takes, _list_of(schema, "oneOf")))
        return (
            is_among
            and all(map(takes, self.all_of(schema)))
            and ("anyOf" not in schema or any(map(takes, _list_of(schema, "anyOf"))))
            and ("oneOf" not in schema or n_one_of == 1 or (n_one_of > 1 and not self.is_strict))
        )

    def all_of(self, schema: Mapping[str, Any]) -> Iterator[object]:
        """Yield the target of `$ref`, and the schemas of `allOf`."""
        if isinstance(schema.get("$ref"), str):
            yield self.target(schema)
        yield from _list_of(schema, "allOf")

    # --- A schema by itself -----------------------------------------------------------------
    def closed(self, schema: object) -> dict[str, Any]:
        """Return an equivalent schema that is self-contained: its `$defs` have all targets of references.

        Raises
        ------
        InvalidRequestError
            A part is no schema, or it cannot be enforced and the schema is strict.
        """
        names: dict[int, str] = {}
        targets: list[object] = []

        def refer(target: object) -> str:
            if id(target) not in names:
                names[id(target)] = f"r{len(names)}"
                targets.append(target)
            return f"#/$defs/{names[id(target)]}"

        def close(part: object) -> Any:
            if isinstance(part, bool):
                return part
            if not isinstance(part, Mapping):
                raise InvalidRequestError(self._name, part, "made of mappings and booleans")
            enforced = self._with_patterns(self._with_names(part))
            enforced = _with_items(self._with_count(enforced))
            return self._close(enforced, close, refer, part)

        body = close(schema)
        definitions = {}
        for target in targets:  # more come while these are written
            definitions[names[id(target)]] = close(target)
        if not isinstance(body, dict):
            body = {} if body else {"enum": []}
        return {**body, "$defs": definitions} if definitions else body

    def _close(
        self, schema: Mapping[str, Any], close: Any, refer: Any, original: Mapping[str, Any]
    ) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword == "oneOf" and self._exclusions.exclude_each_other(
                _list_of(schema, keyword)
            ):
                parts = {"anyOf": [close(part) for part in value]}
                kept.setdefault("allOf", []).append(parts)
            elif keyword == "$ref" and isinstance(value, str):
                kept[keyword] = refer(self.target(original))
            elif keyword == "allOf" and isinstance(value, list):
                kept.setdefault(keyword, []).extend(close(part) for part in value)
            elif keyword in CLOSED_INSIDE:
                kept[keyword] = _mapped(value, keyword, close)
            elif keyword == "pattern" and isinstance(value, str) and is_irregular(value):
                self.cannot(f"pattern: {value}", IRREGULAR)
            elif keyword == "pattern" and isinstance(value, str):
                kept[keyword] = with_escapes(value)
            elif keyword in ENFORCED or keyword == "pattern":
                is_integer = "fraction" not in self.types(original)
                limit = enforceable_limit(keyword, value, is_integer=is_integer)
                if limit is None and value is not None:
                    self.cannot(f"{keyword}: {value}")
                elif limit not in (inf, -inf):
                    kept[keyword] = limit
            elif keyword == "format":
                kept.update({keyword: value} if value in FORMATS else {})
        for keyword in not_enforced(schema):
            self.cannot(keyword)
        return kept

    def _with_count(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema without limits on the number of properties that llguidance cannot enforce.

        llguidance enforces them only if all named keys are required, or if no other keys are allowed and the
        limits are 0 or 1.  `minProperties` of 1 is rewritten with `anyOf` and `required`.
        """
        n_min, n_max = count_of(schema, "minProperties") or 0, count_of(schema, "maxProperties")
        if not n_min and n_max is None:
            return schema
        keys, required = set(_mapping(schema.get("properties"))), set(_list_of(schema, "required"))
        is_closed = schema.get("additionalProperties") is False
        is_closed &= not schema.get("patternProperties")
        if keys <= required or (is_closed and n_min <= 1 and n_max in (None, 0, 1)):
            return schema
        kept = {k: v for k, v in schema.items() if k not in ("minProperties", "maxProperties")}
        if n_max is not None and not (is_closed and n_max >= len(keys | required)):
            self.cannot("maxProperties")
        if n_min == 1 and not required:
            one_of_them = {"anyOf": [{"required": [key]} for key in sorted(keys)]}
            return {**kept, "allOf": [*_list_of(schema, "allOf"), one_of_them]}
        if n_min > len(required):
            self.cannot("minProperties")
        return kept

    def _with_patterns(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema without `patternProperties` if a pattern is irregular, so with any further keys."""
        for pattern in filter(is_irregular, _mapping(schema.get("patternProperties"))):
            self.cannot(f"patternProperties: {pattern}", IRREGULAR)
            return {
                key: value
                for key, value in schema.items()
                if key not in ("patternProperties", "additionalProperties")
            }
        return schema

    def _with_names(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema with `propertyNames` as `properties` or `patternProperties`."""
        names, properties = schema.get("propertyNames"), schema.get("properties") or {}
        seen: set[int] = set()
        while (
            isinstance(names, Mapping)
            and names.keys() & OF_NAMES == {"$ref"}
            and id(names) not in seen
        ):
            seen.add(id(names))
            names = self.target(names)
        if not isinstance(names, Mapping):
            return schema
        replaced = ("propertyNames", "patternProperties")
        others = {key: value for key, value in schema.items() if key not in replaced}
        value, patterns = schema.get("additionalProperties", True), schema.get("patternProperties")
        if "string" not in self.types(names):
            return schema
        match tuple(names.keys() & OF_NAMES):
            case ():
                return others if patterns is None else {**others, "patternProperties": patterns}
            case ("enum" | "const",):
                (choices,) = values_of(names)
                keys = [key for key in choices if isinstance(key, str)]
                n_longest = max(map(len, keys), default=0)
                if not self._are_quick(patterns or (), len(keys), n_longest):
                    return schema
                taken = {}
                for key in keys:
                    own = [properties[key]] if key in properties else []
                    taken[key] = self.joined([*own, *_fitting(patterns or {}, key)] or [value])
                return {**others, "properties": taken, "additionalProperties": False}
            case ("pattern",) if not properties and patterns is None:
                patterns = {names["pattern"]: value}
                return {**others, "patternProperties": patterns, "additionalProperties": False}
        return schema

    def _check_searches(self, schema: Mapping[str, Any]) -> None:
        """Note patterns whose search in the names of properties could be slow."""
        patterns = _mapping(schema.get("patternProperties"))
        if not self._are_quick(patterns, self._n_names, self._n_longest):
            first = max(patterns, key=lambda pattern: _n_steps(pattern, self._n_longest))
            self.cannot(f"patternProperties: {first}", "its search could be slow")

    @staticmethod
    def _are_quick(patterns: Iterable[str], n_names: int, n_longest: int) -> bool:
        """Return True if searches for patterns in so many names, up to this length, are quick."""
        steps = [_n_steps(pattern, n_longest) for pattern in patterns] if n_names else []
        n_all = sum(max(n, N_STEPS_LEAST) for n in steps) * n_names
        return n_all <= N_ALL_STEPS_MAX and max(steps, default=0) <= N_STEPS_MAX

    # --- Objects ----------------------------------------------------------------------------
    def member(self, schema: object, key: str) -> object:
        """Return a schema of the values that objects have under this key."""
        found: list[object] = []
        for one in self.objects(schema):
            given = one.properties.get(key) or _fitting(one.patterns, key)
            found.append(self.joined(given) if given else one.rest)
        return {"anyOf": found}

    def item(self, schema: object) -> object:
        """Return a schema of the items of arrays."""
        found = [self.joined(s) for one in self.arrays(schema) for s in (*one.first, one.items)]
        return {"anyOf": found}

    def arrays(self, schema: object, seen: tuple[int, ...] = ()) -> list[ArraySchema]:
        """Return the kinds of arrays that a schema allows, one for each alternative."""
        return self._kinds(schema, seen, "array", ArraySchema(), _own_array, _both_arrays)

    def objects(self, schema: object, seen: tuple[int, ...] = ()) -> list[ObjectSchema]:
        """Return the kinds of objects that a schema allows, one for each alternative.

        Raises
        ------
        InvalidRequestError
            The schema has too many kinds, or it is strict and has a keyword that cannot be enforced.
        """
        return self._kinds(schema, seen, "object", ObjectSchema(), _own_object, _merged)

    def _kinds(
        self,
        schema: object,
        seen: tuple[int, ...],
        kind: str,
        anything: Kind,
        own: Callable[[Mapping[str, Any]], Kind],
        merge: Callable[[Kind, Kind], Kind],
    ) -> list[Kind]:
        """Return the kinds of objects, or arrays, that a schema allows."""
        if not isinstance(schema, Mapping):
            return [] if schema is False else [anything]
        known: list[Kind] | None = self._found_kinds.get((id(schema), kind))
        if known is not None:
            return known
        self._n_kinds += 1
        if self._n_kinds > N_KINDS_MAX:
            raise InvalidRequestError(
                self._name, "its schema", "a schema with fewer kinds of values"
            )
        if id(schema) in seen or kind not in self.types(schema):
            return []
        for keyword in not_enforced(named := self._with_names(schema)):
            self.cannot(keyword)
        self._check_searches(named)
        seen = (*seen, id(schema))
        found = [own(named)]

        def of(part: object) -> list[Kind]:
            return self._kinds(part, seen, kind, anything, own, merge)

        for part in self.all_of(schema):
            found = _both(self._name, found, of(part), merge)
        for keyword in ("anyOf", "oneOf"):
            if parts := _list_of(schema, keyword):
                kinds = [of(part) for part in parts]
                if keyword == "oneOf" and not self._exclusions.are_disjoint(kinds):
                    self.cannot("oneOf", "its parts must exclude each other")
                found = _both(
                    self._name, found, [one for several in kinds for one in several], merge
                )
        if id(schema) in self._bases:
            self._found_kinds[id(schema), kind] = found
        return found


class Exclusions:
    """Test of the parts of a `oneOf` for mutual exclusion.  It may miss that parts exclude each other."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._found_choices: dict[int, list[str] | None] = {}  # cache of `_choices`, by identity

    def exclude_each_other(self, parts: Sequence[object]) -> bool:
        """Return True if certainly no value satisfies two of these schemas."""
        types = [self._document.types(part) for part in parts]
        n_of_each = Counter(chain.from_iterable(types))
        if any(n > 1 for name, n in n_of_each.items() if name != "object"):
            return False
        kinds = [
            self._document.objects(part)
            for part, of in zip(parts, types, strict=True)
            if "object" in of
        ]
        return len(parts) > 0 and self._are_apart(kinds, self._differ)

    def are_disjoint(self, kinds: Sequence[Sequence[object]]) -> bool:
        return self._are_apart(kinds, lambda a, b: self._excludes(a, b) and self._excludes(b, a))

    def _are_apart(
        self, kinds: Sequence[Sequence[object]], differ: Callable[[Any, Any], bool]
    ) -> bool:
        """Return True if values of different parts certainly differ, by a key of all parts or by `differ`."""
        if self._are_told_apart(kinds):
            return True
        if sum(map(len, kinds)) > N_COMPARED_MAX:
            return False
        pairs = ((a, b) for one, other in combinations(kinds, 2) for a in one for b in other)
        return all(differ(a, b) for a, b in pairs)

    def _are_told_apart(self, parts: Sequence[Sequence[object]]) -> bool:
        """Return True if some required key of all objects has different values in each part."""
        objects = [[one for one in part if isinstance(one, ObjectSchema)] for part in parts]
        required = [set(one.required) for one in chain.from_iterable(objects)]
        if not required or len(required) < sum(map(len, parts)):
            return False
        for key in set.intersection(*required):
            found = [
                [self._choices(self._document.joined(one.properties[key])) for one in part]
                for part in objects
            ]
            own = [{value for values in part for value in values or ()} for part in found]
            if None in chain.from_iterable(found):
                continue
            if sum(map(len, own)) == len(set().union(*own)):
                return True
        return False

    def _excludes(self, one: object, other: object) -> bool:
        """Return True if certainly no value of kind `one` is also of kind `other`."""
        if not isinstance(one, ObjectSchema) or not isinstance(other, ObjectSchema):
            return False
        return any(not one.takes(key) for key in other.required) or self._differ(one, other)

    def _differ(self, one: ObjectSchema, other: ObjectSchema) -> bool:
        """Return True if a key that one of them requires can certainly not have the same value in both."""
        return any(
            self._never_equal(one.properties.get(key), other.properties.get(key))
            for key in {*one.required, *other.required}
        )

    def _never_equal(
        self, one: tuple[object, ...] | None, other: tuple[object, ...] | None
    ) -> bool:
        if not one or not other:
            return False
        first, second = self._document.joined(one), self._document.joined(other)
        if not self._document.types(first) & self._document.types(second):
            return True
        known = [self._choices(schema) for schema in (first, second)]
        return None not in known and not set(known[0] or ()) & set(known[1] or ())

    def _choices(self, schema: object) -> list[str] | None:
        """Return all values that a schema allows, each as JSON text; None if it does not list them."""
        if not isinstance(schema, Mapping):
            return None
        for values in values_of(schema):
            return [json.dumps(value, sort_keys=True) for value in values]
        if id(schema) not in self._found_choices:
            self._found_choices[id(schema)] = None  # the schema may refer to itself
            found = (self._choices(part) for part in self._document.all_of(schema))
            known = next((values for values in found if values is not None), None)
            self._found_choices[id(schema)] = known
        return self._found_choices[id(schema)]


def _own_object(schema: Mapping[str, Any]) -> ObjectSchema:
    properties = _mapping(schema.get("properties"))
    patterns = _mapping(schema.get("patternProperties"))
    required = schema.get("required")
    required = list(dict.fromkeys(required)) if isinstance(required, list) else []
    rest = schema.get("additionalProperties", True)
    named = {key: (value, *_fitting(patterns, key)) for key, value in properties.items()}
    for key in required:
        named.setdefault(key, _fitting(patterns, key) or (rest,))
    values = {key: schema[key] for key in ("const", "enum") if key in schema}
    return ObjectSchema(
        properties=named,
        required=tuple(required),
        additional=schema.get("additionalProperties"),
        patterns=patterns,
        n_min=count_of(schema, "minProperties") or 0,
        n_max=count_of(schema, "maxProperties"),
        others=(values,) if values else (),
        names_keys="properties" in schema,
    )


def _both(
    name: str, first: Sequence[Kind], second: Sequence[Kind], merge: Callable[[Kind, Kind], Kind]
) -> list[Kind]:
    """Return the merged kind of each pair of `first` and `second`.

    Raises
    ------
    InvalidRequestError
        There are more than `N_ALTERNATIVES_MAX` pairs.
    """
    if len(first) * len(second) > N_ALTERNATIVES_MAX:
        limit = f"of at most {N_ALTERNATIVES_MAX} kinds of values"
        raise InvalidRequestError(name, f"{len(first)} times {len(second)}", limit)
    return [merge(one, other) for one in first for other in second]


def _own_array(schema: Mapping[str, Any]) -> ArraySchema:
    items = schema.get("items", True)
    first = schema.get("prefixItems", [])
    if isinstance(items, list):  # as before draft 2020-12
        first, items = items, schema.get("additionalItems", True)
    first = first if isinstance(first, list) else []
    values = {key: schema[key] for key in ("const", "enum") if key in schema}
    return ArraySchema(
        tuple((schema,) for schema in first),
        () if items is True else (items,),
        count_of(schema, "minItems") or 0,
        count_of(schema, "maxItems"),
        (values,) if values else (),
    )


def _both_arrays(one: ArraySchema, other: ArraySchema) -> ArraySchema:
    n = max(len(one.first), len(other.first))
    n_max = [limit for limit in (one.n_max, other.n_max) if limit is not None]
    return ArraySchema(
        tuple(_each_once(one.at(i) + other.at(i)) for i in range(n)),
        _each_once(one.items + other.items),
        max(one.n_min, other.n_min),
        min(n_max, default=None),
        _each_once(one.others + other.others),
    )


def _each_once(schemas: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return schemas without duplicates."""
    return tuple({id(schema): schema for schema in schemas}.values())


def count_of(schema: Mapping[str, Any], keyword: str) -> int | None:
    """Return a limit on a length or a number; None without one, or if it cannot be enforced."""
    limit = enforceable_limit(keyword, schema.get(keyword), is_integer=True)
    return limit if isinstance(limit, int) and limit >= 0 else None


def _merged(one: ObjectSchema, other: ObjectSchema) -> ObjectSchema:
    """Return the kind of objects that are of both kinds."""
    properties: dict[str, tuple[object, ...]] = {}
    for key in (*one.properties, *(key for key in other.properties if key not in one.properties)):
        schemas: tuple[object, ...] = ()
        for kind in (one, other):
            said = kind.properties.get(key) or _fitting(kind.patterns, key)
            if not said and kind.additional is not None:
                said = (kind.additional,)
            schemas += said
        properties[key] = _each_once(schemas)
    additional: object = one.additional if other.additional is None else other.additional
    if one.additional is not None and other.additional is not None:
        additional = {"allOf": [one.additional, other.additional]}
        if False in (one.additional, other.additional):
            additional = False
    n_max = [n for n in (one.n_max, other.n_max) if n is not None]
    return replace(
        one,
        properties=properties,
        required=tuple(dict.fromkeys((*one.required, *other.required))),
        additional=additional,
        patterns=_merged_patterns(one, other),
        n_min=max(one.n_min, other.n_min),
        n_max=min(n_max, default=None),
        others=_each_once(one.others + other.others),
        names_keys=one.names_keys or other.names_keys,
    )


def _merged_patterns(one: ObjectSchema, other: ObjectSchema) -> dict[str, object]:
    found: dict[str, object] = {}
    for pattern in (*one.patterns, *other.patterns):
        said = [kind.patterns.get(pattern, kind.additional) for kind in (one, other)]
        found[pattern] = {"allOf": [schema for schema in said if schema is not None]}
    return found


def not_enforced(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keywords that assert something and cannot be enforced."""
    for keyword, neutral in NOT_ENFORCED.items():
        if keyword not in schema or schema[keyword] in neutral:
            continue
        is_alone = keyword == "if" and not {"then", "else"} & schema.keys()
        is_any = keyword == "contains" and schema.get("minContains") == 0
        if not is_alone and not (is_any and "maxContains" not in schema):
            yield keyword


def _fitting(patterns: Mapping[str, object], key: str) -> tuple[object, ...]:
    """Return the schemas of the patterns that a key fits."""
    return tuple(schema for pattern, schema in patterns.items() if searches(pattern, key))


@lru_cache(maxsize=1024)
def _n_steps(pattern: str, n_characters: int) -> float:
    """Return an upper bound of the steps that `re` takes to search for a pattern in a text of this length.

    `re` tries all combinations: of the lengths that a quantifier allows, and of alternatives.
    """
    if re.search(r"\)[*+{]|\(\?[^:]", pattern):
        return inf  # combinations of combinations, or flags that change what a pattern means
    own = pattern.replace("(?:", "(")
    n_lengths = len(re.findall(r"[*+{]", own))
    n_choices = own.count("?") + own.count("|")
    if n_lengths + n_choices > N_QUANTIFIERS_MAX:
        return inf
    return float((n_characters + 1) ** (1 + n_lengths) * 2**n_choices)


@lru_cache(maxsize=4096)
def searches(pattern: str, text: str) -> bool:
    """Return True if a pattern is found in a text; False too if the search could be slow or is invalid."""
    if _n_steps(pattern, len(text)) > N_STEPS_MAX:
        return False
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def _with_items(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with `prefixItems` and `items` in place of `additionalItems`, which older drafts have."""
    kept = {key: value for key, value in schema.items() if key != "additionalItems"}
    if not isinstance(items := schema.get("items"), list):
        return kept
    return {**kept, "prefixItems": items, "items": schema.get("additionalItems", True)}


def _mapped(value: Any, keyword: str, close: Any) -> Any:
    """Return a keyword's value with each schema in it closed."""
    if keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
        is_named = keyword == "properties"
        return {k if is_named else with_escapes(k): close(part) for k, part in value.items()}
    if isinstance(value, list):
        return [close(part) for part in value]
    return close(value) if keyword in ALONE else value  # llguidance reports the wrong type


def without_nulls(schema: object) -> object:
    """Return a schema without keywords whose value is null: some libraries write unset keywords as null."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, object] = {}
    for keyword, value in schema.items():
        if keyword in IN_MAPS and isinstance(value, Mapping):
            kept[keyword] = {key: without_nulls(part) for key, part in value.items()}
        elif keyword in (*IN_LISTS, "items") and isinstance(value, list):
            kept[keyword] = [without_nulls(part) for part in value]
        elif value is not None or keyword in ("const", "default"):
            kept[keyword] = without_nulls(value) if keyword in ALONE else value
    return kept


def _parts_of(schema: Mapping[str, Any]) -> Iterator[object]:
    """Yield the direct subschemas of a schema, and None or other values of the same keywords."""
    for keyword in IN_MAPS:
        yield from _mapping(schema.get(keyword)).values()
    for keyword in (*IN_LISTS, "items"):
        yield from _list_of(schema, keyword)
    for keyword in ALONE:
        yield schema.get(keyword)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list_of(schema: Mapping[str, Any], keyword: str) -> list[object]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _choices_of(schema: Mapping[str, Any]) -> Iterator[list[object]]:
    """Yield the lists of `anyOf` and `oneOf` that are not empty."""
    for keyword in ("anyOf", "oneOf"):
        if parts := _list_of(schema, keyword):
            yield parts


def values_of(schema: Mapping[str, Any]) -> Iterator[list[object]]:
    """Yield the values of `enum`, and the value of `const` as a list: each list has every allowed value."""
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]
    if "const" in schema:
        yield [schema["const"]]


def _named_types(names: object) -> frozenset[str] | None:
    """Return the types, as in `TYPES`, of these names of JSON Schema; None if a name is unknown."""
    if names is None:
        return TYPES
    if not isinstance(names, list):
        return None
    found: set[str] = set()
    for name in names:
        if name == "number":
            found |= {"integer", "fraction"}
        elif isinstance(name, str) and name in TYPES:
            found.add(name)
        else:
            return None
    return frozenset(found)


def type_of(value: object) -> str:
    """Return the type of a value, one of `TYPES`."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    kinds: dict[type, str] = {
        type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array",
    }  # fmt: skip
    return kinds.get(type(value), "object")


def enforceable(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a self-contained schema for llguidance, with the options in its `x-guidance`.

    Raises
    ------
    InvalidRequestError
        A keyword cannot be enforced, and `x-guidance` has no true "lenient".
    """
    given = schema.get("x-guidance")
    options = given if isinstance(given, Mapping) else {}
    try:
        root = without_nulls(schema)
        document = SchemaDocument(name, root, is_strict=not options.get("lenient"))
        closed = document.closed(root)
    except RecursionError:
        raise InvalidRequestError(name, "its references", "references with less nesting") from None
    say_ignored(name, document.ignored)
    return {"x-guidance": dict(options), **closed} if options else closed


def say_ignored(name: str, keywords: Iterable[str]) -> None:
    """Log the keywords of a schema that are not enforced, each once in the life of the process."""
    for keyword in keywords:
        where = re.sub(r"\[\d+\]", "", name)
        log_once(logger, "%s: %s cannot be enforced and is ignored", where, keyword)
