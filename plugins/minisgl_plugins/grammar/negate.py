"""What a JSON schema forbids, as a schema. It may be narrower than that, never wider: all that fits it fails the other one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .dialect import ANNOTATIONS, TYPES, Document, Schema

DEPTH = 16  # of references in one another
MAX_WORDS = 64  # strings that are not to come


class Negation:
    def __init__(self, document: Document) -> None:
        self._document = document

    def of(self, schema: Schema, depth: int = 0) -> Schema | None:
        """False if nothing fails ``schema``; None if what does cannot be said. Raises: ValueError if it is too large."""
        self._document.step()
        if isinstance(schema, bool):
            return not schema
        keys = [key for key in schema if key not in ANNOTATIONS]
        if "$ref" in keys and self._document.draft <= 7:
            keys = ["$ref"]  # the others mean nothing beside it
        if depth > DEPTH or not all(map(self._document.knows, keys)):
            return None
        found = [self._failing(key, schema, depth) for key in keys]
        options = [option for some in found for option in some or () if option is not False]
        if not options:
            return None if None in found else False
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _failing(self, key: str, schema: Mapping[str, Any], depth: int) -> list[Schema] | None:
        """What fails ``schema`` by this keyword, as alternatives. None if it cannot be said."""
        value = schema[key]
        if key in PLAIN:
            plain: list[Schema] = PLAIN[key](value, schema)
            return plain
        if key == "not":
            return [value]
        if key in ("anyOf", "oneOf"):
            return self._none_of(value, depth)
        if key == "allOf":
            return self._each(value, depth)
        if key == "properties":
            return self._each(value.values(), depth, [{"type": "object", "required": [p]} for p in value], list(value))
        if key in ("items", "prefixItems"):
            before = len(schema.get("prefixItems", [])) if key == "items" and self._document.draft >= 2020 else 0
            return self._items(value, before, depth)
        if key == "contains" and not schema.keys() & {"minContains", "maxContains"}:
            without = self.of(value, depth)
            return None if without is None else [{"type": "array", "items": without}]
        if key == "$ref":
            target = self._document.target(value)
            return None if target is None else self._each([target], depth + 1)
        return None

    def _each(
        self,
        schemas: Iterable[Schema],
        depth: int,
        holders: Sequence[Mapping[str, Any]] = (),
        names: Sequence[str] = (),
    ) -> list[Schema] | None:
        """Failing one of them, each as a property of its holder if there are holders."""
        found = [self.of(schema, depth) for schema in schemas]
        said = [(i, failing) for i, failing in enumerate(found) if failing is not None and failing is not False]
        if not said and None in found:
            return None
        return [{**holders[i], "properties": {names[i]: failing}} if holders else failing for i, failing in said]

    def _none_of(self, schemas: Sequence[Schema], depth: int) -> list[Schema] | None:
        """For oneOf, where several may fit to fail, this is only one way."""
        found = [self.of(schema, depth) for schema in schemas]
        return None if None in found else [{"allOf": found}]

    def _items(self, value: Any, before: int, depth: int) -> list[Schema] | None:
        """The first item after so many fails, or in a tuple the one at some place."""
        schemas = value if isinstance(value, list) else [value]
        found = [self.of(schema, depth) for schema in schemas]
        key = "items" if self._document.draft < 2020 else "prefixItems"
        said = [
            {"type": "array", "minItems": i + 1, key: [*([True] * i), failing]}
            for i, failing in enumerate(found, before)
            if failing is not None and failing is not False
        ]
        return None if not said and None in found else said


def _type(value: Any, _: Any) -> list[Schema]:
    given = {value} if isinstance(value, str) else set(value)
    given |= {"number"} if "integer" in given else set()  # that a number is no integer cannot be said
    return _of_types(given)


def _of_types(but: Iterable[str]) -> list[Schema]:
    rest = [t for t in TYPES if t not in set(but)]
    return [{"type": rest}] if rest else []


def _values(values: Sequence[Any]) -> list[Schema]:
    """Other values than these, but for numbers between them, arrays and objects."""
    kinds = {_kind(v) for v in values}
    out = _of_types(kinds)
    booleans = [v for v in values if isinstance(v, bool)]
    if len(set(booleans)) == 1:
        out.append({"const": not booleans[0]})
    numbers = [v for v in values if _kind(v) == "number"]
    if numbers:
        out += [
            {"type": "number", "exclusiveMaximum": min(numbers)},
            {"type": "number", "exclusiveMinimum": max(numbers)},
        ]
    words = [v for v in values if isinstance(v, str)]
    if 0 < len(words) <= MAX_WORDS:
        out.append({"type": "string", "pattern": f"^({other_words(words)})$"})
    return out


def other_words(words: Sequence[str]) -> str:
    """An expression for every text but these, without look-ahead."""
    heads: dict[str, list[str]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], []).append(word[1:])
    branches = [f"{_literal(c)}({other_words(rest)})" for c, rest in heads.items()]
    other = "[^" + "".join(map(_literal, heads)) + "]" if heads else r"(.|\n)"
    branches.append(rf"{other}(.|\n)*")
    body = "|".join(branches)
    return body if "" in words else f"({body})?"


def _literal(c: str) -> str:
    return c if c.isalnum() or c == "_" else f"\\u{{{ord(c):x}}}"


def _kind(value: Any) -> str:
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for cls, name in kinds if isinstance(value, cls)), "null")


def _bound(other: str, strict: str) -> Any:
    """Of minimum and maximum: ``other`` is the opposite one, ``strict`` makes it exclusive."""
    own = "exclusiveMaximum" if strict == "exclusiveMinimum" else "exclusiveMinimum"

    def failing(value: Any, schema: Mapping[str, Any]) -> list[Schema]:
        if schema.get(own) is True:  # as draft 4 has it
            return [{"type": "number", other: value}]
        return [{"type": "number", strict: value}]

    return failing


def _exclusive(other: str) -> Any:
    def failing(value: Any, _: Any) -> list[Schema]:
        return [] if isinstance(value, bool) else [{"type": "number", other: value}]

    return failing


def _at_least(kind: str, other: str) -> Any:
    return lambda value, _: [{"type": kind, other: int(value) - 1}] if value >= 1 else []


def _at_most(kind: str, other: str) -> Any:
    return lambda value, _: [{"type": kind, other: int(value) + 1}]


# Keywords without schemas in them: (value, their schema) -> what fails.
PLAIN: Mapping[str, Any] = {
    "type": _type,
    "const": lambda value, _: _values([value]),
    "enum": lambda value, _: _values(value),
    "required": lambda value, _: [{"type": "object", "properties": {name: False}} for name in value],
    "minimum": _bound("maximum", "exclusiveMaximum"),
    "maximum": _bound("minimum", "exclusiveMinimum"),
    "exclusiveMinimum": _exclusive("maximum"),
    "exclusiveMaximum": _exclusive("minimum"),
    "minLength": _at_least("string", "maxLength"),
    "maxLength": _at_most("string", "minLength"),
    "minItems": _at_least("array", "maxItems"),
    "maxItems": _at_most("array", "minItems"),
    "minProperties": _at_least("object", "maxProperties"),
    "maxProperties": _at_most("object", "minProperties"),
}
