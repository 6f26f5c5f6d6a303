"""Bodies of /v1/responses to bodies of chat completions, which have all that a stateless response can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.api import EngineInfo, Fields, Note

from .openai_fields import IGNORED, OpenAISettings, refuse_unknown
from .openai_forms import ALIASES
from .openai_request import Call, read_chat
from .responses_input import read_input
from .responses_shown import shown
from .translating import renaming

# What chat completions take under the same name: fields of this API, and this server's own beside it.
PASSED = (
    *("model", "stream", "stream_options", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "user"),
    *(name for name in IGNORED if name != "verbosity"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("logits", "skip_special_tokens", "structured_outputs", *ALIASES, "return_tokens_as_token_ids", "documents"),
    *("chat_template_kwargs", "truncate_prompt_tokens", "priority", "cache_salt", "request_id", "rid", "moderation"),
)
# Fields of chat completions that have other names here.
MOVED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "top_logprobs",
}
INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Parts of items that this server never makes.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
SUMMARIES = ("auto", "concise", "detailed")
FUNCTION = ("name", "description", "parameters", "strict")
# Paths of the chat body that errors may name -> what stands there in this one; see also ``_tools``.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``shown``: what its response repeats of it. ``names``: as NAMES. ``carries_reasoning``: the client wants to send
    reasoning back as ``encrypted_content``."""

    call: Call
    shown: dict[str, Any]
    names: dict[str, str]
    carries_reasoning: bool


def read_response(
    body: dict[str, Any],
    info: EngineInfo,
    settings: OpenAISettings,
    note: Note | None = None,
    chat_note: Note | None = None,
) -> Asked:
    """``chat_note``: of the body of chat completions that it becomes. Raises: RequestError."""
    f = Fields(body, note=note)
    _refuse(f)
    chat: dict[str, Any] = {name: body[name] for name in PASSED if f.raw(name) is not None}
    chat["messages"] = read_input(f)
    include = {item.one_of(INCLUDABLE) for item in f.items("include")}
    chat["logprobs"] = "message.output_text.logprobs" in include or bool(chat.get("top_logprobs"))
    if f.raw("max_output_tokens") is not None:
        chat["max_completion_tokens"] = f.raw("max_output_tokens")
    tools, names = _tools(f)
    if tools:
        chat["tools"] = tools
    choice = _choice(f)
    if choice is not None:
        chat["tool_choice"] = choice
    text, reasoning, metadata = f.object("text"), f.object("reasoning"), f.object("metadata")
    for _, value in metadata.members() if metadata is not None else ():
        value.string()
    chat |= _text(text) if text is not None else {}
    chat |= _reasoning(reasoning) if reasoning is not None else {}
    refuse_unknown(f, settings.strict)
    names |= NAMES
    with renaming(names, NAMES):
        call = read_chat(chat, info, settings, chat_note)
    return Asked(call, shown(body, chat, call, info), names, "reasoning.encrypted_content" in include)


def _refuse(f: Fields) -> None:
    """What needs a server that keeps responses, or has another name here."""
    for name in ("previous_response_id", "conversation"):
        f.refuse(name, why="needs kept responses; this server keeps none, send all items as 'input'")
    f.refuse("prompt", why="names a stored template; this server stores none, send 'input'")
    f.refuse("background", False, why="must be false: this server keeps no responses")
    f.refuse("context_management", [])
    f.refuse("n", 1)
    for name, here in MOVED.items():
        f.refuse(name, why=f"is no field of this route; use '{here}'")
    f.integer("max_tool_calls", 1)  # of tools that the server runs: there are none
    truncation = f.value("truncation")
    if truncation is not None and truncation.one_of(("disabled", "auto")) == "auto":
        raise truncation.refused("must be 'disabled': this server leaves out no items by itself", "unsupported_value")


def _tools(f: Fields) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The functions, and the paths that they have in either body. Clients offer tools of other types to any server, which leaves
    them out."""
    tools: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in f.items("tools"):
        tool = item.object()
        if tool.need("type").string() == "function":
            names |= {f"tools[{len(tools)}].function": tool.path, f"tools[{len(tools)}]": tool.path}
            tools.append({"type": "function", "function": {k: tool.body[k] for k in FUNCTION if k in tool.body}})
    return tools, names


def _choice(f: Fields) -> Any:
    choice = f.value("tool_choice")
    if choice is None:
        return None
    if isinstance(choice.raw, str):
        return choice.one_of(("none", "auto", "required"))
    if not isinstance(choice.raw, dict):
        raise choice.wrong_type("a string or an object")
    c = choice.object()
    kind = c.need("type")
    if kind.string() == "function":
        return _named(c)
    if kind.raw != "allowed_tools":
        raise kind.refused(
            f"is {kind.raw[:100]!r}; this server calls tools of type 'function' only", "unsupported_value"
        )
    tools = [_named(tool) for item in c.need("tools").items() if (tool := item.object()).raw("type") == "function"]
    return {"type": kind.raw, kind.raw: {"mode": c.require("mode"), "tools": tools}}


def _named(c: Fields) -> dict[str, Any]:
    return {"type": "function", "function": {"name": c.need("name").string()}}


def _text(text: Fields) -> dict[str, Any]:
    out: dict[str, Any] = {"verbosity": text.raw("verbosity")}
    form = text.object("format")
    if form is not None:
        kind = form.need("type").string()
        schema = {k: v for k, v in form.body.items() if k != "type"}
        out["response_format"] = {"type": kind, kind: schema} if kind == "json_schema" else {"type": kind}
    return out


def _reasoning(reasoning: Fields) -> dict[str, Any]:
    """Reasoning is always given in full, which is more than any summary."""
    reasoning.one_of("summary", SUMMARIES)
    reasoning.one_of("generate_summary", SUMMARIES)
    reasoning.refuse("mode", "standard")
    reasoning.refuse("context", "auto")
    return {"reasoning_effort": reasoning.raw("effort")}
