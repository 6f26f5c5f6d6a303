"""What stands between the socket and the routes, as pure ASGI applications (nothing may hide ``receive`` from handlers)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from minisgl.base.errors import RequestError
from minisgl.client.envelope import clip, internal_error, unavailable
from minisgl.client.exchange import REQUEST_ID, STATE, ClientGone, ErrorShape, HttpState, log
from minisgl.client.keys import api_keys, matches
from minisgl.observe.logs import FIELDS
from minisgl.observe.meter import Meter

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from minisgl.config.schema import ServerSettings

access = logging.getLogger("minisgl.access")
STATUS_CLIENT_GONE = 499  # log only; never sent
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((v for k, v in scope["headers"] if k == name), None)


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


class Envelope:
    """Outermost: gives every request its id and its state, every error the shape of its path, and writes the access log."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerSettings,
        cut: asyncio.Event,
        large: Executor,
        meter: Meter,
        more_headers: Callable[[Scope], list[tuple[bytes, bytes]]],
        errors: Callable[[str], ErrorShape],
    ) -> None:
        """``more_headers``: of every answer, by its request. ``errors``: how they are written, by the path."""
        self.app = app
        self.config = config
        self.cut = cut
        self.large = large
        self.meter = meter
        self.more_headers = more_headers
        self.errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP only, not {scope['type']!r}")
        given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
        state = HttpState(
            request_id=given if REQUEST_ID.fullmatch(given) else new_request_id(),
            cut=self.cut,
            large=self.large,
            header_delay_s=self.config.sse_header_delay_s,
            keep_alive_s=self.config.sse_keep_alive_s,
            errors=self.errors(scope["path"]),
        )
        scope[STATE] = state

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                _finish_head(message, state, self.more_headers(scope))
            elif not message.get("more_body"):
                state.complete = True
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientGone:
            if not state.complete:  # after the last byte a server calls every client gone
                state.status = STATUS_CLIENT_GONE
        except Exception as exc:
            if state.status:  # the answer has begun: all that is left is to break the connection
                raise
            answer = self._answerable(exc, scope, state)
            self.meter.counter("request_rejected", answer.error.code or "none").add()
            await _send_error(send_with_id, answer, state.errors.body)
        finally:
            self._count(scope, state)

    def _count(self, scope: Scope, state: HttpState) -> None:
        took_s = time.monotonic() - state.started
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.meter.counter("http_requests", state.handler, method, str(state.status)).add()
        self.meter.histogram("http_request_duration_seconds", state.handler, method).observe(took_s)
        if self.config.access_log:
            path, client = clip(scope["path"], 200), scope.get("client")
            fields = {
                "method": method,
                "path": path,
                "status": state.status,
                "duration_ms": round(took_s * 1e3, 1),
                "request_id": state.request_id,
                "client": client[0] if client else None,
            }
            line = (method, path, state.status, took_s * 1e3, state.request_id)
            access.info("%s %r %d %.1fms %s", *line, extra={FIELDS: fields})

    def _answerable(self, exc: Exception, scope: Scope, state: HttpState) -> _Answer:
        if isinstance(exc, RequestError):
            return _Answer(exc)
        if isinstance(exc, HTTPException):
            return _from_starlette(exc, scope)
        log.error("request %s failed: %s %r", state.request_id, scope["method"], scope["path"], exc_info=exc)
        return _Answer(internal_error(state.request_id), {"x-should-retry": "false"})


class _Answer:
    def __init__(self, error: RequestError, headers: dict[str, str] | None = None) -> None:
        self.error = error
        self.headers = headers or {}
        if error.status in (429, 503):
            self.headers["retry-after"] = str(error.retry_after or 1)
        if error.status == 401:
            self.headers["www-authenticate"] = "Bearer"


def _finish_head(message: Message, state: HttpState, more: list[tuple[bytes, bytes]]) -> None:
    state.status = message["status"]
    headers = MutableHeaders(raw=list(message.get("headers", ())))
    headers["x-request-id"] = state.request_id
    if not headers.get("content-type", "").startswith("text/event-stream"):
        headers["openai-processing-ms"] = str(int((time.monotonic() - state.started) * 1e3))
    message["headers"] = [*headers.raw, *more]


async def _send_error(send: Send, answer: _Answer, body_of: Callable[[RequestError], bytes]) -> None:
    body = body_of(answer.error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
    raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": answer.error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _from_starlette(exc: HTTPException, scope: Scope) -> _Answer:
    """Errors that Starlette's router and a plugin's own Starlette handlers raise."""
    headers = dict(exc.headers or {})
    url = f"{scope['method']} {clip(scope['path'], 200)}"
    if exc.status_code == 404:
        return _Answer(RequestError(f"Invalid URL ({url})", status=404, code="unknown_url"), headers)
    if exc.status_code == 405:
        allow = ", ".join(sorted(a.strip() for a in headers.pop("Allow", "").split(",") if a.strip()))
        error = RequestError(f"Not allowed: {url}; allowed: {allow}", status=405, code="method_not_allowed")
        return _Answer(error, {**headers, "allow": allow})
    code = "request_too_large" if exc.status_code == 413 else None
    return _Answer(RequestError(str(exc.detail), status=exc.status_code, code=code), headers)


class Gate:
    """Counts running requests; refuses new ones once ``closed``, except those to the paths in ``always``. ``why()`` is the
    error code of a refusal."""

    def __init__(self, app: ASGIApp, always: Collection[str], why: Callable[[], str]) -> None:
        self.app = app
        self.always = always
        self.why = why
        self.closed = False
        self.active = 0
        self.empty = asyncio.Event()
        self.empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self.always:
            return await self.app(scope, receive, send)
        if self.closed:
            raise unavailable(self.why())
        self.active += 1
        self.empty.clear()
        try:
            await self.app(scope, receive, send)
        finally:
            self.active -= 1
            if self.active == 0:
                self.empty.set()


class Auth:
    """Bearer keys, compared in constant time. ``admin_paths`` need the admin key, the paths in ``open_paths`` none, all
    others the API key if there is one. OPTIONS carries no key by the CORS protocol and is let through."""

    def __init__(
        self, app: ASGIApp, config: ServerSettings, open_paths: Collection[str], admin_paths: Collection[str]
    ) -> None:
        """Raises: ConfigError for a file of keys that cannot be used."""
        self.app = app
        self.api_keys = api_keys(config)
        admin = config.admin_key.get_secret_value().encode()
        self.admin_keys = (admin,) if admin else ()
        self.open_paths = open_paths
        self.admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] != "OPTIONS" and path not in self.open_paths:
            keys = self.admin_keys if path in self.admin_paths else self.api_keys
            if keys:
                _check_key(_header(scope, b"authorization"), _header(scope, b"x-api-key"), keys)
        await self.app(scope, receive, send)


def _check_key(header: bytes | None, alone: bytes | None, keys: tuple[bytes, ...]) -> None:
    """``alone``: the key in the header that Anthropic's clients send."""
    scheme, _, given = (header or b"").partition(b" ")
    if alone is not None and not header:
        scheme, given = b"bearer", alone
    if scheme.lower() != b"bearer":
        why = "No API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    elif not matches(given.strip(), keys):
        why = "The API key is not the right one for this route."
    else:
        return
    raise RequestError(why, status=401, code="invalid_api_key")


class BodyLimit:
    """413 for a body over ``limit`` bytes: by Content-Length before anything is read, else by counting."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = _header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self.limit:
            raise self._too_large()
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.limit:
                raise self._too_large()
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> RequestError:
        message = f"The body is larger than this server takes ({self.limit} bytes)."
        return RequestError(message, status=413, code="request_too_large")
