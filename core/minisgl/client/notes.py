"""What readers of a JSON body ask of it, noted while they read examples: the schema of the body, which cannot differ from
what is read because it is what was read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from minisgl.base.bounds import INT64_MAX, INT64_MIN

Schema = dict[str, Any]


class Note:
    """What was asked of one value, over all examples: its JSON types with their limits, its members, its items."""

    def __init__(self) -> None:
        self._types: dict[str, Schema] = {}  # JSON type -> limits
        self._members: dict[str, Note] = {}
        self._required: list[set[str]] = []  # by each look at it as an object
        self._rest: Note | None = None  # members of any name
        self._item: Note | None = None
        self._closed = False
        self._only: list[Any] | None = None  # the values that a field may have whose effect is not supported

    # ------------------------------------------------------------------------------------------------------- for readers

    def boolean(self) -> None:
        self._types["boolean"] = {}

    def integer(self, low: float, high: float) -> None:
        limits = {"minimum": int(low)} if low > INT64_MIN else {}
        self._widest("integer", limits | ({"maximum": int(high)} if high < INT64_MAX else {}))

    def number(self, low: float, high: float) -> None:
        limits = {"minimum": low, "maximum": high}
        self._widest("number", {limit: value for limit, value in limits.items() if math.isfinite(value)})

    def _widest(self, kind: str, limits: Schema) -> None:
        """Limits that depend on other fields: the widest are told."""
        known = self._types.setdefault(kind, limits)
        ends = (("minimum", min), ("maximum", max))
        self._types[kind] = {e: of(known[e], limits[e]) for e, of in ends if e in known and e in limits}

    def string(self, min_len: int = 0, max_len: int | None = None) -> None:
        limits = self._types.setdefault("string", {})
        limits |= {"minLength": min_len} if min_len else {}
        limits |= {"maxLength": max_len} if max_len is not None else {}

    def one_of(self, accepted: Collection[str]) -> None:
        known = self._types.setdefault("string", {}).setdefault("enum", [])
        known += [value for value in accepted if value not in known]

    def array(self, min_len: int = 0, max_len: int | None = None) -> None:
        limits = self._types.setdefault("array", {})
        limits |= {"minItems": min_len} if min_len else {}
        limits |= {"maxItems": max_len} if max_len is not None else {}

    def object(self) -> None:
        self._types["object"] = {}

    def look(self) -> set[str]:
        """An object whose members are read. Returns: where to put the names of those that it must have."""
        self.object()
        self._required.append(set())
        return self._required[-1]

    def close(self) -> None:
        """An object that has no members but those that are read."""
        self._closed = True

    def only(self, values: Iterable[Any]) -> None:
        self._only = [*values]

    def member(self, name: str) -> Note:
        return self._members.setdefault(name, Note())

    def adopt(self, name: str, other: Note) -> None:
        """The member ``name`` is read elsewhere, as ``other``."""
        self._members[name] = other

    def rest(self) -> Note:
        """The members of an object that has them under any name."""
        self._rest = self._rest or Note()
        return self._rest

    def item(self) -> Note:
        """The items of an array: one note for all."""
        self._item = self._item or Note()
        return self._item

    # ------------------------------------------------------------------------------------------------------------ schema

    def schema(self, nullable: bool = False) -> Schema:
        """As JSON Schema. ``nullable``: null is the same as absent."""
        if self._only is not None:
            return {"enum": [*self._only, None], "description": "Not supported: other values are refused."}
        if not self._types:
            return {}
        forms = [{"type": kind, **limits, **self._inside(kind)} for kind, limits in self._types.items()]
        if len(forms) > 1:
            return {"anyOf": [*forms, *([{"type": "null"}] if nullable else [])]}
        if nullable:
            forms[0]["type"] = [forms[0]["type"], "null"]
            if "enum" in forms[0]:
                forms[0]["enum"] = [*forms[0]["enum"], None]
        return forms[0]

    def _inside(self, kind: str) -> Schema:
        if kind == "array":
            return {} if self._item is None else {"items": self._item.schema()}
        if kind != "object":
            return {}
        required = set.intersection(*self._required) if self._required else set()
        inside: Schema = {}
        if self._members:
            inside["properties"] = {n: m.schema(n not in required) for n, m in self._members.items()}
        if required:
            inside["required"] = [n for n in self._members if n in required]
        if self._closed:
            inside["additionalProperties"] = False
        if self._rest is not None:
            inside["additionalProperties"] = self._rest.schema(nullable=True)
        return inside


def described(read: Callable[[dict[str, Any], Note], object], examples: Iterable[Mapping[str, Any]]) -> Schema:
    """The schema of the bodies that ``read`` takes. ``examples``: valid bodies which together have every optional object and
    array, and every form that a value may have. Raises: what ``read`` raises."""
    note = Note()
    for body in examples:
        read(dict(body), note)
    return note.schema()
