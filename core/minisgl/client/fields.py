"""Typed readers of a JSON body, with the error codes of the OpenAI API.

JSON ``null`` is the same as an absent field. Booleans and strings are never numbers; a float with an integral value is an
integer (JavaScript clients send those). Every refusal is a RequestError 400 that names the path of the field.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from minisgl.base.bounds import INT64_MAX, INT64_MIN
from minisgl.base.errors import RequestError
from minisgl.client.notes import Note

UNSUPPORTED = "is not supported by this server; leave it out"


def show(value: Any) -> str:
    """``value`` for an error message: its JSON type, and the value itself if it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"a string of {len(value)} characters"
    if isinstance(value, list):
        return f"an array of {len(value)} items"
    return "an object"


def invalid_type(path: str, value: Any, expected: str) -> RequestError:
    return RequestError(
        f"'{path}' must be {expected}; it is {show(value)}.", code="invalid_type", param=path
    )  # fmt: skip


def as_boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_type(path, value, "true or false")
    return value


def as_integer(value: Any, path: str, low: float = INT64_MIN, high: float = INT64_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise invalid_type(path, value, "an integer")
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        raise invalid_type(path, value, "an integer")
    # The JSON parser makes floats of integers below int64, and rounds the first of them up to its limit.
    if value < low or (isinstance(value, float) and value <= INT64_MIN):
        raise RequestError(
            f"'{path}' must be at least {low}; it is {show(value)}.", code="integer_below_min_value", param=path
        )
    if value > high:
        raise RequestError(
            f"'{path}' must be at most {high}; it is {show(value)}.", code="integer_above_max_value", param=path
        )
    return int(value)


def as_number(value: Any, path: str, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise invalid_type(path, value, "a number")
    if value < low:
        raise RequestError(
            f"'{path}' must be at least {low:g}; it is {show(value)}.", code="decimal_below_min_value", param=path
        )
    if value > high:
        raise RequestError(
            f"'{path}' must be at most {high:g}; it is {show(value)}.", code="decimal_above_max_value", param=path
        )
    return float(value)


def as_string(value: Any, path: str, min_len: int = 0, max_len: int | None = None) -> str:
    if not isinstance(value, str):
        raise invalid_type(path, value, "a string")
    if len(value) < min_len:
        raise RequestError(
            f"'{path}' must have at least {min_len} characters; it has {len(value)}.",
            code="string_below_min_length",
            param=path,
        )
    if max_len is not None and len(value) > max_len:
        raise RequestError(
            f"'{path}' may have at most {max_len} characters; it has {len(value)}.",
            code="string_above_max_length",
            param=path,
        )
    return value


def as_array(value: Any, path: str, min_len: int = 0, max_len: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise invalid_type(path, value, "an array")
    if len(value) < min_len:
        raise RequestError(f"'{path}' must have at least {min_len} item(s).", code="empty_array", param=path)
    if max_len is not None and len(value) > max_len:
        raise RequestError(
            f"'{path}' may have at most {max_len} items; it has {len(value)}.",
            code="array_above_max_length",
            param=path,
        )
    return value


def as_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_type(path, value, "an object")
    return value


def one_of(value: str, path: str, accepted: Collection[str]) -> str:
    if value not in accepted:
        names = ", ".join(repr(a) for a in accepted)
        raise RequestError(f"'{path}' must be one of {names}; it is {show(value)}.", code="invalid_value", param=path)
    return value


class Value:
    """One JSON value and its ``path``, as in ``messages[2].content``; its type is checked when it is read. ``note``: where
    to note what it is read as, if somebody describes the body."""

    __slots__ = ("note", "path", "raw")

    def __init__(self, raw: Any, path: str, note: Note | None = None) -> None:
        self.raw = raw
        self.path = path
        self.note = note

    def boolean(self) -> bool:
        if self.note is not None:
            self.note.boolean()
        return as_boolean(self.raw, self.path)

    def integer(self, low: float = INT64_MIN, high: float = INT64_MAX) -> int:
        if self.note is not None:
            self.note.integer(low, high)
        return as_integer(self.raw, self.path, low, high)

    def number(self, low: float = -math.inf, high: float = math.inf) -> float:
        if self.note is not None:
            self.note.number(low, high)
        return as_number(self.raw, self.path, low, high)

    def string(self, min_len: int = 0, max_len: int | None = None) -> str:
        if self.note is not None:
            self.note.string(min_len, max_len)
        return as_string(self.raw, self.path, min_len, max_len)

    def one_of(self, accepted: Collection[str]) -> str:
        """One of these strings."""
        if self.note is not None:
            self.note.one_of(accepted)
        return one_of(as_string(self.raw, self.path), self.path, accepted)

    def array(self, min_len: int = 0, max_len: int | None = None) -> list[Any]:
        """The items as parsed, as for token ids, of which there may be millions."""
        if self.note is not None:
            self.note.array(min_len, max_len)
        return as_array(self.raw, self.path, min_len, max_len)

    def items(self, min_len: int = 0, max_len: int | None = None) -> Iterator[Value]:
        note = None if self.note is None else self.note.item()
        items = self.array(min_len, max_len)
        return (Value(item, f"{self.path}[{i}]", note) for i, item in enumerate(items))

    def object(self) -> Fields:
        return Fields(as_object(self.raw, self.path), self.path, self.note)

    def wrong_type(self, expected: str) -> RequestError:
        return invalid_type(self.path, self.raw, expected)

    def refused(self, why: str, code: str = "invalid_value") -> RequestError:
        """``why``: what follows the path in the message."""
        return RequestError(f"'{self.path}' {why}.", code=code, param=self.path)


class Fields:
    """One JSON object whose fields are read by name. ``path``: where it stands in the body, "" for the body itself.
    It remembers which names were asked for, so that ``unknown`` can say what was not. ``note``: as of a Value;
    ``required``: where to note what the object must have."""

    __slots__ = ("body", "note", "path", "required", "seen")

    def __init__(self, body: Mapping[str, Any], path: str = "", note: Note | None = None) -> None:
        self.body = body
        self.path = path
        self.note = note
        self.seen: set[str] = set()
        self.required = None if note is None else note.look()

    def at(self, name: str) -> str:
        """Path of the field ``name``."""
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """The value as parsed, None if absent or null."""
        self.seen.add(name)
        if self.note is not None:
            self.note.member(name)
        return self.body.get(name)

    def value(self, name: str) -> Value | None:
        """For a field that may be of several types."""
        raw = self.raw(name)
        return None if raw is None else self._value(name, raw)

    def need(self, name: str) -> Value:
        """Raises: missing_required_parameter if it is absent or null."""
        return self._value(name, self.require(name))

    def _value(self, name: str, raw: Any) -> Value:
        return Value(raw, self.at(name), None if self.note is None else self.note.member(name))

    def require(self, name: str) -> Any:
        """The value as parsed. Raises: missing_required_parameter if it is absent or null."""
        value = self.raw(name)
        if self.required is not None:
            self.required.add(name)
        if value is None:
            path = self.at(name)
            raise RequestError(f"'{path}' is required.", code="missing_required_parameter", param=path)
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).boolean()
        return None if value is None else as_boolean(value, self.at(name))

    def integer(self, name: str, low: float = INT64_MIN, high: float = INT64_MAX) -> int | None:
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).integer(low, high)
        return None if value is None else as_integer(value, self.at(name), low, high)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).number(low, high)
        return None if value is None else as_number(value, self.at(name), low, high)

    def string(self, name: str, min_len: int = 0, max_len: int | None = None) -> str | None:
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).string(min_len, max_len)
        return None if value is None else as_string(value, self.at(name), min_len, max_len)

    def one_of(self, name: str, accepted: Collection[str]) -> str | None:
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).one_of(accepted)
        return None if value is None else one_of(as_string(value, self.at(name)), self.at(name), accepted)

    def array(self, name: str, min_len: int = 0, max_len: int | None = None) -> list[Any] | None:
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).array(min_len, max_len)
        return None if value is None else as_array(value, self.at(name), min_len, max_len)

    def items(self, name: str, min_len: int = 0, max_len: int | None = None) -> Iterator[Value]:
        """Of an array; none if it is absent or null."""
        if self.note is not None:
            self.note.member(name).array(min_len, max_len)
        value = self.value(name)
        return iter(()) if value is None else value.items(min_len, max_len)

    def object(self, name: str) -> Fields | None:
        if self.note is not None:
            self.note.member(name).object()
        value = self.value(name)
        return None if value is None else value.object()

    def members(self) -> Iterator[tuple[str, Value]]:
        """All that are not null, for an object that has them under any name."""
        note = None if self.note is None else self.note.rest()
        return ((name, Value(raw, self.at(name), note)) for name, raw in self.body.items() if raw is not None)

    def unsupported(self, name: str, why: str = UNSUPPORTED) -> RequestError:
        """The refusal of a known field whose effect this server does not have."""
        path = self.at(name)
        return RequestError(f"'{path}' {why}.", code="unsupported_parameter", param=path)

    def refuse(self, name: str, *neutral: Any, why: str = UNSUPPORTED) -> None:
        """Refuse the field unless it is absent, null or one of the ``neutral`` values, which ask for nothing."""
        value = self.raw(name)
        if self.note is not None:
            self.note.member(name).only(neutral)
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            return
        raise self.unsupported(name, why)

    def unknown(self) -> list[str]:
        """Names in the object that nobody asked for."""
        return [name for name in self.body if name not in self.seen]
