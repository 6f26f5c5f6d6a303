"""What an answer is held to: ``response_format``, ``structured_outputs``, and the names that other servers have for them."""

from __future__ import annotations

import orjson

from minisgl.api import Fields, GrammarSpec, RequestError, Value

MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object")
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
        value = f.value(name)
        if value is not None:
            forms[name] = _form(kind, value)
    if len(forms) > 1:
        first, second = list(forms)[:2]
        raise RequestError(f"'{first}' and '{second}' exclude one another.", code="invalid_value", param=second)
    return next(iter(forms.values()), None)


def _response_format(f: Fields) -> GrammarSpec | None:
    form = f.object("response_format")
    if form is None:
        return None
    kind = form.need("type")
    if kind.raw == "structural_tag":
        raise f.unsupported("response_format", "of type 'structural_tag' is not supported by this server")
    wanted = kind.one_of(("text", "json_object", "json_schema"))
    if wanted == "text":
        return None
    if wanted == "json_object":
        return GrammarSpec("json_object", param="response_format")
    outer = form.need("json_schema").object()
    outer.string("name", 1, 64)
    outer.string("description")
    strict = outer.boolean("strict") or False
    return _schema(outer.need("schema"), strict)


def _structured(f: Fields) -> GrammarSpec:
    f.refuse("structural_tag")
    given = [kind for kind in KINDS if f.raw(kind) not in (None, False)]
    if len(given) != 1:
        names = ", ".join(KINDS)
        raise RequestError(
            f"'structured_outputs' needs exactly one of {names}; it has {len(given)}.",
            code="invalid_value",
            param="structured_outputs",
        )
    (kind,) = given
    return _form(kind, f.need(kind))


def _form(kind: str, value: Value) -> GrammarSpec:
    if kind == "json":
        return _schema(value, False)
    if kind == "json_object":
        value.boolean()
        return GrammarSpec("json_object", param=value.path)
    if kind == "choice":
        choices = [item.string(1) for item in value.items(1, MAX_CHOICES)]
        return GrammarSpec("choice", orjson.dumps(choices).decode(), param=value.path)
    return GrammarSpec("regex" if kind == "regex" else "grammar", value.string(1), param=value.path)


def _schema(value: Value, strict: bool) -> GrammarSpec:
    """A schema as an object, or as the JSON text of one."""
    schema = value.raw
    if isinstance(schema, str):
        try:
            schema = orjson.loads(value.string())
        except orjson.JSONDecodeError as exc:
            raise value.refused(f"is not JSON: {exc}", "invalid_json_schema") from None
    elif isinstance(schema, bool):  # true: any JSON
        schema = value.boolean()
    else:
        schema = value.object().body
    if not isinstance(schema, (dict, bool)):
        raise value.wrong_type("an object")
    try:
        return GrammarSpec("json_schema", orjson.dumps(schema).decode(), strict, value.path)
    except orjson.JSONEncodeError:  # the parser reads deeper values than can be written
        raise value.refused("is nested too deeply", "invalid_json_schema") from None
