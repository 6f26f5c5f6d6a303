"""Bodies of /v1/messages to bodies of chat completions, which have all that a messages request can ask for."""

from __future__ import annotations

from typing import Any

from minisgl.api import Fields, Note, Value, bounds

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
PASSED = ("stream", "temperature", "top_p", "top_k")  # to chat completions, which check them
OWN_TOOLS = (None, "custom")  # Anthropic's servers run others; clients offer them to any server
EFFORTS = ("low", "medium", "high", "xhigh", "max")

# Fields of the chat body that errors may name -> what stands there in this one.
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "user": "metadata.user_id"}


def names(body: dict[str, Any]) -> dict[str, str]:
    """Paths of what ``as_chat`` makes of ``body`` -> what stands there in it."""
    found = {}
    for chat, i in enumerate(i for i, tool in enumerate(body.get("tools") or ()) if tool.get("type") in OWN_TOOLS):
        found[f"tools[{chat}].function.parameters"] = f"tools[{i}].input_schema"
        found[f"tools[{chat}].function"] = f"tools[{i}]"
    form = "output_config.format" if (body.get("output_config") or {}).get("format") else "output_format"
    return found | {"response_format.json_schema": form, "response_format": form, **NAMES}


def as_chat(body: dict[str, Any], needs_max: bool = True, note: Note | None = None) -> dict[str, Any]:
    """Raises: RequestError. Fields of the answer that are checked by chat completions are passed on as they are."""
    f = Fields(body, note=note)
    out: dict[str, Any] = {name: body[name] for name in PASSED if f.raw(name) is not None}
    out["model"] = f.need("model").string()
    if needs_max:
        out["max_completion_tokens"] = f.need("max_tokens").integer(*bounds.SAMPLING_RANGES["max_tokens"])
    stops = [item.string(1) for item in f.items("stop_sequences")]
    if stops:
        out["stop"] = stops
    f.refuse("mcp_servers", [])
    metadata = f.object("metadata")
    if metadata is not None:
        out["user"] = metadata.string("user_id")
    messages = [m for item in f.need("messages").items(min_len=1) for m in _message(item.object())]
    out["messages"] = _system(f) + messages
    if messages and messages[-1]["role"] == "assistant":  # the answer goes on from it
        out["continue_final_message"] = True
    template = _thinking(f)
    out |= _tools(f) | _output(f, template)
    return out | ({"chat_template_kwargs": template} if template else {})


def _system(f: Fields) -> list[dict[str, Any]]:
    value = f.value("system")
    return [] if value is None else [{"role": "system", "content": _texts(value)}]


def _texts(value: Value) -> str:
    """A string, or text blocks joined."""
    if isinstance(value.raw, str):
        return value.string()
    blocks = [item.object() for item in value.items()]
    return "\n".join(_text(block) for block in blocks if _kind(block, "text"))


def _text(block: Fields) -> str:
    return block.need("text").string()


def _kind(block: Fields, *accepted: str) -> str:
    kind = block.need("type")
    if isinstance(kind.raw, str) and kind.raw not in accepted:
        raise kind.refused(f"is {kind.raw[:100]!r}, but this model takes text only", "unsupported_value")
    return kind.one_of(accepted)


def _message(m: Fields) -> list[dict[str, Any]]:
    """One message is several of chat completions if it has results of tools."""
    role = m.need("role").one_of(("user", "assistant"))
    content = m.need("content")
    if isinstance(content.raw, str):
        return [{"role": role, "content": content.string()}]
    if not isinstance(content.raw, list):
        raise content.wrong_type("a string or an array of blocks")
    blocks = [item.object() for item in content.items()]
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _user(blocks: list[Fields]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        if _kind(block, "text", "tool_result") == "tool_result":
            result = block.value("content")
            text = "" if result is None else _texts(result)
            out.append({"role": "tool", "tool_call_id": block.string("tool_use_id"), "content": text})
        else:
            texts.append(_text(block))
    if texts or not out:
        out.append({"role": "user", "content": "\n".join(texts)})
    return out


def _assistant(blocks: list[Fields]) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block, "text", "thinking", "redacted_thinking", "tool_use")
        if kind == "tool_use":
            function = {"name": block.need("name").string(), "arguments": block.need("input").object().body}
            calls.append({"id": block.string("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block.need("thinking").string())
        elif kind == "text":
            texts.append(_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tools(f: Fields) -> dict[str, Any]:
    tools = []
    for item in f.items("tools"):
        tool = item.object()
        schema = tool.object("input_schema")
        function = {
            "name": tool.string("name"),
            "description": tool.string("description"),
            "parameters": None if schema is None else schema.body,
            "strict": tool.boolean("strict"),
        }
        if tool.string("type") in OWN_TOOLS:
            tool.require("name")
            tool.require("input_schema")
            tools.append({"type": "function", "function": function})
    choice = f.object("tool_choice")
    if not tools:
        return {}
    out: dict[str, Any] = {"tools": tools}
    if choice is not None:
        kind = choice.need("type").one_of((*CHOICES, "tool"))
        out["tool_choice"] = (
            {"type": "function", "function": {"name": choice.require("name")}} if kind == "tool" else CHOICES[kind]
        )
        out["parallel_tool_calls"] = choice.boolean("disable_parallel_tool_use") is not True
    return out


def _output(f: Fields, template: dict[str, Any]) -> dict[str, Any]:
    """The schema that the answer is to have, ``output_config.format`` or the beta's ``output_format``. The effort goes to the
    template, which may know it; that alone does not switch thinking on."""
    config = f.object("output_config")
    effort = None if config is None else config.one_of("effort", EFFORTS)
    if effort is not None:
        template["reasoning_effort"] = effort
    form = (None if config is None else config.object("format")) or f.object("output_format")
    if form is None:
        return {}
    form.need("type").one_of(("json_schema",))
    schema = form.need("schema").object().body
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    }


def _thinking(f: Fields) -> dict[str, Any]:
    """For the template, which ``adaptive`` leaves it to."""
    thinking = f.object("thinking")
    if thinking is None:
        return {}
    kind = thinking.need("type").one_of(("enabled", "disabled", "adaptive"))
    return {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
