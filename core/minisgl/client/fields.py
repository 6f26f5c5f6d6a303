"""Typed readers of a JSON body, with the error codes of the OpenAI API.

JSON ``null`` is the same as an absent field. Booleans and strings are never numbers; a float with an integral value is an
integer (JavaScript clients send those). Every refusal is a RequestError 400 that names the path of the field.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from minisgl.base.bounds import INT64_MAX, INT64_MIN
from minisgl.base.errors import RequestError


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


class Fields:
    """One JSON object whose fields are read by name. ``path``: where it stands in the body, "" for the body itself.
    It remembers which names were asked for, so that ``unknown`` can say what was not."""

    __slots__ = ("body", "path", "seen")

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self.body = body
        self.path = path
        self.seen: set[str] = set()

    def at(self, name: str) -> str:
        """Path of the field ``name``."""
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """The value as parsed, None if absent or null."""
        self.seen.add(name)
        return self.body.get(name)

    def require(self, name: str) -> Any:
        """The value. Raises: missing_required_parameter if it is absent or null."""
        value = self.raw(name)
        if value is None:
            path = self.at(name)
            raise RequestError(f"'{path}' is required.", code="missing_required_parameter", param=path)
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.raw(name)
        return None if value is None else as_boolean(value, self.at(name))

    def integer(self, name: str, low: float = INT64_MIN, high: float = INT64_MAX) -> int | None:
        value = self.raw(name)
        return None if value is None else as_integer(value, self.at(name), low, high)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        value = self.raw(name)
        return None if value is None else as_number(value, self.at(name), low, high)

    def string(self, name: str, min_len: int = 0, max_len: int | None = None) -> str | None:
        value = self.raw(name)
        return None if value is None else as_string(value, self.at(name), min_len, max_len)

    def array(self, name: str, min_len: int = 0, max_len: int | None = None) -> list[Any] | None:
        value = self.raw(name)
        return None if value is None else as_array(value, self.at(name), min_len, max_len)

    def object(self, name: str) -> Fields | None:
        value = self.raw(name)
        return None if value is None else Fields(as_object(value, self.at(name)), self.at(name))

    def unsupported(self, name: str, why: str = "is not supported by this server; leave it out") -> RequestError:
        """The refusal of a known field whose effect this server does not have."""
        path = self.at(name)
        return RequestError(f"'{path}' {why}.", code="unsupported_parameter", param=path)

    def refuse(self, name: str, *neutral: Any) -> None:
        """Refuse the field unless it is absent, null or one of the ``neutral`` values, which ask for nothing."""
        value = self.raw(name)
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            return
        raise self.unsupported(name)

    def unknown(self) -> list[str]:
        """Names in the object that nobody asked for."""
        return [name for name in self.body if name not in self.seen]
