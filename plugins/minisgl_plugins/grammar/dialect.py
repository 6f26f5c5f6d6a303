"""What a JSON schema's keywords are: its draft, where schemas stand in it, and where local references lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Any  # a mapping or a boolean

TYPES = ("null", "boolean", "number", "string", "array", "object")
DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
LATEST = 2020
SINGLE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
# Keywords that no value fails.
ANNOTATIONS = frozenset({
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "examples", "id", "readOnly",
    "title", "writeOnly",
})  # fmt: skip
SINCE = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "dependentRequired": 2019,
    "dependentSchemas": 2019, "minContains": 2019, "maxContains": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "prefixItems": 2020,
}  # fmt: skip
UNTIL = {"dependencies": 7, "additionalItems": 2019}


MAX_STEPS = 20_000  # schemas looked at; references make them more than there are


class Document:
    """One schema with all in it. ``local``: it is one resource, so that "#/..." is looked for from its top everywhere."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._steps = 0
        self.draft = draft_of(root)
        self.local = not any(self._names_itself(s) for s in subschemas(root, skip_self=True))
        anchors = [s["$dynamicAnchor"] for s in subschemas(root) if "$dynamicAnchor" in s]
        self.dynamic = {name for name in anchors if isinstance(name, str) and anchors.count(name) == 1}

    def _names_itself(self, schema: Mapping[str, Any]) -> bool:
        return isinstance(schema.get("id" if self.draft <= 4 else "$id"), str)

    def step(self) -> None:
        """One more schema is looked at. Raises: ValueError for too many."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ValueError(f"more than {MAX_STEPS} schemas in one another")

    def knows(self, keyword: str) -> bool:
        """Whether the keyword is one of this draft."""
        return SINCE.get(keyword, 0) <= self.draft <= UNTIL.get(keyword, LATEST)

    def target(self, reference: Any) -> Schema | None:
        """The schema that a local reference leads to; None for any other."""
        if not self.local or not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: Any = self.root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found if isinstance(found, Mapping | bool) else None


def draft_of(schema: Mapping[str, Any]) -> int:
    """By ``$schema``; the latest where it does not say."""
    said = str(schema.get("$schema", ""))
    return next((draft for name, draft in DRAFTS.items() if name in said), LATEST)


def subschemas(schema: Schema, skip_self: bool = False) -> Iterator[Mapping[str, Any]]:
    """The schemas in ``schema`` that are objects, itself first."""
    if not isinstance(schema, Mapping):
        return
    if not skip_self:
        yield schema
    for key, value in schema.items():
        if key in SINGLE and isinstance(value, Mapping):
            yield from subschemas(value)
        elif key in LISTS and isinstance(value, list):
            for item in value:
                yield from subschemas(item)
        elif key in MAPS and isinstance(value, Mapping):
            for item in value.values():
                yield from subschemas(item)


def within(key: str, value: Any, of: Callable[[Schema], Schema]) -> Any:
    """The value of a keyword, with ``of`` each schema that stands in it."""
    if key in LISTS and isinstance(value, list):
        return [of(item) for item in value]
    if key in MAPS and isinstance(value, Mapping):
        return {name: of(item) for name, item in value.items()}
    return of(value) if key in SINGLE else value
