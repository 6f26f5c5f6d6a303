"""The published description of the HTTP API (OpenAPI 3.1): made of what each route says about itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.client.notes import Note, Schema, described

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
ANYTHING: Schema = {}
OBJECT: Schema = {"type": "object"}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}


def record(members: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, title: str = "") -> Schema:
    """An object with exactly these ``members``, and maybe those that are ``optional``."""
    schema = {
        "type": "object",
        "properties": {**members, **(optional or {})},
        "required": [*members],
        "additionalProperties": False,
    }
    return {"title": title, **schema} if title else schema


def array_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: Any) -> Schema:
    return {"enum": [*values]}


ERROR = record(
    {
        "error": record(
            {
                "message": STRING,
                "type": one_of("invalid_request_error", "rate_limit_error", "server_error"),
                "param": {"type": ["string", "null"], "description": "path of the field that is wrong"},
                "code": {"type": ["string", "null"]},
            }
        )
    },
    title="Error",
)


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON body: ``read`` reads it, and notes what it reads. ``examples``: as of ``described``; the first is published."""

    title: str
    read: Callable[[dict[str, Any], Note], object]
    examples: Sequence[Mapping[str, Any]]

    def schema(self) -> Schema:
        return {"title": self.title, **described(self.read, self.examples)}


@dataclass(frozen=True, slots=True)
class About:
    """What a route says about itself. ``answers``: schema of the good answer, by media type; none: it has no body.
    ``parameters``: meaning of those in the path."""

    summary: str
    answers: Mapping[str, Schema] = field(default_factory=dict)
    body: Body | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Keys:
    """Which routes need one: those in ``open`` none, those in ``admin`` the admin key, all others the API key if ``needed``."""

    needed: bool
    open: frozenset[str]
    admin: frozenset[str]

    def of(self, path: str) -> list[dict[str, list[str]]]:
        if path in self.admin:
            return [{"admin": []}]
        return [{"bearer": []}, {"header": []}] if self.needed and path not in self.open else []

    def schemes(self) -> dict[str, Any]:
        bearer = {"type": "http", "scheme": "bearer"}
        admin = {"admin": {**bearer, "description": "the admin key"}} if self.admin else {}
        if not self.needed:
            return admin
        return {"bearer": bearer, "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}, **admin}


class Description:
    """Of a server with these ``routes``; a route that says nothing about itself is listed by its path alone. ``errors``:
    schema of those of a path."""

    def __init__(self, routes: Iterable[BaseRoute], version: str, keys: Keys, errors: Callable[[str], Schema]) -> None:
        self._keys = keys
        self._errors = errors
        self._schemas: dict[str, Schema] = {}
        paths: dict[str, dict[str, Any]] = {}
        for route in routes:
            path = re.sub(r"{(\w+):\w+}", r"{\1}", str(getattr(route, "path", "")))
            for method in sorted(set(getattr(route, "methods", None) or ()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = self._operation(route, path, method)
        self.document = {
            "openapi": "3.1.0",
            "info": {"title": "minisgl", "version": version},
            "paths": paths,
            "components": {"schemas": self._schemas, "securitySchemes": keys.schemes()},
        }

    def _operation(self, route: BaseRoute, path: str, method: str) -> dict[str, Any]:
        about = getattr(getattr(route, "endpoint", None), "about", None) or About("")
        operation: dict[str, Any] = {
            "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
            "summary": about.summary,
            "responses": self._answers(about, path),
            "security": self._keys.of(path),
        }
        names = re.findall(r"{(\w+)}", path)
        if names:
            operation["parameters"] = [
                {
                    "name": n,
                    "in": "path",
                    "required": True,
                    "schema": STRING,
                    "description": about.parameters.get(n, ""),
                }
                for n in names
            ]
        if about.body is not None:
            content = {"schema": self._named(about.body.schema()), "example": about.body.examples[0]}
            operation["requestBody"] = {"required": True, "content": {JSON: content}}
        return operation

    def _answers(self, about: About, path: str) -> dict[str, Any]:
        good: dict[str, Any] = {"description": "done"}
        if about.answers:
            good["content"] = {kind: {"schema": self._named(schema)} for kind, schema in about.answers.items()}
        failed = {"content": {JSON: {"schema": self._named(self._errors(path))}}}
        return {
            "200": good,
            "4XX": {"description": "The request is refused.", **failed},
            "5XX": {"description": "The server cannot do it, now or at all.", **failed},
        }

    def _named(self, schema: Schema) -> Schema:
        """One with a title stands among the components."""
        title = schema.get("title")
        if title is None:
            return schema
        if self._schemas.setdefault(title, schema) != schema:  # another frontend's
            return schema
        return {"$ref": f"#/components/schemas/{title}"}
