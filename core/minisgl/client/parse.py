"""JSON bodies, parsed."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.base.errors import RequestError

# Levels of objects and arrays. What is read is written again, in answers, for other processes and by templates, and what writes JSON
# takes fewer levels than the parser's 1,024: orjson 254, json as many as the stack has left of 1,000.
MAX_DEPTH = 200


def parse(data: bytes) -> dict[str, Any]:
    """Raises: RequestError 400 invalid_json."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and too_deep(value):
        raise RequestError(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    return value


def too_deep(value: Any) -> bool:
    """Whether a JSON value has more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (v for outer in level for v in (outer.values() if isinstance(outer, dict) else outer))
        level = [v for v in inner if isinstance(v, (dict, list))]
        if not level:
            return False
    return True
