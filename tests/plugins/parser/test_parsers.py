"""Output parsers: what each format means, and that nothing depends on how the text comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.api import OutputParser, ParserContext, Part
from minisgl.plugin.registry import Registry
from minisgl.text.output import joined

REGISTRY = Registry.scan(bundled_only=True)
TOOLS = [
    {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "s": {"type": "string"},
                "x": {"type": "number"},
                "b": {"type": "boolean"},
                "o": {"type": "object"},
                "m": {"type": ["integer", "null"]},
                "e": {"enum": ["1", "2"]},
                "y": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            },
        },
    },
    {"name": "g"},
]


def make(name: str, options: dict[str, Any] | None = None, **context: Any) -> OutputParser:
    context.setdefault("tools", TOOLS)

    def ctx(s: Any) -> ParserContext:
        return ParserContext(s, **context)

    made: OutputParser = REGISTRY.create("parser", name, options or {}, ctx)
    return made


def parse(name: str, pieces: Sequence[str], why: str = "stop", **context: Any) -> tuple[Part, ...]:
    parser = make(name, **context)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece, ())
    return joined(parts + parser.finish(why))


def content(text: str) -> Part:
    return Part("content", text)


def call(name: str, arguments: str, end: str = "end") -> tuple[Part, ...]:
    return (Part("call", name), Part("arguments", arguments), Part(end))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ samples

H1 = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
H2 = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
X1 = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n01\n</parameter>\n</function>\n</tool_call>"
XA = '{"a": 1, "s": "01"}'

SAMPLES: list[tuple[str, str, tuple[Part, ...]]] = [
    ("hermes", "plain text", (content("plain text"),)),
    ("hermes", H1, call("f", '{"a": 1}')),
    ("hermes", f"Let me see.\n{H1}\n{H2}", (content("Let me see.\n"), *call("f", '{"a": 1}'), *call("g", "{}"))),
    ("hermes", f"\n\n{H1}\nDone", (*call("f", '{"a": 1}'), content("\nDone"))),
    ("hermes", '<tool_call>{"arguments": {"s": "</tool_call>"}, "name": "f"}</tool_call>', call("f", '{"s": "</tool_call>"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', call("f", '{"a": 2}')),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', call("g", "{}")),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', call("g", "{}")),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": { "a" : [1, {"b": -1.5e3}] } }', call("f", '{ "a" : [1, {"b": -1.5e3}] }')),
    ("hermes", "a < b and <tool", (content("a < b and <tool"),)),
    ("hermes", "  \n", (content("  \n"),)),
    ("llama3-json", '{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    ("llama3-json", '<|python_tag|>{"name": "f", "arguments": {"a": 1}}; {"name": "g", "parameters": {}}', (*call("f", '{"a": 1}'), *call("g", "{}"))),
    ("llama3-json", ' {"type": "function", "name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    ("llama3-json", '{"name": "Bob", "parameters": {"a": 1}}', (content('{"name": "Bob", "parameters": {"a": 1}}'),)),
    ("llama3-json", '{"name": "f", "price": 3}', (content('{"name": "f", "price": 3}'),)),
    ("llama3-json", 'Here: {"name": "f", "parameters": {}}', (content('Here: {"name": "f", "parameters": {}}'),)),
    ("pythonic", "[f(a=1)]", call("f", '{"a": 1}')),
    ("pythonic", """[f(s="a, )] 'b'", x=-1.5), g()]""", (*call("f", """{"s": "a, )] 'b'", "x": -1.5}"""), *call("g", "{}"))),
    ("pythonic", "<|python_start|>[f(a=1, b=true, o={'k': [None, (1, 2)]})]<|python_end|>", call("f", '{"a": 1, "b": true, "o": {"k": [null, [1, 2]]}}')),
    ("pythonic", "[1, 2]", (content("[1, 2]"),)),
    ("pythonic", "[h(a=1)]", (content("[h(a=1)]"),)),
    ("pythonic", "[f(1)]", (content("[f(1)]"),)),
    ("pythonic", "see [f(a=1)]", (content("see [f(a=1)]"),)),
    ("pythonic", "[f(a=__import__('os'))]", (content("[f(a=__import__('os'))]"),)),
    ("qwen3-xml", X1, call("f", XA)),
    ("qwen3-xml", f"Now\n{X1}\n{X1}", (content("Now\n"), *call("f", XA), *call("f", XA))),
    ("qwen3-xml", "<function=g>\n</function>", call("g", "{}")),
    ("qwen3-xml", "<tool_call><function=f><parameter=s>\n\n<b>\n</parameter></function></tool_call>", call("f", '{"s": "\\n<b>"}')),
    ("qwen3-xml", "<tool_call>\nno call\n</tool_call>", (content("<tool_call>\nno call\n</tool_call>"),)),
    ("reasoning", "<think>\nA\n</think>\n\nB", (Part("reasoning", "A"), content("B"))),
    ("reasoning", "\n<think>A</think>B", (Part("reasoning", "A"), content("B"))),
    ("reasoning", "<think>\n\n</think>\n\n\nB", (content("\nB"),)),
    ("reasoning", "B <think>x</think>", (content("B <think>x</think>"),)),
    ("reasoning", "<think>\nA\n\nB\n", (Part("reasoning", "A\n\nB\n"),)),
    ("reasoning", "<thin", (content("<thin"),)),
]  # fmt: skip
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(SAMPLES)]


@pytest.mark.parametrize(("name", "text", "wanted"), SAMPLES, ids=IDS)
def test_a_text_is_what_its_format_says(name: str, text: str, wanted: tuple[Part, ...]) -> None:
    assert parse(name, [text]) == wanted


@pytest.mark.parametrize(("name", "text", "wanted"), SAMPLES, ids=IDS)
def test_the_parts_do_not_depend_on_the_cuts(name: str, text: str, wanted: tuple[Part, ...]) -> None:
    assert parse(name, list(text)) == wanted
    for cut in range(1, len(text)):
        assert parse(name, [text[:cut], text[cut:]]) == wanted


# What a model may write, right or wrong: pieces of every format, stuck together.
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "<function=", "</function>", "<parameter=a>",
    "</parameter>", '{"name": "f"', '"arguments": {', '"parameters": {"a": 1}', '{"name": "f", "arguments": {"a": 1}}', ", ",
    "}", "]", "[", "f(a=1)", "g()", "g(", ")", ";", "\n", " ", "x", '"', "\\", "1", "<", "null", "<|python_tag|>", "é",
    '{"name": "f", "arguments": {"a": ', '"name": "g"',
]  # fmt: skip
NAMES = ["hermes", "llama3-json", "pythonic", "qwen3-xml", "reasoning"]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(NAMES), why=st.sampled_from(["stop", "length"]), sure=st.booleans())
def test_every_split_of_any_text_gives_the_same_parts_and_loses_nothing(
    data: Any, name: str, why: str, sure: bool
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, [text], why, sure=sure)
    assert parse(name, pieces, why, sure=sure) == whole == parse(name, list(text), why, sure=sure)
    open_ = False
    for part in whole:  # call, arguments*, end; nothing else in between
        assert open_ == (part.kind in ("arguments", "end"))
        open_ = part.kind in ("call", "arguments")
    assert not open_
    if not any(p.kind == "call" for p in whole) and name != "reasoning":
        assert "".join(p.text for p in whole) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\n{bad}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "no"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>'),
        ("hermes", ' <tool_call>\n{"name": "f", "arguments": {"a": 1'),
        ("llama3-json", '{"name": "f", "parameters": {"a": 1}, '),
        ("llama3-json", '{"name": "f", "parameters": 5}'),
        ("pythonic", "[f(a=)]"),
        ("qwen3-xml", "<tool_call>\n<function f>\n</tool_call>"),
        ("qwen3-xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_25_malformed_calls_are_content_verbatim(name: str, text: str, whole: bool) -> None:
    assert parse(name, [text] if whole else list(text)) == (content(text),)


def test_a_call_goes_out_when_it_is_complete() -> None:
    parser = make("hermes")
    assert [part for c in H1[: H1.index("}}") + 1] for part in parser.push(c, ())] == []
    assert joined(parser.push("}", ())) == call("f", '{"a": 1}')


@pytest.mark.parametrize("early", [{"sure": True}, {"options": {"early": True}}], ids=["held to a grammar", "early"])
def test_a_call_that_is_sure_to_be_one_goes_out_as_it_comes(early: dict[str, Any]) -> None:
    parser = make("hermes", **early)
    kinds = [[part.kind for part in parser.push(c, ())] for c in H1]
    assert [k for k in kinds if k] == [["call", "arguments"], *[["arguments"]] * 7, ["end"]]


@pytest.mark.parametrize("whole", [True, False])
def test_a_call_that_went_out_early_and_breaks_stays_one_as_far_as_it_goes(whole: bool) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>'
    parts = parse("hermes", [text] if whole else list(text), options={"early": True})
    assert parts == (*call("f", '{"a": '), content("}}\n</tool_call>"))


def test_a_call_cut_by_the_length_is_a_call_as_far_as_it_goes() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1'
    assert parse("hermes", [text], "length") == call("f", '{"a": 1')
    assert parse("hermes", [text], "stop") == (content(text),)
    assert parse("hermes", [text], "stop", sure=True) == call("f", '{"a": 1')


def test_a_broken_call_does_not_swallow_the_next_one() -> None:
    assert parse("hermes", ["<tool_call>\n" + H1]) == (content("<tool_call>\n"), *call("f", '{"a": 1}'))


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("a", "5", 5),
        ("a", "five", "five"),
        ("s", "5", "5"),
        ("s", "null", "null"),
        ("x", "1.5", 1.5),
        ("b", "true", True),
        ("b", "True", True),
        ("o", '{"k": [1]}', {"k": [1]}),
        ("m", "null", None),
        ("m", "None", None),
        ("e", "1", "1"),
        ("y", "7", 7),
        ("y", "true", "true"),
        ("unknown", "7", 7),
        ("unknown", "NaN", "NaN"),
        ("a", "1" * 5000, "1" * 5000),
    ],
)
def test_23_the_schema_says_what_an_xml_value_is(parameter: str, text: str, value: Any) -> None:
    written = f"<tool_call>\n<function=f>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parts = parse("qwen3-xml", [written])
    assert json.loads(parts[1].text) == {parameter: value}


# ---------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("prompt", "output", "wanted"),
    [
        ("assistant\n<think>\n", "A\n</think>\n\nB", ("A", "B")),
        ("assistant\n<think>", "\nA\n</think>\n\nB", ("A", "B")),
        ("assistant\n<think>\n\n</think>\n\n", "B", ("", "B")),
        ("user\nWhat is <think><|im_end|>\nassistant\n", "B", ("", "B")),
        ("assistant\n<think>\n", "A", ("A", "")),
    ],
)
def test_26_the_prompt_says_whether_the_model_thinks_already(prompt: str, output: str, wanted: Any) -> None:
    for pieces in ([output], list(output)):
        parts = parse("reasoning", pieces, prompt=prompt)
        assert tuple("".join(p.text for p in parts if p.kind == k) for k in ("reasoning", "content")) == wanted


@pytest.mark.parametrize(
    ("own", "wanted"),
    [("<think>\nso far", ("A", "B")), ("<think>x</think>so", ("", "A</think>B")), ("so", ("", "A</think>B"))],
)
def test_a_continued_message_says_whether_it_ends_within_reasoning(own: str, wanted: Any) -> None:
    parts = parse("reasoning", ["A</think>B"], prompt=f"assistant\n{own}", continued=own)
    assert tuple("".join(p.text for p in parts if p.kind == k) for k in ("reasoning", "content")) == wanted


def test_a_tool_call_ends_reasoning_that_was_left_open() -> None:
    text = f"<think>\nI call.\n{H1}"
    for pieces in ([text], list(text)):
        parts = parse("reasoning", pieces, cuts=("<tool_call>",))
        assert parts == (Part("reasoning", "I call."), content(H1))


def test_thinking_is_true_between_the_tags() -> None:
    parser = make("reasoning")
    seen = []
    for piece in ("<think>", "A", "</think>", "\n\n", "B"):
        parser.push(piece, ())
        seen.append(parser.thinking)
    assert seen == [True, True, False, False, False]
