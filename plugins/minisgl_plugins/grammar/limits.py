"""What llguidance 1.9 would let through though a schema does not allow it, said so that it does not.

Between two bounds with no whole number in between, where one is itself a whole number and exclusive (above 0, at most 0.5), it
allows that number. Of dates it allows the 29th of February in every year, and the year 0. (Dates with times have no leap seconds then,
which only some days have.)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ulp
from typing import Any

from .dialect import Schema, subschemas, within

EXCLUSIVE = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
NEAR = 1e-9
YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
LONG, SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
DATE = f"({YEAR}-({LONG}|{SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
# Whole patterns in place of formats: two expressions for a text cost far more than one.
FORMATS = {"date": f"^{DATE}$", "date-time": rf"^{DATE}T{HOUR}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{HOUR})$"}


def tightened(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema, without what is let through. Numbers closer to such a bound than 1e-9 are lost.

    Raises: ValueError for one that is no schema: nobody has checked its form.
    """
    try:
        return _tightened(root)
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"a keyword has a value that it cannot have: {exc}") from exc


def _tightened(root: Mapping[str, Any]) -> Mapping[str, Any]:
    every = list(subschemas(root))
    bounds = _meet(every)

    def of(schema: Schema) -> Schema:
        if not isinstance(schema, Mapping):
            return schema
        new = _inclusive(schema) if bounds else dict(schema)
        if (pattern := _pattern(new)) is not None:
            del new["format"]
            if new.setdefault("pattern", pattern) != pattern:
                new["allOf"] = [*new.get("allOf", []), {"pattern": pattern}]
        return {key: within(key, value, of) for key, value in new.items()}

    changed: Mapping[str, Any] = of(root) if bounds or any(map(_pattern, every)) else root
    return changed


def _pattern(schema: Mapping[str, Any]) -> str | None:
    """In place of its format."""
    name = schema.get("format")
    return FORMATS.get(name) if isinstance(name, str) else None


def _meet(every: list[Mapping[str, Any]]) -> bool:
    """Whether there is a whole exclusive bound, and a bound that is not whole."""
    bounds = [s.get(key) for s in every for pair in EXCLUSIVE for key in pair[:2]]
    fraction = any(isinstance(b, float) and not b.is_integer() for b in bounds)
    return fraction and any(_bound(s, *pair[:2]) is not None for s in every for pair in EXCLUSIVE)


def _inclusive(schema: Mapping[str, Any]) -> dict[str, Any]:
    """With a bound a little further in, instead of each whole exclusive one."""
    new = dict(schema)
    for exclusive, inclusive, sign in EXCLUSIVE:
        bound = _bound(schema, exclusive, inclusive)
        if bound is None:
            continue
        near = bound + sign * max(NEAR, ulp(bound))
        other = near if new.pop(exclusive) is True else new.get(inclusive, near)
        new[inclusive] = max(near, other) if sign > 0 else min(near, other)
    return new


def _bound(schema: Mapping[str, Any], exclusive: str, inclusive: str) -> float | None:
    """The exclusive bound if it is a whole number, of what need not be an integer. Draft 4 says by a boolean that it is."""
    value = schema.get(exclusive)
    value = schema.get(inclusive) if value is True else value
    if isinstance(value, bool) or not isinstance(value, int | float) or schema.get("type") == "integer":
        return None
    return float(value) if float(value).is_integer() else None
