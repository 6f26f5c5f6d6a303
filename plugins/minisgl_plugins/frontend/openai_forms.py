"""What an answer is held to: ``response_format``, ``structured_outputs``, and the names that other servers have for them."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.api import Fields, GrammarSpec, RequestError, as_array, as_object, as_string, invalid_type

MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Field of another server -> the kind of structured_outputs that it is.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


def read_form(f: Fields) -> GrammarSpec | None:
    """None if the answer is free. Raises: RequestError; also for more than one form."""
    forms: dict[str, GrammarSpec] = {}
    form = _response_format(f)
    if form is not None:
        forms["response_format"] = form
    structured = f.object("structured_outputs")
    if structured is not None:
        forms["structured_outputs"] = _structured(structured)
    for name, kind in ALIASES.items():
        value = f.raw(name)
        if value is not None:
            forms[name] = _form(kind, value, name)
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise RequestError(f"'{first}' and '{second}' exclude one another.", code="invalid_value", param=second)
    return next(iter(forms.values()), None)


def _response_format(f: Fields) -> GrammarSpec | None:
    form = f.object("response_format")
    if form is None:
        return None
    path = form.at("type")
    kind = as_string(form.require("type"), path)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object", param="response_format")
    if kind == "structural_tag":
        raise f.unsupported("response_format", "of type 'structural_tag' is not supported by this server")
    if kind != "json_schema":
        raise RequestError(
            f"'{path}' must be 'text', 'json_object' or 'json_schema'.", code="invalid_value", param=path
        )
    outer = Fields(as_object(form.require("json_schema"), form.at("json_schema")), form.at("json_schema"))
    outer.string("name", 1, 64)
    outer.string("description")
    strict = outer.boolean("strict") or False
    return _schema(outer.require("schema"), outer.at("schema"), strict)


def _structured(f: Fields) -> GrammarSpec:
    given = [kind for kind in KINDS if f.raw(kind) not in (None, False)]
    if len(given) != 1:
        names = ", ".join(KINDS)
        raise RequestError(
            f"'structured_outputs' needs exactly one of {names}; it has {len(given)}.",
            code="invalid_value",
            param="structured_outputs",
        )
    (kind,) = given
    return _form(kind, f.raw(kind), f.at(kind))


def _form(kind: str, value: Any, path: str) -> GrammarSpec:
    if kind == "json":
        return _schema(value, path, False)
    if kind == "json_object":
        if value is not True:
            raise invalid_type(path, value, "true or false")
        return GrammarSpec("json_object", param=path)
    if kind == "choice":
        items = as_array(value, path, min_len=1, max_len=MAX_CHOICES)
        choices = [as_string(item, f"{path}[{i}]", 1) for i, item in enumerate(items)]
        return GrammarSpec("choice", orjson.dumps(choices).decode(), param=path)
    if kind == "structural_tag":
        raise RequestError(
            f"'{path}' is not supported by this server; leave it out.", code="unsupported_parameter", param=path
        )
    return GrammarSpec("regex" if kind == "regex" else "grammar", as_string(value, path, 1), param=path)


def _schema(value: Any, path: str, strict: bool) -> GrammarSpec:
    """A schema as an object, or as the JSON text of one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            raise RequestError(f"'{path}' is not JSON: {exc}.", code="invalid_json_schema", param=path) from None
    if value is not True and not isinstance(value, dict):
        raise invalid_type(path, value, "an object")
    return GrammarSpec("json_schema", orjson.dumps(value).decode(), strict, path)
