"""Bodies of /v1/messages to bodies of chat completions, which have all that a messages request can ask for."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.api import Fields, RequestError, as_array, as_object, as_string, invalid_type, one_of

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
PASSED = ("model", "stream", "temperature", "top_p", "top_k")
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def as_chat(body: dict[str, Any], needs_max: bool = True) -> dict[str, Any]:
    """Raises: RequestError. Fields of the answer that are checked by chat completions are passed on as they are."""
    f = Fields(body)
    f.require("model")
    out: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
    if needs_max:
        f.require("max_tokens")
        out["max_completion_tokens"] = f.raw("max_tokens")
    if body.get("stop_sequences"):
        out["stop"] = f.array("stop_sequences")
    if body.get("mcp_servers"):
        raise f.unsupported("mcp_servers")
    metadata = f.object("metadata")
    if metadata is not None and metadata.raw("user_id") is not None:
        out["user"] = metadata.string("user_id")
    items = as_array(f.require("messages"), "messages", min_len=1)
    messages = [m for i, item in enumerate(items) for m in _message(item, f"messages[{i}]")]
    out["messages"] = _system(f) + messages
    if messages and messages[-1]["role"] == "assistant":  # the answer goes on from it
        out["continue_final_message"] = True
    template = _thinking(f)
    out |= _tools(f) | _output(f, template)
    return out | ({"chat_template_kwargs": template} if template else {})


def _system(f: Fields) -> list[dict[str, Any]]:
    value = f.raw("system")
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    return [{"role": "system", "content": _texts(value, "system")}]


def _texts(value: Any, path: str) -> str:
    """A string, or text blocks joined."""
    if isinstance(value, str):
        return value
    texts = []
    for j, item in enumerate(as_array(value, path)):
        block = Fields(as_object(item, f"{path}[{j}]"), f"{path}[{j}]")
        _only_text(block)
        texts.append(as_string(block.require("text"), block.at("text")))
    return "\n".join(texts)


def _only_text(block: Fields) -> None:
    kind = as_string(block.require("type"), block.at("type"))
    if kind != "text":
        raise RequestError(
            f"'{block.at('type')}' is {kind!r}, but this model takes text only.",
            code="unsupported_value",
            param=block.at("type"),
        )


def _message(value: Any, path: str) -> list[dict[str, Any]]:
    """One message is several of chat completions if it has results of tools."""
    m = Fields(as_object(value, path), path)
    role = one_of(as_string(m.require("role"), m.at("role")), m.at("role"), ("user", "assistant"))
    content = m.require("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid_type(m.at("content"), content, "a string or an array of blocks")
    blocks = [
        Fields(as_object(item, f"{m.at('content')}[{j}]"), f"{m.at('content')}[{j}]") for j, item in enumerate(content)
    ]
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _user(blocks: list[Fields]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        if block.raw("type") == "tool_result":
            result = block.raw("content")
            text = "" if result is None else _texts(result, block.at("content"))
            out.append({"role": "tool", "tool_call_id": block.string("tool_use_id"), "content": text})
        else:
            _only_text(block)
            texts.append(as_string(block.require("text"), block.at("text")))
    if texts or not out:
        out.append({"role": "user", "content": "\n".join(texts)})
    return out


def _assistant(blocks: list[Fields]) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.raw("type")
        if kind == "tool_use":
            arguments = orjson.dumps(as_object(block.require("input"), block.at("input"))).decode()
            function = {"name": as_string(block.require("name"), block.at("name")), "arguments": arguments}
            calls.append({"id": block.string("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(as_string(block.require("thinking"), block.at("thinking")))
        elif kind != "redacted_thinking":
            _only_text(block)
            texts.append(as_string(block.require("text"), block.at("text")))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tools(f: Fields) -> dict[str, Any]:
    tools = []
    for i, item in enumerate(f.array("tools") or []):
        tool = Fields(as_object(item, f"tools[{i}]"), f"tools[{i}]")
        if tool.string("type") not in (None, "custom"):
            continue  # tools that Anthropic's servers run; clients offer them to any server
        function = {"name": tool.require("name"), "parameters": tool.require("input_schema")}
        if tool.raw("description") is not None:
            function["description"] = tool.raw("description")
        if tool.raw("strict") is not None:
            function["strict"] = tool.raw("strict")
        tools.append({"type": "function", "function": function})
    choice = f.object("tool_choice")
    if not tools:
        return {}
    out: dict[str, Any] = {"tools": tools}
    if choice is not None:
        kind = one_of(as_string(choice.require("type"), "tool_choice.type"), "tool_choice.type", (*CHOICES, "tool"))
        out["tool_choice"] = (
            {"type": "function", "function": {"name": choice.require("name")}} if kind == "tool" else CHOICES[kind]
        )
        out["parallel_tool_calls"] = choice.boolean("disable_parallel_tool_use") is not True
    return out


def _output(f: Fields, template: dict[str, Any]) -> dict[str, Any]:
    """The schema that the answer is to have, ``output_config.format`` or the beta's ``output_format``. The effort goes to the
    template, which may know it; that alone does not switch thinking on."""
    config = f.object("output_config") or Fields({}, "output_config")
    effort = config.string("effort")
    if effort is not None:
        template["reasoning_effort"] = one_of(effort, config.at("effort"), EFFORTS)
    form = config.object("format") or f.object("output_format")
    if form is None:
        return {}
    one_of(as_string(form.require("type"), form.at("type")), form.at("type"), ("json_schema",))
    schema = as_object(form.require("schema"), form.at("schema"))
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    }


def _thinking(f: Fields) -> dict[str, Any]:
    """For the template, which ``adaptive`` leaves it to."""
    thinking = f.object("thinking")
    if thinking is None:
        return {}
    path = thinking.at("type")
    kind = one_of(as_string(thinking.require("type"), path), path, ("enabled", "disabled", "adaptive"))
    return {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
