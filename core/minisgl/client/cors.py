"""Which web pages of other origins may call the API (the CORS protocol). Off unless origins are configured."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = b"GET, POST, OPTIONS"
MAX_AGE_S = b"600"
EXPOSED = b"x-request-id, openai-processing-ms, retry-after"
Headers = list[tuple[bytes, bytes]]


class Cors:
    """Answers preflights; ``headers`` are for every other answer. ``origins``: those allowed; "*" allows all."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app = app
        self._all = "*" in origins
        self._origins = {o.rstrip("/").encode() for o in origins}

    def headers(self, scope: Scope) -> Headers:
        origin = dict(scope["headers"]).get(b"origin")
        if origin is None or not self._origins:
            return []
        vary = [] if self._all else [(b"vary", b"origin")]
        if not self._all and origin not in self._origins:
            return vary
        allowed = b"*" if self._all else origin
        return [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", EXPOSED), *vary]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"])
        if not self._origins or scope["method"] != "OPTIONS" or b"access-control-request-method" not in given:
            await self.app(scope, receive, send)
            return
        # Without the origin's own header, which is added if it is allowed, a browser goes no further.
        wanted = given.get(b"access-control-request-headers", b"authorization, content-type")
        head = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", MAX_AGE_S),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": head})
        await send({"type": "http.response.body", "body": b""})
