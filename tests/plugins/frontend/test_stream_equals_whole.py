"""A stream says what the whole answer says: whatever the model writes, wherever it ends and however it comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.api import Delta
from minisgl.base.types import ParseSpec
from minisgl.config.schema import KindSection, Settings
from minisgl.plugin.registry import Registry
from minisgl.text.output import joined
from minisgl.text.parse import Parsers, make_parsers
from minisgl.text.stops import StopHolder
from minisgl_plugins.frontend.openai_reply import Reply, ReplyDeltas

REGISTRY = Registry.scan(bundled_only=True)
NAMES = ("hermes", "llama3-json", "pythonic", "qwen3-xml")
PARSERS = {
    name: make_parsers(Settings(kinds={"parser": KindSection(use=("reasoning", name))}), REGISTRY, "") for name in NAMES
}
TOOLS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}, {"name": "g"}]
WHOLE = [
    "Hello", "<think>\nA\n</think>\n\n", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    '{"name": "f", "parameters": {"a": [1, {"b": "}"}]}}', '[f(a=1, b="x)"), g()]',
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
]  # fmt: skip
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    '{"name": "f"', '"arguments": {', '"parameters": {"a": 1}', ", ", "}", "]", "[f(", "a=1", ")", "; ", "\n", " ", "x", '"',
    "STOP", "ST", "<|python_tag|>", "é",
]  # fmt: skip


def deltas(parsers: Parsers, pieces: Sequence[str], why: str, sure: bool) -> list[Delta]:
    """One for each piece, and the last."""
    parsing = parsers.start(ParseSpec(calls=True), StopHolder(["STOP"], False), TOOLS, sure=sure)
    out = []
    for piece in pieces:
        if parsing.matched is None:
            out.append(Delta(uid=1, index=0, parts=joined(parsing.push(piece, ()))))
    if parsing.matched is not None:
        why = "stop"
    return [*out, Delta(uid=1, index=0, parts=joined(parsing.finish(why)), finish=why)]


def whole(told: Sequence[Delta]) -> dict[str, Any]:
    reply = Reply("", ("reasoning_content",), False)
    for delta in told:
        reply.add(delta)
    message = reply.message(True)
    calls = [c["function"] for c in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning_content"] or "",
        "calls": calls,
        "finish": reply.finish(told[-1].finish),
    }


def streamed(told: Sequence[Delta]) -> dict[str, Any]:
    """As a client puts the deltas of a stream together."""
    reply = ReplyDeltas(("reasoning_content",), False)
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in told:
        for body in reply.bodies(delta, b""):
            members = json.loads(b"{" + body + b"}")
            out["content"] += members.get("content", "")
            out["reasoning"] += members.get("reasoning_content", "")
            for call in members.get("tool_calls", []):
                if call["index"] == len(out["calls"]):
                    out["calls"].append({"name": call["function"]["name"], "arguments": ""})
                assert call["index"] == len(out["calls"]) - 1
                out["calls"][-1]["arguments"] += call["function"]["arguments"]
    return {**out, "finish": reply.finish(told[-1].finish)}


@settings(deadline=None, max_examples=200)
@given(
    data=st.data(),
    name=st.sampled_from(NAMES),
    why=st.sampled_from(["stop", "length"]),
    sure=st.booleans(),
    written=st.lists(st.one_of(st.sampled_from(WHOLE), st.sampled_from(PIECES)), max_size=8),
)
def test_a_stream_says_what_the_whole_answer_says(
    data: Any, name: str, why: str, sure: bool, written: list[str]
) -> None:
    text = "".join(written)
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parsers = PARSERS[name]
    expected = whole(deltas(parsers, [text], why, sure))
    for chunks in (pieces, list(text)):
        told = deltas(parsers, chunks, why, sure)
        assert streamed(told) == expected == whole(told)
    if expected["finish"] == "tool_calls" and not sure:
        assert all(isinstance(json.loads(call["arguments"]), dict) for call in expected["calls"])


def test_every_prefix_of_every_sample_says_the_same() -> None:
    for name in NAMES:
        for sample in WHOLE:
            for end in range(len(sample) + 1):
                for why in ("stop", "length"):
                    told = deltas(PARSERS[name], list(sample[:end]), why, False)
                    assert streamed(told) == whole(deltas(PARSERS[name], [sample[:end]], why, False))
