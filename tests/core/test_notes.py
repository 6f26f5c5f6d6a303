"""Notes of what readers ask of a JSON body, and the schema that they make."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from minisgl.base.errors import RequestError
from minisgl.client.fields import Fields
from minisgl.client.notes import Note, described


def schema(read: Any, *examples: Any) -> dict[str, Any]:
    made = described(lambda body, note: read(Fields(body, note=note)), examples)
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def test_a_field_is_described_though_no_example_has_it():
    def read(f: Fields) -> None:
        f.boolean("b")
        f.integer("i", 1, 5)
        f.number("n", 0, 2.5)
        f.string("s", 1, 3)
        f.one_of("e", ("x", "y"))
        f.array("a", 1, 2)
        f.object("o")
        f.refuse("r", False)
        f.raw("any")

    assert schema(read, {}) == {
        "type": "object",
        "properties": {
            "b": {"type": ["boolean", "null"]},
            "i": {"type": ["integer", "null"], "minimum": 1, "maximum": 5},
            "n": {"type": ["number", "null"], "minimum": 0, "maximum": 2.5},
            "s": {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
            "e": {"type": ["string", "null"], "enum": ["x", "y", None]},
            "a": {"type": ["array", "null"], "minItems": 1, "maxItems": 2},
            "o": {"type": ["object", "null"]},
            "r": {"enum": [False, None], "description": "Not supported: other values are refused."},
            "any": {},
        },
    }


def test_forms_of_a_value_are_those_of_all_examples():
    def read(f: Fields) -> None:
        value = f.need("stop")
        if isinstance(value.raw, str):
            value.string()
        else:
            [item.string(1) for item in value.items(max_len=4)]

    of_field = schema(read, {"stop": "a"}, {"stop": ["a", "b"]})["properties"]["stop"]
    assert of_field == {
        "anyOf": [{"type": "string"}, {"type": "array", "maxItems": 4, "items": {"type": "string", "minLength": 1}}]
    }


def test_a_member_is_required_if_every_object_needed_it():
    """Objects may be read side by side."""

    def read(f: Fields) -> None:
        items = [item.object() for item in f.need("items").items()]
        for item in items:
            if item.need("kind").one_of(("text", "none")) == "text":
                item.need("text").string()

    made = schema(read, {"items": [{"kind": "text", "text": "x"}, {"kind": "none"}]})["properties"]["items"]["items"]
    assert made["required"] == ["kind"]
    assert made["properties"] == {
        "kind": {"type": "string", "enum": ["text", "none"]},
        "text": {"type": ["string", "null"]},
    }


def test_members_of_any_name():
    def read(f: Fields) -> None:
        [value.number(-1, 1) for _, value in f.need("bias").object().members()]

    of_field = schema(read, {"bias": {"5": 0.5}})["properties"]["bias"]
    assert of_field == {
        "type": "object",
        "additionalProperties": {"type": ["number", "null"], "minimum": -1, "maximum": 1},
    }


def test_limits_that_depend_on_other_fields_are_the_widest():
    def read(f: Fields) -> None:
        f.integer("n", 0 if f.boolean("more") else 1, 9 if f.boolean("more") else 5)

    for examples in ([{}, {"more": True}], [{"more": True}, {}]):
        of_field = schema(read, *examples)["properties"]["n"]
        assert (of_field["minimum"], of_field["maximum"]) == (0, 9)
    unbounded = schema(lambda f: f.integer("n", *((0,) if f.boolean("more") else ())), {}, {"more": True})
    assert unbounded["properties"]["n"] == {"type": ["integer", "null"]}


def test_a_member_that_is_read_elsewhere_is_described_there():
    other = Note()
    Fields({}, note=other).integer("m", 3)
    note = Note()
    Fields({"n": 1}, note=note).require("n")
    note.adopt("n", other.member("m"))
    assert note.schema()["properties"]["n"] == {"type": "integer", "minimum": 3}


def test_an_example_that_the_reader_refuses_is_an_error():
    with pytest.raises(RequestError):
        schema(lambda f: f.integer("n"), {"n": "x"})
