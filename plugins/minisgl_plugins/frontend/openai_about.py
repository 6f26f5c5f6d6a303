"""What the published description says of the OpenAI API: request bodies by their readers, and the objects that are answered."""

from __future__ import annotations

from typing import Any

from minisgl.api import EngineInfo, bounds
from minisgl.api.openapi import (
    COUNT,
    EVENTS,
    INTEGER,
    JSON,
    NUMBER,
    STRING,
    About,
    Body,
    Schema,
    array_of,
    nullable,
    one_of,
    record,
)

from .openai_fields import OpenAISettings
from .openai_forms import ALIASES
from .openai_request import read_chat, read_completion
from .openai_tokenize import read_detokenize, read_tokenize

Examples = tuple[dict[str, Any], ...]

# The description is of any model: a vocabulary and a context as large as they can be.
ANY_MODEL = EngineInfo(
    model="",
    served_names=("",),
    max_len=bounds.INT31_MAX,
    vocab=bounds.INT31_MAX,
    eos=(),
    page_size=1,
    num_pages=1,
    max_running=1,
    batch_tokens=1,
    device="",
    dtype="",
    created=0,
)

# ------------------------------------------------------------------------------------------- bodies that have every field

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
USER = [{"role": "user", "content": "Say hello."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}, "Be short."]},
    {"role": "user", "content": "And in Paris?", "name": "me"},
    {"role": "assistant", "refusal": "No.", "reasoning_content": "Hm."},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "Hm."},
    {"role": "assistant", "tool_calls": [CALL, {**CALL, "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
]
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHOICES = ("auto", NAMED, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}})
FORMS: Examples = (
    *(
        {"structured_outputs": form}
        for form in ({"json": SCHEMA}, {"json": "{}"}, {"json": True}, {"json_object": True})
    ),
    *({"structured_outputs": form} for form in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": "start: /a/"})),
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}},
    *({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}} for schema in ("{}", True)),
    *({name: {"json": SCHEMA, "choice": ["a"]}.get(kind, "a")} for name, kind in ALIASES.items()),
    *({name: schema} for name, kind in ALIASES.items() if kind == "json" for schema in ("{}", True)),
)
LISTS: Examples = (
    {"stop": "."},
    {
        "stop": ["."],
        "stop_token_ids": [1],
        "allowed_token_ids": [1],
        "bad_words": ["bad"],
        "logit_bias": {"1": 0.5},
        "logits": {},
        "metadata": {"topic": "weather"},
        "documents": [{}],
        "chat_template_kwargs": {},
    },
    {"stream": True, "stream_options": {"include_usage": True}},
)
CHAT_EXAMPLES: Examples = (
    {"messages": USER, "max_completion_tokens": 16},
    {"messages": MESSAGES, **TOOLS},
    *({"messages": USER, **TOOLS, "tool_choice": choice} for choice in CHOICES),
    *({"messages": USER, **more} for more in (*FORMS, *LISTS)),
    {"messages": USER, "modalities": ["text"]},
)
COMPLETION_EXAMPLES: Examples = (
    {"prompt": "Once upon a time", "max_tokens": 16},
    *({"prompt": prompt} for prompt in (["a"], [1], [[1]])),
    {"prompt": "a", "echo": True, "max_tokens": 0},
    *({"prompt": "a", **more} for more in (*FORMS, *LISTS)),
)
TOKENIZE_EXAMPLES: Examples = (
    {"prompt": "Hello"},
    {"messages": MESSAGES},
    *({"messages": USER, **TOOLS, "tool_choice": choice} for choice in CHOICES),
)

# --------------------------------------------------------------------------------------------------------------- answers

TOKEN_IDS = array_of(COUNT)
USAGE = record(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
        "completion_tokens_details": record({"reasoning_tokens": COUNT}),
    },
    title="Usage",
)
CANDIDATE = {"token": STRING, "logprob": NUMBER, "bytes": nullable(array_of(COUNT))}
CHAT_LOGPROBS = record(
    {
        "content": array_of(record({**CANDIDATE, "top_logprobs": array_of(record(CANDIDATE))})),
        "refusal": {"type": "null"},
    }
)
COMPLETION_LOGPROBS = record(
    {
        "tokens": array_of(STRING),
        "token_logprobs": array_of(nullable(NUMBER)),
        "top_logprobs": array_of(nullable({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": array_of(COUNT),
    }
)
RANKED = record({"logprob": NUMBER, "rank": COUNT, "decoded_token": STRING})
PROMPT_LOGPROBS = array_of(nullable({"type": "object", "additionalProperties": RANKED}))
TOOL_CALL = record(
    {"id": STRING, "type": one_of("function"), "function": record({"name": STRING, "arguments": STRING})}
)
MESSAGE = record(
    {"role": one_of("assistant"), "content": nullable(STRING), "refusal": {"type": "null"}},
    {"tool_calls": array_of(TOOL_CALL), "reasoning_content": nullable(STRING), "reasoning": nullable(STRING)},
)
ENDS = {"stop_reason": {"type": ["string", "integer", "null"]}}
CHAT_CHOICE = record(
    {
        "index": COUNT,
        "message": MESSAGE,
        "logprobs": nullable(CHAT_LOGPROBS),
        "finish_reason": one_of("stop", "length", "tool_calls"),
        **ENDS,
    },
    {"token_ids": TOKEN_IDS},
)
COMPLETION_CHOICE = record(
    {
        "index": COUNT,
        "text": STRING,
        "logprobs": nullable(COMPLETION_LOGPROBS),
        "finish_reason": one_of("stop", "length"),
        **ENDS,
    },
    {"token_ids": TOKEN_IDS, "prompt_token_ids": TOKEN_IDS, "prompt_logprobs": PROMPT_LOGPROBS},
)


def _completion(title: str, name: str, choice: Schema, more: dict[str, Schema]) -> Schema:
    head = {"id": STRING, "object": one_of(name), "created": INTEGER, "model": STRING, "choices": array_of(choice)}
    return record({**head, "usage": USAGE, "system_fingerprint": STRING}, more, title)


CHAT_ANSWER = _completion(
    "ChatCompletion",
    "chat.completion",
    CHAT_CHOICE,
    {"prompt_token_ids": TOKEN_IDS, "prompt_logprobs": PROMPT_LOGPROBS},
)
COMPLETION_ANSWER = _completion("Completion", "text_completion", COMPLETION_CHOICE, {})
STREAM = {"description": "With 'stream': server-sent events whose data are JSON, at last [DONE]."}
MODEL_OBJECT = record(
    {
        "id": STRING,
        "object": one_of("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "parent": nullable(STRING),
        "max_model_len": COUNT,
    },
    title="Model",
)

# ---------------------------------------------------------------------------------------------------------------- routes


def chat(settings: OpenAISettings) -> About:
    body = Body("ChatCompletionRequest", lambda b, note: read_chat(b, ANY_MODEL, settings, note), CHAT_EXAMPLES)
    return About("Answer a conversation.", {JSON: CHAT_ANSWER, EVENTS: STREAM}, body)


def completions(settings: OpenAISettings) -> About:
    body = Body("CompletionRequest", lambda b, note: read_completion(b, ANY_MODEL, settings, note), COMPLETION_EXAMPLES)
    return About("Go on with texts.", {JSON: COMPLETION_ANSWER, EVENTS: STREAM}, body)


MODELS = About(
    "The models that are served.", {JSON: record({"object": one_of("list"), "data": array_of(MODEL_OBJECT)})}
)
MODEL = About("One of the models.", {JSON: MODEL_OBJECT}, parameters={"id": "name of the model; it may have slashes"})
TOKENIZE = About(
    "The tokens of a text or of a conversation.",
    {
        JSON: record(
            {
                "count": COUNT,
                "max_model_len": COUNT,
                "tokens": TOKEN_IDS,
                "token_strs": nullable(array_of(STRING)),
            }
        )
    },
    Body("TokenizeRequest", lambda b, note: read_tokenize(b, ANY_MODEL, note), TOKENIZE_EXAMPLES),
)
DETOKENIZE = About(
    "The text of tokens.",
    {JSON: record({"prompt": STRING})},
    Body("DetokenizeRequest", lambda b, note: read_detokenize(b, ANY_MODEL, note), ({"tokens": [1, 2, 3]},)),
)
