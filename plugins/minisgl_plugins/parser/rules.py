"""Rules for tool calls, in the Lark dialect of llguidance, where a JSON schema stands as ``%json {...}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ANYTHING = r"/(.|\n)*/"
SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "coerce_one_of": True,
}


def schema(value: Mapping[str, Any]) -> str:
    """A JSON value of this schema. Its strictness was checked before: what is left out here is known to be allowed."""
    return "%json " + json.dumps({**value, "x-guidance": SPACING})


def arguments(tool: Mapping[str, Any]) -> str:
    """The arguments of a tool as a JSON object."""
    parameters = tool.get("parameters")
    return schema(parameters if isinstance(parameters, Mapping) else {"type": "object"})


def json_call(tool: Mapping[str, Any], arguments_key: str) -> str | None:
    """A whole call as one JSON object, so that other JSON may be an alternative to it. None if its schema refers to itself."""
    parameters = tool.get("parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {"type": "object"}
    shared = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
    if '"$ref": "#"' in json.dumps(parameters) or '"$ref": "#/properties' in json.dumps(parameters):
        return None
    own = {k: v for k, v in parameters.items() if k not in shared}
    properties = {"name": {"const": tool["name"]}, arguments_key: own}
    required = ["name", arguments_key]
    return schema(
        {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **shared}
    )


def alternatives(rules: Sequence[tuple[str, str]]) -> str:
    """Rules of these names and bodies, and ``call``, which is any of them but the helpers, whose names begin with "h_"."""
    names = [name for name, _ in rules if not name.startswith("h_")]
    return f"call: {' | '.join(names)}\n" + "".join(f"{name}: {body}\n" for name, body in rules)


def with_text(lead: str, lead_is_token: bool) -> str:
    """``calls``: text, in which each ``lead`` is followed by the rest of a call, the rule ``call``."""
    lazy = "" if lead_is_token else "[lazy]"
    return f"calls: segment* tail\nsegment: lead call\nlead{lazy}: TEXT {lead}\ntail: TEXT\nTEXT: {ANYTHING}\n"


def listed(required: Sequence[str], optional: Sequence[str], separator: str) -> str:
    """Items in order, the optional ones each or not; a separator between any two."""
    rest = " ".join(f"({separator} {item})?" for item in optional)
    if required:
        return f" {separator} ".join(required) + f" {rest}"
    starts = [
        " ".join([item, *(f"({separator} {later})?" for later in optional[i + 1 :])]) for i, item in enumerate(optional)
    ]
    return f"({' | '.join(starts)})?" if starts else '""'
