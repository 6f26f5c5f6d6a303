"""Keywords that llguidance has not, said with others: whatever the grammar lets through fits the schema as jsonschema reads it."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validators
from tokenizers import Tokenizer

from minisgl.api import Grammar, GrammarContext, GrammarSpec, Outline, RequestError
from minisgl.config.schema import Settings
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.registry import Registry
from minisgl.text.resolve import resolve_model

REGISTRY = Registry.scan(bundled_only=True)
EOS = 2  # <|im_end|> of SmolLM2
SCHEMA_OF = {
    4: "http://json-schema.org/draft-04/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
SCALARS: list[Any] = [None, True, False, 0, 1, 2, 3, 1.5, "", "a", "b", "ab", "abc"]
ARRAYS: list[Any] = [
    [],
    [1],
    ["a"],
    [1, 1],
    [1, "a"],
    ["a", 1],
    [1, 2, 3],
    [[1], {}],
    ["a", "b", 1],
    [True, True, True],
]
OBJECTS: list[Any] = [
    dict(pairs)
    for n in range(3)
    for pairs in itertools.permutations([("a", 1), ("a", "a"), ("b", 1), ("b", True), ("c", None)], n)
    if len({k for k, _ in pairs}) == n
]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS, {"a": {"b": 1}}, {"b": [1]}, {"ab": 1}, {"": 1}]


class Enforcer:
    """The plugin on the tokenizer of the default model."""

    def __init__(self) -> None:
        folder = resolve_model(Settings(), REGISTRY, Hooks(REGISTRY, []), None).tokenizer_dir
        assert folder is not None
        path: Path = folder
        self.grammar: Grammar = REGISTRY.create(
            "grammar", "llguidance", {}, lambda s: GrammarContext(s, path, 49152, (EOS,))
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ids = [self.tokenizer.encode(json.dumps(v), add_special_tokens=False).ids for v in VALUES]

    def allows(self, schema: Any, value: Any) -> bool:
        """Raises: RequestError."""
        matcher = self.grammar.matcher(
            self.grammar.compile(Outline(GrammarSpec("json_schema", json.dumps(schema), True)))
        )
        ids = self.tokenizer.encode(json.dumps(value), add_special_tokens=False).ids
        return all(matcher.accept(token) for token in [*ids, EOS])

    def lets_through(self, schema: Any, strict: bool = True) -> list[Any]:
        """Of VALUES. Raises: RequestError."""
        compiled = self.grammar.compile(Outline(GrammarSpec("json_schema", json.dumps(schema), strict)))
        start = self.grammar.matcher(compiled)
        found = []
        for value, ids in zip(VALUES, self.ids, strict=True):
            n = next((i for i, token in enumerate([*ids, EOS]) if not start.accept(token)), len(ids) + 1)
            start = self.grammar.matcher(compiled)
            if n > len(ids):
                found.append(value)
        return found


@pytest.fixture(scope="module")
def enforcer() -> Enforcer:
    return Enforcer()


def fits(schema: Any, value: Any) -> bool:
    cls: Any = validators.validator_for(schema)
    return bool(cls(schema).is_valid(value))


def compared(enforcer: Enforcer, schema: dict[str, Any], draft: int = 2020) -> tuple[set[str], set[str]]:
    """(what the grammar lets through, what fits), of VALUES, as texts: 1 and True are equal, and so are objects in any order."""
    schema = {"$schema": SCHEMA_OF[draft], **schema}
    return set(map(json.dumps, enforcer.lets_through(schema))), {json.dumps(v) for v in VALUES if fits(schema, v)}


def in_order(text: str) -> bool:
    """Whether its properties come as a schema has them: the grammar allows no other order."""
    value = json.loads(text)
    return not isinstance(value, dict) or list(value) == sorted(value)


OBJECT = {"type": "object"}
AB = {"properties": {"a": {"type": "integer"}, "b": {}}}
EXACT: list[tuple[dict[str, Any], int]] = [
    ({"not": {"type": "object"}}, 7),
    ({"not": {"enum": ["a", True, 1]}, "type": ["string", "boolean", "integer"]}, 2020),
    ({"not": {"required": ["a"]}, **OBJECT, **AB}, 2020),
    ({"not": {"minimum": 2}, "type": "integer"}, 7),
    ({"not": {"maximum": 2, "exclusiveMaximum": True}, "type": "integer"}, 4),
    ({"not": {"minLength": 2}, "type": "string"}, 7),
    ({"not": {"not": {"type": "string"}}}, 2020),
    ({"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "array"}}}, 2020),
    ({"type": "integer", "if": {"minimum": 2}, "then": {"maximum": 2}, "else": {"const": 1}}, 7),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}}, 2019),
    ({"type": "integer", "oneOf": [{"minimum": 1}, {"maximum": 2}]}, 2020),
    ({**OBJECT, **AB, "dependentRequired": {"b": ["a"]}}, 2020),
    ({**OBJECT, **AB, "dependencies": {"b": ["a"], "a": {"maxProperties": 1}}}, 7),
    ({**OBJECT, **AB, "dependentSchemas": {"b": {"required": ["a"]}}}, 2019),
    ({**OBJECT, "propertyNames": {"enum": ["a", "c"]}}, 7),
    ({**OBJECT, "propertyNames": {"maxLength": 1, "type": "string"}}, 2020),
    ({**OBJECT, "propertyNames": False}, 7),
    ({**OBJECT, **AB, "unevaluatedProperties": False}, 2019),
    ({**OBJECT, "allOf": [AB], "unevaluatedProperties": {"type": "null"}}, 2020),
    ({**OBJECT, "$ref": "#/$defs/x", "$defs": {"x": AB}, "unevaluatedProperties": False}, 2020),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": {"type": "string"}}, 2020),
    ({"type": "array", "allOf": [{"items": [True, True]}], "unevaluatedItems": False}, 2019),
    ({"type": "array", "contains": {"type": "string"}, "minContains": 0, "maxContains": 0}, 2020),
    ({"type": "array", "minItems": 2.0, "maxItems": 2.0}, 2020),
    ({"type": "array", "uniqueItems": False}, 2020),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, 2020),
    ({"type": "string", "then": {"const": "b"}}, 7),
    ({"$dynamicAnchor": "n", "type": ["array", "integer"], "items": {"$dynamicRef": "#n"}}, 2020),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "draft"), EXACT, ids=[json.dumps(s)[:70] for s, _ in EXACT])
def test_these_keywords_are_enforced_exactly(enforcer: Enforcer, schema: dict[str, Any], draft: int) -> None:
    through, fitting = compared(enforcer, schema, draft)
    assert through - fitting == set()
    assert {text for text in fitting - through if in_order(text)} == set()


# Whole exclusive bounds beside one in the same unit interval, which llguidance alone lets through.
BOUNDS: list[tuple[dict[str, Any], int]] = [
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, 7),
    ({"exclusiveMaximum": 2, "minimum": 1.5}, 2020),
    ({"type": "number", "allOf": [{"exclusiveMinimum": 0, "minimum": 0}, {"exclusiveMaximum": 2.5}]}, 2020),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.75}, 4),
    ({"anyOf": [{"type": "integer", "exclusiveMinimum": 1}, {"type": "number", "maximum": 0.5}]}, 2019),
]


@pytest.mark.parametrize(("schema", "draft"), BOUNDS, ids=[json.dumps(s)[:70] for s, _ in BOUNDS])
def test_exclusive_bounds_are_not_let_through(enforcer: Enforcer, schema: dict[str, Any], draft: int) -> None:
    through, fitting = compared(enforcer, schema, draft)
    assert {t for t in through if t[0] not in "[{"} == {t for t in fitting if t[0] not in "[{"}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("2024-02-29", True), ("2000-02-29", True), ("1999-12-31", True), ("2023-02-28", True), ("0001-01-01", True),
        ("2023-02-29", False), ("1900-02-29", False), ("2100-02-29", False), ("0000-01-01", False), ("2023-04-31", False),
    ],
)  # fmt: skip
def test_dates_are_of_the_calendar(enforcer: Enforcer, text: str, good: bool) -> None:
    for schema, value in (({"format": "date"}, text), ({"format": "date-time"}, f"{text}T12:00:00Z")):
        assert enforcer.allows({"type": "string", **schema}, value) is good
        assert enforcer.allows({"type": "string", "pattern": "^[12]", **schema}, value) is (good and value[0] in "12")


def test_arguments_of_tools_are_held_as_tightly(enforcer: Enforcer) -> None:
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    calls = f'calls: "%json {{" value\nvalue: %json {json.dumps(schema)}\n'
    compiled = enforcer.grammar.compile(Outline(calls=calls))
    for text, good in (("%json {0.5", True), ("%json {0", False)):
        matcher = enforcer.grammar.matcher(compiled)
        ids = enforcer.tokenizer.encode(text, add_special_tokens=False).ids
        assert all(matcher.accept(token) for token in [*ids, EOS]) is good


NARROWER: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "contains": {"type": "string"}}, ["a", 1]),
    ({"type": "array", "contains": {"type": "integer"}, "minContains": 2, "maxContains": 2}, [1, 1]),
    ({"not": {"type": "integer"}}, "a"),
    ({**OBJECT, "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False}, {"a": 1}),
    ({**OBJECT, "if": {"required": ["a"], **AB}, "then": {}, "unevaluatedProperties": False}, {"a": 1, "b": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "example"), NARROWER, ids=[json.dumps(s)[:70] for s, _ in NARROWER])
def test_these_are_narrower_but_never_wider(enforcer: Enforcer, schema: dict[str, Any], example: Any) -> None:
    through, fitting = compared(enforcer, schema)
    assert json.dumps(example) in through
    assert through - fitting == set()


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"not": {"pattern": "a"}}, "not"),
        ({"not": {}}, "not"),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 2}}, "if"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
        ({"propertyNames": {"format": "date"}}, "propertyNames"),
        ({"$ref": "http://localhost:1/x", "not": {"type": "null"}}, "not"),
        (
            {
                "not": {"$ref": "#/$defs/t"},
                "$defs": {"t": {"properties": {key: {"$ref": "#/$defs/t"} for key in "abcdef"}}},
            },
            "not",
        ),
        ({"not": 5}, "not"),
        ({"not": {"required": 5}}, "not"),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "integer"}, "draft 3"),
    ],
)
def test_a12_what_cannot_be_said_is_refused(enforcer: Enforcer, schema: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as e:
        enforcer.lets_through(schema)
    assert (e.value.status, e.value.code) == (400, "invalid_json_schema")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {"format": ["date"]},
        {"properties": {"a": {"format": {}}}},
        {"format": "date", "pattern": "a", "allOf": None},
        {"exclusiveMinimum": 0, "minimum": "a", "maximum": 0.5},
        {"exclusiveMinimum": 10**400, "maximum": 0.5},
        {"not": {"maxLength": float("inf")}},
    ],
)
@pytest.mark.parametrize("param", ["response_format", "tools[0].function.parameters"])
def test_what_is_no_schema_is_refused(enforcer: Enforcer, schema: Any, strict: bool, param: str) -> None:
    with pytest.raises(RequestError) as e:
        enforcer.grammar.check(GrammarSpec("json_schema", json.dumps(schema), strict, param))
    assert (e.value.status, e.value.param) == (400, param)


def test_what_is_not_strict_is_enforced_as_far_as_it_can_be(enforcer: Enforcer) -> None:
    schema = {"type": "array", "items": {"type": "integer", "not": {"const": 2}}, "uniqueItems": True}
    assert enforcer.lets_through(schema, strict=False) == [[], [1], [1, 1]]


# ------------------------------------------------------------------------------------------------------- any combination

LEAVES: list[Any] = [
    True, False, {}, {"$ref": "#/$defs/d"}, {"enum": [1, "a", None]}, {"enum": ["a", "ab"]}, {"enum": [True, 2]},
    *({"type": t} for t in ("integer", "number", "string", "boolean", "object", "array", "null", ["integer", "object"])),
    *({"const": value} for value in SCALARS),
    *({key: n} for key in ("minimum", "exclusiveMaximum", "minLength", "maxItems", "minProperties") for n in range(3)),
    {"required": ["a"]}, {"required": ["a", "b"]}, {"required": ["c"]},
]  # fmt: skip
ONE = (
    "not",
    "if",
    "then",
    "else",
    "items",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
)
SOME = ("oneOf", "anyOf", "allOf", "prefixItems")
OTHER: dict[str, list[Any]] = {
    "type": ["object", "array", "integer"],
    "minContains": [0, 1, 2],
    "maxContains": [0, 1, 2],
    "dependentRequired": [{"a": ["b"]}, {"b": ["a", "c"]}],
    "propertyNames": [{"enum": ["a", "b"]}, {"maxLength": 1}, False],
}


def drawn(rnd: random.Random, depth: int) -> Any:
    """A schema of up to so many levels."""
    if depth == 0 or rnd.random() < 0.25:
        return rnd.choice(LEAVES)
    schema: dict[str, Any] = {}
    for key in rnd.sample([*ONE, *SOME, *OTHER, "properties", "dependentSchemas"], rnd.randint(1, 4)):
        if key in OTHER:
            schema[key] = rnd.choice(OTHER[key])
        elif key in SOME:
            schema[key] = [drawn(rnd, depth - 1) for _ in range(rnd.randint(1, 2))]
        elif key in ONE:
            schema[key] = drawn(rnd, depth - 1)
        else:
            schema[key] = {name: drawn(rnd, depth - 1) for name in rnd.sample("abc", rnd.randint(1, 2))}
    return schema


def test_no_combination_lets_through_what_does_not_fit(enforcer: Enforcer) -> None:
    accepted = 0
    for seed in range(150):
        rnd = random.Random(seed)
        shared = rnd.choice([leaf for leaf in LEAVES if leaf != {"$ref": "#/$defs/d"}])
        body = drawn(rnd, 3)
        schema = {"$schema": SCHEMA_OF[2020], "$defs": {"d": shared}, **(body if isinstance(body, dict) else {})}
        try:
            through = enforcer.lets_through(schema)
        except RequestError:
            continue
        accepted += 1
        assert [v for v in through if not fits(schema, v)] == [], json.dumps(schema)
    assert accepted > 75
