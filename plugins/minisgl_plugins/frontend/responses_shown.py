"""What a response repeats of its request."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.api import EngineInfo, bounds

from .openai_request import Call

FORM = ("type", "name", "description", "schema", "strict")
GIVEN = ("user", "safety_identifier", "prompt_cache_key")  # not there unless they were given


def shown(body: dict[str, Any], chat: dict[str, Any], call: Call, info: EngineInfo) -> dict[str, Any]:
    """``chat``: the chat body that was made of ``body``; ``call``: what that was read as. Both are checked, so only fields that
    are known are shown."""
    sampling = call.common.sampling
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    form = {name: value for name, value in (text.get("format") or {"type": "text"}).items() if name in FORM}
    verbosity = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    functions = [tool["function"] for tool in chat.get("tools", ())]
    tools = [
        {"type": "function", "strict": False, **{k: v for k, v in function.items() if v is not None}}
        for function in functions
    ]
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": call.common.max_tokens,
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": call.model,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": False,
        "temperature": _sampled("temperature", sampling.temperature, info),
        "text": _written({"format": form, **verbosity}),
        "tool_choice": _choice(chat.get("tool_choice")),
        "tools": _written(tools),
        "top_logprobs": call.logprobs or 0,
        "top_p": _sampled("top_p", sampling.top_p, info),
        "truncation": "disabled",
        **{name: body[name] for name in GIVEN if body.get(name) is not None},
    }


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice or "auto"
    if choice["type"] == "function":
        return {"type": "function", **choice["function"]}
    allowed = choice["allowed_tools"]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": [_choice(tool) for tool in allowed["tools"]]}


def _written(value: Any) -> orjson.Fragment:
    """As JSON: schemas are written once for all events."""
    return orjson.Fragment(orjson.dumps(value))


def _sampled(name: str, given: float | None, info: EngineInfo) -> float:
    return info.defaults.get(name, bounds.NEUTRAL[name]) if given is None else given
