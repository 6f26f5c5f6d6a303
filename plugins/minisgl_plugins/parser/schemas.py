"""What the JSON schema of a tool's parameters says, as far as parsers ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def parameter_schemas(tool: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Schema of each parameter, by name; each with the definitions that it may refer to."""
    parameters = tool.get("parameters")
    if not isinstance(parameters, Mapping) or not isinstance(properties := parameters.get("properties"), Mapping):
        return {}
    shared = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
    return {k: {**v, **shared} if isinstance(v, Mapping) else dict(shared) for k, v in properties.items()}


def required_names(tool: Mapping[str, Any]) -> set[str]:
    parameters = tool.get("parameters")
    names = parameters.get("required") if isinstance(parameters, Mapping) else None
    return {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()


def schema_types(schema: Any) -> set[str]:
    """Names of the types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    if isinstance(options := schema.get("anyOf", schema.get("oneOf")), list):
        every = [schema_types(option) for option in options]
        return set().union(*every) if all(every) else set()
    values = schema.get("enum")
    return set().union(*map(types_of, values)) if isinstance(values, list) else set()


def types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, list):
        return {"array"}
    return {type(None): {"null"}, str: {"string"}, dict: {"object"}}[type(value)]
