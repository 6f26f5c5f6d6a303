"""What the published description says of the Anthropic API."""

from __future__ import annotations

from typing import Any

from minisgl.api.openapi import (
    COUNT,
    EVENTS,
    JSON,
    OBJECT,
    STRING,
    About,
    Body,
    Note,
    array_of,
    nullable,
    one_of,
    record,
)

from .anthropic_request import PASSED, as_chat
from .openai_about import ANY_MODEL
from .openai_fields import OpenAISettings
from .openai_request import read_chat

ERROR = record(
    {
        "type": one_of("error"),
        "error": record({"type": STRING, "message": STRING}),
    },
    title="AnthropicError",
)
BLOCK = {
    "anyOf": [
        record({"type": one_of("text"), "text": STRING}),
        record({"type": one_of("thinking"), "thinking": STRING, "signature": STRING}),
        record({"type": one_of("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}),
    ]
}
USAGE = record(
    {
        "input_tokens": COUNT,
        "output_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
    }
)
MESSAGE = record(
    {
        "id": STRING,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": STRING,
        "content": array_of(BLOCK),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": nullable(STRING),
        "usage": USAGE,
    },
    title="AnthropicMessage",
)
STREAM = {"description": "With 'stream': server-sent events from message_start to message_stop."}

HEAD: dict[str, Any] = {"model": "model", "max_tokens": 16}
USER = {"role": "user", "content": "Say hello."}
CALL = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
TEXT = {"type": "text", "text": "Hello."}
THOUGHT = {"type": "thinking", "thinking": "Hm."}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}, "strict": False}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking"}, TEXT, CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": [TEXT]}]},
]
EXAMPLES: tuple[dict[str, Any], ...] = (
    {**HEAD, "messages": [USER]},
    {**HEAD, "messages": [USER], "system": "Be kind.", "stop_sequences": ["."], "metadata": {"user_id": "me"}},
    {**HEAD, "messages": MESSAGES, "system": [TEXT], "thinking": {"type": "enabled"}},
    {**HEAD, "messages": [USER], "tools": [TOOL], "tool_choice": {"type": "auto"}},
    {**HEAD, "messages": [USER], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    {**HEAD, "messages": [USER], "output_config": {"effort": "low", "format": FORM}},
    {**HEAD, "messages": [USER], "output_format": FORM},
    {**HEAD, "messages": [USER], "tools": [{"type": "web_search_20250305"}]},
)


def messages(settings: OpenAISettings) -> About:
    chat = Note()

    def read(body: dict[str, Any], note: Note) -> None:
        read_chat({**as_chat(body, note=note), "model": None}, ANY_MODEL, settings, chat)
        for name in PASSED:
            note.adopt(name, chat.member(name))

    body = Body("AnthropicMessageRequest", read, EXAMPLES)
    return About("Answer a conversation.", {JSON: MESSAGE, EVENTS: STREAM}, body)


def _count(body: dict[str, Any], note: Note) -> None:
    as_chat(body, needs_max=False, note=note)


COUNT_TOKENS = About(
    "Count the tokens of a conversation.",
    {JSON: record({"input_tokens": COUNT})},
    Body("AnthropicCountRequest", _count, EXAMPLES),
)
