"""Chat messages as clients send them, to messages as chat templates want them."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.api import Fields, Value, too_deep

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
NOT_TEXT = ("image_url", "input_audio", "file", "video_url", "audio_url", "input_image", "input_file")
TEXTS = ("text", "refusal", "input_text", "output_text")  # the last two are names of the responses API


def read_messages(f: Fields) -> tuple[dict[str, Any], ...]:
    """Roles are system, user, assistant or tool, contents are strings, arguments of tool calls are objects.

    Raises: RequestError whose param is the path inside ``messages``.
    """
    return tuple(_message(item.object()) for item in f.need("messages").items(min_len=1))


def _message(m: Fields) -> dict[str, Any]:
    role = m.need("role").one_of(ROLES)
    # Templates know neither the newer name of system nor the older one of tool.
    role = {"developer": "system", "function": "tool"}.get(role, role)
    out: dict[str, Any] = {"role": role, "content": ""}
    calls = _tool_calls(m) if role == "assistant" else None
    content = m.value("content")
    if content is not None:
        out["content"] = read_content(content)
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


def read_content(content: Value) -> str:
    """A string, or an array of parts."""
    if isinstance(content.raw, str):
        return content.string()
    if not isinstance(content.raw, list):
        raise content.wrong_type("a string or an array of parts")
    return "\n".join(_part(part) for part in content.items(min_len=1))


def _part(part: Value) -> str:
    if isinstance(part.raw, str):
        return part.string()
    fields = part.object()
    kind = fields.need("type")
    if kind.raw in NOT_TEXT:
        raise kind.refused(f"is '{kind.raw}', but this model takes text only", "unsupported_value")
    return fields.need("refusal" if kind.one_of(TEXTS) == "refusal" else "text").string()


def _tool_calls(m: Fields) -> list[dict[str, Any]] | None:
    calls = [_tool_call(call.object()) for call in m.items("tool_calls")]
    return calls or None


def _tool_call(call: Fields) -> dict[str, Any]:
    call.one_of("type", ("function",))
    function = call.need("function").object()
    name = function.need("name").string()
    out: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(function)}}
    _add_strings(call, out, "id")
    return out


def _arguments(function: Fields) -> Any:
    """Templates print arguments as JSON themselves, so text that is a JSON object becomes that object."""
    value = function.value("arguments")
    if value is None:
        return {}
    if isinstance(value.raw, dict):
        return value.object().body
    text = value.string()
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, dict) and not too_deep(parsed) else text
