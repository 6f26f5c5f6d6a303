"""Grammars by llguidance on a real tokenizer, token by token by hand. Fault ids in the names."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.api import Grammar, GrammarContext, GrammarSpec, Outline, RequestError
from minisgl.config.schema import Settings
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.registry import Registry
from minisgl.text.create import make_tokenizer
from minisgl.text.parser import ParserContext
from minisgl.text.resolve import resolve_model

REGISTRY = Registry.scan(bundled_only=True)
EOS = 2  # <|im_end|> of SmolLM2
VOCAB = 49152
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer_dir() -> Path:
    settings = Settings()
    model = resolve_model(settings, REGISTRY, Hooks(REGISTRY, []), None)
    assert model.tokenizer_dir is not None
    return model.tokenizer_dir


def make(tokenizer_dir: Path, vocab: int = VOCAB, **options: Any) -> Grammar:
    made: Grammar = REGISTRY.create(
        "grammar", "llguidance", options, lambda s: GrammarContext(s, tokenizer_dir, vocab, (EOS,))
    )
    return made


@pytest.fixture(scope="module")
def grammar(tokenizer_dir: Path) -> Grammar:
    return make(tokenizer_dir)


@pytest.fixture(scope="module")
def encode(tokenizer_dir: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def spec(kind: Any, value: Any = "", strict: bool = False) -> GrammarSpec:
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value), strict)


def allowed(matcher: Any, vocab: int = VOCAB) -> set[int]:
    mask = np.zeros(-(-vocab // 32), np.uint32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follows(grammar: Grammar, outline: Outline, ids: Sequence[int]) -> tuple[int, bool]:
    """(how many of the tokens the mask lets through, whether the output may end after them)"""
    matcher = grammar.matcher(grammar.compile(outline))
    for n, token in enumerate(ids):
        if token not in allowed(matcher):
            return n, False
        assert matcher.accept(token)
    return len(ids), EOS in allowed(matcher)


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("json_schema", PERSON, '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": "5"}'),
        ("json_schema", {}, '[1, {"a": null}]', "hello"),
        ("json_object", "", '{"x": [true]}', "[1]"),
        ("regex", "[0-9]{3}/[a-z]+", "123/ab", "12"),
        ("choice", ["yes", 'n"o'], 'n"o', "maybe"),
        ("grammar", 'start: "a" B+\nB: /[bc]/', "abcb", "ba"),
        ("grammar", 'root ::= "a" item+\nitem ::= [bc]', "abcb", "ba"),
        ("json_schema", {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}, '["a", 1]', "[1, 1]"),
        ("json_schema", {"type": "string", "format": "email"}, '"a@b.org"', '"nobody"'),
        ("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "42", '"x"'),
    ],
)
def test_only_what_the_form_says_can_be_written(grammar, encode, kind, value, good, bad) -> None:
    outline = Outline(spec(kind, value, strict=True))
    ids = encode(good)
    assert follows(grammar, outline, ids) == (len(ids), True)
    ids = encode(bad)
    n, may_end = follows(grammar, outline, ids)
    assert n < len(ids) or not may_end


def test_after_the_end_only_eos_may_follow(grammar, encode) -> None:
    matcher = grammar.matcher(grammar.compile(Outline(spec("choice", ["yes"]))))
    for token in encode("yes"):
        assert not matcher.done
        assert EOS not in allowed(matcher)
        assert matcher.accept(token)
    assert matcher.done
    assert allowed(matcher) == {EOS}


def test_w4_rows_beyond_the_tokenizer_are_never_allowed(tokenizer_dir) -> None:
    padded = VOCAB + 128
    matcher = (g := make(tokenizer_dir, padded)).matcher(g.compile(Outline(spec("regex", "(.|\n)*"))))
    found = allowed(matcher, padded)
    assert len(found) > 40_000
    assert max(found) < VOCAB


def test_rollback_and_copies(grammar, encode) -> None:
    compiled = grammar.compile(Outline(spec("json_schema", PERSON)))
    one, two = grammar.matcher(compiled), grammar.matcher(compiled)
    start = allowed(one)
    ids = encode('{"name')
    for token in ids:
        assert one.accept(token)
    assert allowed(two) == start  # each output has a state of its own
    assert allowed(one) != start
    one.rollback(len(ids))
    assert allowed(one) == start
    assert not one.accept(EOS)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"type": "object", "properties": {"value": "bar"}}, "schema must be"),
        ({"type": "foo"}, "foo"),
        ({"$ref": "http://example.org/schema"}, "retriev"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        (False, "object"),
        ("{", "not valid"),
    ],
)
def test_a12_a_schema_that_cannot_be_enforced_is_refused(grammar, value, word) -> None:
    with pytest.raises(RequestError, match=word) as e:
        grammar.check(spec("json_schema", value, strict=True))
    assert (e.value.status, e.value.code, e.value.param) == (400, "invalid_json_schema", "response_format")
    with pytest.raises(RequestError, match=word):  # also from the cache
        grammar.check(spec("json_schema", value, strict=True))


def test_a_refusal_that_is_known_is_told_anew_and_keeps_nothing_of_those_who_asked(grammar) -> None:
    refused = spec("json_schema", {"type": "foo"}, True)
    errors = []
    for _ in range(4):
        with pytest.raises(RequestError) as e:
            grammar.check(refused)
        errors.append(e.value)
    assert len({id(e) for e in errors}) == 4
    assert len({(str(e), e.status, e.code, e.param) for e in errors}) == 1
    assert len(list(traceback.walk_tb(errors[0].__traceback__))) == len(
        list(traceback.walk_tb(errors[-1].__traceback__))
    )


def test_rules_that_are_more_than_the_limits_allow_are_tried_once(tokenizer_dir, monkeypatch) -> None:
    import llguidance

    tried: list[str] = []
    matcher = llguidance.LLMatcher

    def counted(tokenizer: Any, rules: str, **options: Any) -> Any:
        tried.append(rules)
        return matcher(tokenizer, rules, **options)

    small = make(tokenizer_dir, max_grammar_size=200)
    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    compiled = small.compile(Outline(None, "calls: " + " ".join(f'"{i}" /a{i}b*/' for i in range(200))))
    for _ in range(3):
        with pytest.raises(RequestError, match="cannot be held to its grammar") as e:
            small.matcher(compiled)
        assert (e.value.status, e.value.code) == (400, "invalid_grammar")
    assert tried == [compiled.decode()]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("regex", "(?=a)b"), ("regex", "("), ("grammar", "start: nowhere"), ("grammar", "%%%"), ("choice", "x")],
)
def test_a12_bad_expressions_are_refused(grammar, kind, value) -> None:
    with pytest.raises(RequestError) as e:
        grammar.check(spec(kind, value))
    assert e.value.code == "invalid_grammar"
    assert len(e.value.message) < 500


def test_what_is_not_strict_leaves_out_what_cannot_be_enforced(grammar, encode) -> None:
    ids = encode("[1, 1]")
    value = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert follows(grammar, Outline(spec("json_schema", value)), ids) == (len(ids), True)


def test_there_is_a_limit_to_its_length(tokenizer_dir) -> None:
    with pytest.raises(RequestError, match="at most 100"):
        make(tokenizer_dir, max_chars=100).check(spec("json_schema", {"title": "x" * 200}))


# --------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("think", "text", "good"),
    [
        (('"<think>"', '"</think>"'), "yes", True),
        (('"<think>"', '"</think>"'), "<think>\nmaybe no\n</think>\n\nyes", True),
        (('"<think>"', '"</think>"'), "no", False),
        (("", '"</think>"'), "maybe\n</think>\n\nyes", True),
        (("", '"</think>"'), "yes", False),
        (None, "<think>x</think>yes", False),
    ],
)
def test_reasoning_is_free_and_the_answer_is_not(grammar, encode, think, text, good) -> None:
    ids = encode(text)
    n, may_end = follows(grammar, Outline(spec("choice", ["yes"]), think=think), ids)
    assert (n == len(ids) and may_end) is good


def test_special_tokens_can_frame_reasoning(grammar, encode) -> None:
    start, end = encode("<|im_start|>")[0], encode("<repo_name>")[0]
    outline = Outline(spec("choice", ["yes"]), think=(f"<[{start}]>", f"<[{end}]>"))
    assert follows(grammar, outline, [start, *encode("well"), end, *encode("\n\nyes")])[1]
    assert follows(grammar, outline, encode("yes"))[1]


# --------------------------------------------------------------------------------------------------------- tool calls

TOOLS = [
    {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "s": {"type": "string"}, "e": {"enum": ["x", "y"]}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer"}},
        },
    },
    {"name": "g"},
]
F = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "t"}}\n</tool_call>',
    "llama3-json": '{"name": "f", "parameters": {"a": 1, "s": "t"}}',
    "pythonic": '[f(a=1, s="t")]',
    "qwen3-xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nt\n</parameter>\n</function>\n</tool_call>",
}
WRONG = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>',
    "llama3-json": '{"name": "f", "parameters": {"a": "1"}}',
    "pythonic": '[f(a="1")]',
    "qwen3-xml": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
}
BOTH = {
    "hermes": F["hermes"] + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3-json": F["llama3-json"] + '; {"name": "g", "parameters": {}}',
    "pythonic": '[f(a=1, s="t"), g()]',
    "qwen3-xml": F["qwen3-xml"] + "\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
}


def rules(name: str, many: bool = True, free: bool = False, tools: Any = TOOLS) -> str:
    parser: Any = REGISTRY.create("parser", name, {}, lambda s: ParserContext(s, tools))
    found: str = parser.call_rules(tools, many, free, json.dumps)
    return found


@pytest.mark.parametrize("name", list(F))
def test_required_calls_are_calls_with_good_arguments(grammar, encode, name) -> None:
    for text in (F[name], BOTH[name]):
        ids = encode(text)
        assert follows(grammar, Outline(calls=rules(name)), ids) == (len(ids), True)
    for text in (WRONG[name], "Hello", F[name] + "\nDone."):
        ids = encode(text)
        assert follows(grammar, Outline(calls=rules(name)), ids) != (len(ids), True)
    ids = encode(BOTH[name])
    assert follows(grammar, Outline(calls=rules(name, many=False)), ids) != (len(ids), True)


@pytest.mark.parametrize("name", list(F))
def test_what_the_rules_allow_the_parser_reads(grammar, encode, name) -> None:
    parser: Any = REGISTRY.create("parser", name, {}, lambda s: ParserContext(s, TOOLS))
    parts = parser.push(BOTH[name], ()) + parser.finish("stop")
    assert [p.text for p in parts if p.kind == "call"] == ["f", "g"]
    assert not [p for p in parts if p.kind == "content"]


@pytest.mark.parametrize("name", list(F))
def test_strict_calls_bind_only_what_begins_as_a_call(grammar, encode, name) -> None:
    outline = Outline(calls=rules(name, free=True))
    for text, good in (("Hello, 2 < 3.", True), (F[name], True), (WRONG[name], False)):
        ids = encode(text)
        assert (follows(grammar, outline, ids) == (len(ids), True)) is good, text


@pytest.mark.parametrize("name", list(F))
def test_an_answer_of_a_form_or_calls(grammar, encode, name) -> None:
    outline = Outline(spec("json_schema", PERSON), rules(name))
    for text, good in ((F[name], True), ('{"name": "Ann", "age": 5}', True), ("Hello", False)):
        ids = encode(text)
        assert (follows(grammar, outline, ids) == (len(ids), True)) is good, text


def test_the_tokenizer_of_the_test_is_that_of_the_model(tokenizer_dir) -> None:
    settings = Settings()
    model = resolve_model(settings, REGISTRY, Hooks(REGISTRY, []), None)
    tokenizer = make_tokenizer(settings, REGISTRY, model)
    assert tokenizer is not None
    assert (tokenizer.vocab, EOS in tokenizer.eos) == (VOCAB, True)
