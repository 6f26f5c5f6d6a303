"""Chat messages as clients send them, to messages as chat templates want them."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.api import Fields, RequestError, as_array, as_object, as_string, invalid_type, one_of

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
NOT_TEXT = ("image_url", "input_audio", "file", "video_url", "audio_url", "input_image")


def read_messages(f: Fields) -> tuple[dict[str, Any], ...]:
    """Roles are system, user, assistant or tool, contents are strings, arguments of tool calls are objects.

    Raises: RequestError whose param is the path inside ``messages``.
    """
    items = as_array(f.require("messages"), "messages", min_len=1)
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(items))


def _message(value: Any, path: str) -> dict[str, Any]:
    m = Fields(as_object(value, path), path)
    role = one_of(as_string(m.require("role"), m.at("role")), m.at("role"), ROLES)
    # Templates know neither the newer name of system nor the older one of tool.
    role = {"developer": "system", "function": "tool"}.get(role, role)
    out: dict[str, Any] = {"role": role, "content": ""}
    calls = _tool_calls(m) if role == "assistant" else None
    content = m.raw("content")
    if content is not None:
        out["content"] = _content(content, m.at("content"))
    elif not calls and not (role == "assistant" and m.raw("refusal")):
        m.require("content")
    elif not calls:
        out["content"] = m.string("refusal")
    if calls:
        out["tool_calls"] = calls
    _add_strings(m, out, "name", "tool_call_id")
    if role == "assistant":
        reasoning = m.string("reasoning_content")
        reasoning = m.string("reasoning") if reasoning is None else reasoning
        if reasoning is not None:  # templates use either name
            out["reasoning_content"] = out["reasoning"] = reasoning
    return out


def _add_strings(m: Fields, out: dict[str, Any], *names: str) -> None:
    for name in names:
        value = m.string(name)
        if value is not None:
            out[name] = value


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(path, value, "a string or an array of parts")
    parts = as_array(value, path, min_len=1)
    return "\n".join(_part(part, f"{path}[{j}]") for j, part in enumerate(parts))


def _part(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    part = Fields(as_object(value, path), path)
    kind = as_string(part.require("type"), part.at("type"))
    if kind in NOT_TEXT:
        raise RequestError(
            f"'{part.at('type')}' is '{kind}', but this model takes text only.",
            code="unsupported_value",
            param=part.at("type"),
        )
    field = one_of(kind, part.at("type"), ("text", "refusal"))
    return as_string(part.require(field), part.at(field))


def _tool_calls(m: Fields) -> list[dict[str, Any]] | None:
    calls = m.array("tool_calls")
    if calls is None:
        return None
    return [_tool_call(call, f"{m.at('tool_calls')}[{k}]") for k, call in enumerate(calls)]


def _tool_call(value: Any, path: str) -> dict[str, Any]:
    call = Fields(as_object(value, path), path)
    kind = call.string("type")
    if kind is not None:
        one_of(kind, call.at("type"), ("function",))
    call.require("function")
    function = call.object("function")
    assert function is not None
    name = as_string(function.require("name"), function.at("name"))
    out: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(function)}}
    _add_strings(call, out, "id")
    return out


def _arguments(function: Fields) -> Any:
    """Templates print arguments as JSON themselves, so text that is a JSON object becomes that object."""
    value = function.raw("arguments")
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    text = as_string(value, function.at("arguments"))
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, dict) else text
