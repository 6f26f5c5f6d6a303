"""The one shape of an error on the wire: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

import orjson

from minisgl.base.errors import RequestError

MAX_MESSAGE_BYTES = 1024
MAX_PARAM_BYTES = 200

# What EngineClient.healthy() can say, in words.
UNAVAILABLE = {
    "model_loading": "The model is still being loaded; try again in a few seconds.",
    "engine_dead": "The engine has failed and does not take requests; the server has to be restarted.",
    "server_draining": "The server is shutting down and takes no new requests.",
}


def unavailable(code: str) -> RequestError:
    """503 for a server that cannot take a request now."""
    return RequestError(
        UNAVAILABLE.get(code, "The server cannot take requests now."),
        status=503,
        code=code,
        retry_after=1 if code != "engine_dead" else 5,
    )


def clip(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` bytes of valid UTF-8."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - 3].decode("utf-8", "ignore") + "..."


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_object(error: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": clip(error.message, MAX_MESSAGE_BYTES),
            "type": error_type(error.status),
            "param": None if error.param is None else clip(error.param, MAX_PARAM_BYTES),
            "code": error.code,
        }
    }


def error_body(error: RequestError) -> bytes:
    return orjson.dumps(error_object(error))


def internal_error(request_id: str) -> RequestError:
    """500 for an exception that nobody expected; its text goes to the log only."""
    return RequestError(
        f"The server failed on this request; its log says why under request id {request_id}.",
        status=500,
        code="internal_error",
    )
