"""The published description: it has every route, says of a body what its reader reads, and is kept by the server."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

import minisgl_plugins.frontend
from minisgl.base.errors import RequestError
from minisgl.client.notes import Note
from minisgl.client.openapi import About, Body
from minisgl_plugins.frontend import openai_about
from minisgl_plugins.frontend.openai_fields import OpenAISettings

READS = {"raw", "value", "need", "require", "boolean", "integer", "number", "string", "one_of", "array", "items"}
READS |= {"object", "refuse"}
# What a value is refused with for its type or its limits, whatever the other fields are.
TYPE_CODES = {"invalid_type", "empty_array", "array_above_max_length"}
TYPE_CODES |= {f"{kind}_{limit}_value" for kind in ("integer", "decimal") for limit in ("below_min", "above_max")}
TYPE_CODES |= {"string_below_min_length", "string_above_max_length"}


@pytest.fixture(scope="module")
def document(shared: Any) -> dict[str, Any]:
    r = httpx.get(f"{shared.url}/openapi.json")
    assert r.headers["content-type"] == "application/json"
    return dict(r.json())


def abouts(served: Any) -> dict[str, About]:
    """By path."""
    routes = [r for r in served.host._all if isinstance(r, Route)]
    return {r.path: r.endpoint.about for r in routes}


@pytest.fixture(scope="module")
def bodies(shared: Any) -> dict[str, Body]:
    return {path: about.body for path, about in abouts(shared).items() if about and about.body}


def test_every_route_is_described_and_says_what_it_is_for(shared, document):
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    routes = {
        (r.path.replace(":path}", "}"), method.lower())
        for r in shared.host._all
        for method in r.methods
        if method != "HEAD"
    }
    assert described == routes
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], path
            assert ("requestBody" in operation) == (method == "post"), path
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


def test_the_schemas_are_json_schemas_that_their_examples_have(document, bodies):
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for body in bodies.values():
        for example in body.examples:
            jsonschema.validate(json.loads(json.dumps(example)), document["components"]["schemas"][body.title])


def test_every_error_is_described_as_it_is_written(document):
    error = document["components"]["schemas"]["Error"]
    assert set(error["properties"]["error"]["properties"]) == {"message", "type", "param", "code"}
    of_messages = document["paths"]["/v1/messages"]["post"]["responses"]["4XX"]["content"]["application/json"]
    assert of_messages["schema"]["$ref"].endswith("/AnthropicError")


def _read_names() -> Iterator[tuple[str, str]]:
    """(file, name) of each field that a frontend asks for by a literal name."""
    for file in sorted(Path(minisgl_plugins.frontend.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield file.name, first.value


def _names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        for inner in schema.values():
            yield from _names(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _names(inner)


def test_every_field_that_is_read_is_described(bodies):
    """A field in a branch that no example takes is missed by its description: add an example that takes it."""
    described = {name for body in bodies.values() for name in _names(body.schema())}
    assert not [f"{file}: {name}" for file, name in _read_names() if name not in described]


def _error(body: Body, name: str, value: Any, example: Any = None) -> RequestError | None:
    """What reading an example, by default the first, with this field says of the field."""
    try:
        body.read({**(example or body.examples[0]), name: value}, Note())
    except RequestError as e:
        of_field = e.param is not None and (e.param == name or e.param.startswith((f"{name}.", f"{name}[")))
        return e if of_field else None
    return None


def _values(schema: dict[str, Any]) -> Iterator[Any]:
    """Around every limit, and of every type."""
    yield from (None, True, "", "x", "x" * 2000, 0, 1, -1, 0.5, 2**31, [], [0], ["x"], [[]], {}, {"x": 1})
    for form in schema.get("anyOf", [schema]):
        yield from form.get("enum", ())
        for limit in ("minimum", "maximum"):
            if limit in form:
                yield from (form[limit] - 1, form[limit], form[limit] + 1)
        for limit in ("minLength", "maxLength"):
            if limit in form:
                yield from ("x" * n for n in range(max(0, form[limit] - 1), form[limit] + 2))


def test_a_value_that_the_description_allows_has_the_right_type_and_limits(bodies):
    """It may be refused all the same, for another field or for what it means."""
    for path, body in bodies.items():
        for name, schema in body.schema()["properties"].items():
            for value in _values(schema):
                if jsonschema.Draft202012Validator(schema).is_valid(value):
                    error = _error(body, name, value)
                    of_type = error is not None and error.code in TYPE_CODES
                    depends = value == 0 and name in ("truncate_prompt_tokens", "max_tokens", "max_completion_tokens")
                    assert not of_type or depends, (path, name, value, error)


def test_a_value_that_the_description_does_not_allow_is_refused_by_its_name(bodies):
    """Some fields are read of some forms of a request only."""
    for path, body in bodies.items():
        for name, schema in body.schema()["properties"].items():
            for value in _values(schema):
                if not jsonschema.Draft202012Validator(schema).is_valid(value):
                    errors = (_error(body, name, value, example) for example in body.examples)
                    assert any(errors), (path, name, value)


def test_a_strict_server_says_that_there_are_no_other_fields():
    for strict in (False, True):
        body = openai_about.chat(OpenAISettings(strict=strict)).body
        assert body is not None
        assert (body.schema().get("additionalProperties") is False) == strict


def test_keys_are_described_where_they_are_needed(start, document):
    assert not any(operation["security"] for item in document["paths"].values() for operation in item.values())
    served = start(server={"api_key": "k", "admin_key": "root"})
    assert httpx.get(f"{served.url}/openapi.json").status_code == 401
    keyed = httpx.get(f"{served.url}/openapi.json", headers={"authorization": "Bearer k"}).json()
    needs = {path: next(iter(item.values()))["security"] for path, item in keyed["paths"].items()}
    assert needs["/v1/chat/completions"] == [{"bearer": []}, {"header": []}]
    assert needs["/stats"] == [{"admin": []}]
    assert needs["/health"] == []
    assert set(keyed["components"]["securitySchemes"]) == {"bearer", "header", "admin"}
