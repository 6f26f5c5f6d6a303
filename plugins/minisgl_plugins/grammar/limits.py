"""Exclusive bounds of numbers that llguidance would let through, as inclusive ones a little further in.

Between two bounds with no whole number in between, where one is itself a whole number and exclusive (above 0, at most 0.5),
llguidance 1.9 allows that number.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ulp
from typing import Any

from .dialect import Schema, subschemas, within

EXCLUSIVE = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
NEAR = 1e-9


def leaky(root: Schema) -> bool:
    """Whether there is a whole exclusive bound, and a bound that is not whole: they may meet."""
    every = list(subschemas(root))
    bounds = [s.get(key) for s in every for pair in EXCLUSIVE for key in pair[:2]]
    return any(map(_fraction, bounds)) and any(_bound(s, *pair[:2]) is not None for s in every for pair in EXCLUSIVE)


def tightened(schema: Schema) -> Schema:
    """With inclusive bounds for those. Numbers closer to them than 1e-9 are lost."""
    if not isinstance(schema, Mapping):
        return schema
    new = dict(schema)
    for exclusive, inclusive, sign in EXCLUSIVE:
        bound = _bound(schema, exclusive, inclusive)
        if bound is None:
            continue
        near = bound + sign * max(NEAR, ulp(bound))
        other = near if new.pop(exclusive) is True else new.get(inclusive, near)
        new[inclusive] = max(near, other) if sign > 0 else min(near, other)
    return {key: within(key, value, tightened) for key, value in new.items()}


def _bound(schema: Mapping[str, Any], exclusive: str, inclusive: str) -> float | None:
    """The exclusive bound if it is a whole number, of what need not be an integer. Draft 4 says by a boolean that it is."""
    value = schema.get(exclusive)
    value = schema.get(inclusive) if value is True else value
    if isinstance(value, bool) or not isinstance(value, int | float) or schema.get("type") == "integer":
        return None
    return float(value) if float(value).is_integer() else None


def _fraction(value: Any) -> bool:
    return isinstance(value, float) and not value.is_integer()
