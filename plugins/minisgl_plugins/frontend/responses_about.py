"""What the published description says of responses."""

from __future__ import annotations

from typing import Any

from minisgl.api.openapi import (
    ANYTHING,
    COUNT,
    EVENTS,
    INTEGER,
    JSON,
    NUMBER,
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

from .openai_about import ANY_MODEL, FORMS, LISTS, SCHEMA, Examples
from .openai_fields import OpenAISettings
from .responses_request import PASSED, read_response

HEAD = {"id": STRING, "status": one_of("completed", "incomplete")}
LOGPROB = {"token": STRING, "logprob": NUMBER, "bytes": nullable(array_of(COUNT))}
PART = record(
    {
        "type": one_of("output_text"),
        "text": STRING,
        "annotations": array_of(ANYTHING),
        "logprobs": array_of(record({**LOGPROB, "top_logprobs": array_of(record(LOGPROB))})),
    }
)
THOUGHT = record({"type": one_of("reasoning_text"), "text": STRING})
TEXT_ITEM = {**HEAD, "type": one_of("message"), "role": one_of("assistant"), "content": array_of(PART)}
THOUGHT_ITEM = {**HEAD, "type": one_of("reasoning"), "summary": array_of(ANYTHING), "content": array_of(THOUGHT)}
CALL_ITEM = {**HEAD, "type": one_of("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING}
ITEM = {"anyOf": [record(TEXT_ITEM), record(THOUGHT_ITEM, {"encrypted_content": STRING}), record(CALL_ITEM)]}
USAGE = record(
    {
        "input_tokens": COUNT,
        "input_tokens_details": record({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": record({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
RESPONSE = record(
    {
        "id": STRING,
        "object": one_of("response"),
        "created_at": INTEGER,
        "completed_at": nullable(INTEGER),
        "status": one_of("completed", "incomplete"),
        "error": {"type": "null"},
        "incomplete_details": nullable(record({"reason": one_of("max_output_tokens")})),
        "background": one_of(False),
        "instructions": nullable(STRING),
        "max_output_tokens": nullable(COUNT),
        "max_tool_calls": nullable(COUNT),
        "metadata": OBJECT,
        "model": STRING,
        "parallel_tool_calls": {"type": "boolean"},
        "previous_response_id": {"type": "null"},
        "reasoning": record({"effort": nullable(STRING), "summary": nullable(STRING)}),
        "store": one_of(False),
        "temperature": NUMBER,
        "text": OBJECT,
        "tool_choice": ANYTHING,
        "tools": array_of(OBJECT),
        "top_logprobs": COUNT,
        "top_p": NUMBER,
        "truncation": one_of("disabled"),
        "output": array_of(ITEM),
        "usage": USAGE,
    },
    {"user": STRING, "safety_identifier": STRING, "prompt_cache_key": STRING},
    "Response",
)
STREAM = {"description": "With 'stream': server-sent events from response.created to the last one."}

TOOLS = [
    {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True},
    {"type": "web_search"},
]
NAMED = {"type": "function", "name": "weather"}
CHOICES = ("auto", NAMED, {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]})
FORM = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
PARTS = [{"type": "input_text", "text": "Hello."}]
CALL = {"call_id": "call_1", "name": "weather", "arguments": "{}"}
ITEMS = [
    {"role": "user", "content": PARTS},
    {"type": "message", "role": "assistant", "content": "Hello."},
    {"type": "reasoning", "summary": [{"text": "Hm."}]},
    {"type": "reasoning", "content": [{"text": "Hm."}], "encrypted_content": ""},
    {"type": "function_call", **CALL},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "call_1", "output": PARTS},
]
EXAMPLES: Examples = (
    {"input": "Say hello.", "max_output_tokens": 16},
    {"input": ITEMS, "include": ["reasoning.encrypted_content"]},
    {"input": "a", "text": {"format": FORM}},
    {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled"},
    *({"input": "a", "tools": TOOLS, "tool_choice": choice} for choice in CHOICES),
    *({"input": "a", **more} for more in (*FORMS, *LISTS) if "response_format" not in more),
)


def responses(settings: OpenAISettings) -> About:
    chat = Note()

    def read(body: dict[str, Any], note: Note) -> None:
        read_response(body, ANY_MODEL, settings, note, chat)
        for name in PASSED:
            if name != "metadata":  # read here too, and more strictly
                note.adopt(name, chat.member(name))
        note.adopt("max_output_tokens", chat.member("max_completion_tokens"))
        note.member("reasoning").adopt("effort", chat.member("reasoning_effort"))
        text, form = note.member("text"), chat.member("response_format").member("json_schema")
        text.adopt("verbosity", chat.member("verbosity"))
        for name in ("name", "description", "strict", "schema"):
            text.member("format").adopt(name, form.member(name))

    body = Body("ResponseRequest", read, EXAMPLES)
    return About("Answer a conversation of items.", {JSON: RESPONSE, EVENTS: STREAM}, body)
