"""One HTTP request and its answer, as handlers of HTTP frontends see it.

A handler is ``async def handler(x: Exchange) -> None``. It raises RequestError for anything it refuses; before the first
byte that becomes a JSON answer with the right status, after it an error frame of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from minisgl.base.errors import RequestError
from minisgl.client.envelope import error_body, internal_error, unavailable
from minisgl.client.notes import Schema
from minisgl.client.openapi import ERROR, About
from minisgl.client.parse import parse

if TYPE_CHECKING:
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")
log = logging.getLogger("minisgl.http")

STATE = "minisgl.http"  # key of HttpState in an ASGI scope
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LARGE_BODY = 256 * 1024  # bytes; smaller ones take the event loop 1 to 10 ms
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
LAST_WORDS_S = 1.0  # how long an error frame may wait for a client that does not read


class ClientGone(Exception):
    """The client closed the connection; nothing is sent to it any more."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API writes errors: ``body`` of an answer, ``frame`` of a stream, which it ends with ``done``. ``schema``: of the
    bodies."""

    body: Callable[[RequestError], bytes] = error_body
    frame: Callable[[RequestError], bytes] = lambda error: b"data: " + error_body(error) + b"\n\n"
    done: bytes = DONE
    schema: Schema = field(default_factory=lambda: ERROR)


@dataclass(slots=True)
class HttpState:
    """What the host keeps for one request. ``large``: reads large bodies. ``errors``: those of the path's frontend; a handler may
    set its own. ``cut`` is set when a shutdown does not wait for it any longer."""

    request_id: str
    cut: asyncio.Event
    large: Executor
    header_delay_s: float
    keep_alive_s: float
    started: float = field(default_factory=time.monotonic)  # seconds
    status: int = 0
    complete: bool = False  # the last byte is sent
    errors: ErrorShape = ErrorShape()
    handler: str = "none"  # the route's path as it is declared


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.state: HttpState = scope[STATE]

    @property
    def request_id(self) -> str:
        """Goes out as ``x-request-id``; assign it before the first byte is sent."""
        return self.state.request_id

    @request_id.setter
    def request_id(self, value: str) -> None:
        self.state.request_id = value

    @property
    def path_params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    def header(self, name: bytes) -> bytes | None:
        """First value of the header ``name`` (lower case)."""
        return next((v for k, v in self.scope["headers"] if k == name), None)

    async def body(self) -> bytes:
        """The whole body. Raises: ClientGone; RequestError 413 if it is over the limit."""
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises: RequestError 415 for another media type, 400 invalid_json."""
        return await self.read(lambda body: body)

    async def read(self, reader: Callable[[dict[str, Any]], T]) -> T:
        """What ``reader`` makes of the body, a JSON object. A large one is read in a thread, one at a time, so that the event
        loop goes on with other requests: ``reader`` may only look at what does not change.

        Raises: RequestError 415 for another media type, 400 invalid_json; what ``reader`` raises.
        """
        _check_media_type(self.header(b"content-type"), self.header(b"content-encoding"))
        data = await self.body()
        if len(data) < LARGE_BODY:
            return reader(parse(data))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.state.large, _read_large, data, reader)

    async def respond(
        self,
        body: bytes,
        status: int = 200,
        media_type: bytes | None = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send the whole answer."""
        head = [(b"content-length", str(len(body)).encode()), *headers]
        if media_type is not None:
            head.append((b"content-type", media_type))
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, value: Any, status: int = 200) -> None:
        await self.respond(orjson.dumps(value), status)

    async def attached(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` while the client stays connected; it is cancelled within one turn of the event loop when the client
        leaves (ASGI servers do not cancel handlers by themselves). Only after the body was read.

        Raises: ClientGone; RequestError 503 server_draining when a shutdown cuts the request; what ``work`` raises.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        cut = asyncio.ensure_future(self.state.cut.wait())
        try:
            await asyncio.wait((task, gone, cut), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone if gone.done() else unavailable("server_draining")
        finally:
            for t in (task, gone, cut):
                t.cancel()
            await asyncio.gather(task, gone, cut, return_exceptions=True)

    async def stream(
        self, produce: Callable[[EventStream], Awaitable[None]], prologue: Callable[[], bytes] = bytes
    ) -> None:
        """Answer with server-sent events that ``produce`` writes. Status 200 and ``prologue()`` (whole frames) go out with its
        first frame or after the header delay, so what it raises before keeps its status; later it becomes one error frame."""
        events = EventStream(self._send, self.state, prologue)
        try:
            await self.attached(events.run(produce))
        except Exception as exc:
            if isinstance(exc, ClientGone) or not events.started:
                raise
            await events.fail(self._answerable(exc))

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _answerable(self, exc: Exception) -> RequestError:
        if isinstance(exc, RequestError):
            return exc
        log.error("request %s failed in its stream", self.request_id, exc_info=exc)
        return internal_error(self.request_id)


class EventStream:
    """Frames of a server-sent-event answer, and the comments that keep it alive when idle."""

    def __init__(self, send: Send, state: HttpState, prologue: Callable[[], bytes]) -> None:
        self._send = send
        self._state = state
        self._prologue = prologue
        self._lock = asyncio.Lock()  # only one may send the head
        self._finished = False
        self._last_ns = -(1 << 62)  # of the last frame; long ago
        self.started = False

    async def send(self, frames: bytes) -> None:
        """Send whole frames (``data: ...`` and an empty line); waits while the client does not read."""
        self._last_ns = time.monotonic_ns()
        if not self.started:
            await self._first(frames)
        else:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _first(self, frames: bytes) -> None:
        async with self._lock:
            if not self.started:
                frames = await self._start() + frames
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def finish(self, frames: bytes = b"") -> None:
        """Send the last frames and what ends a stream of this API, ``[DONE]``, and end the answer."""
        async with self._lock:
            self._finished = True
            if not self.started:
                frames = await self._start() + frames
            await self._send({"type": "http.response.body", "body": frames + self._state.errors.done})

    async def fail(self, error: RequestError) -> None:
        """One error frame and the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.finish(self._state.errors.frame(error))

    async def run(self, produce: Callable[[EventStream], Awaitable[None]]) -> None:
        idle = asyncio.ensure_future(self._idle())
        try:
            await produce(self)
        finally:
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)

    async def _start(self) -> bytes:
        """Under the lock. Returns: what goes before the first frame."""
        await self._send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        self.started = True
        return self._prologue()

    async def _idle(self) -> None:
        """After the header delay a comment sends the head if nothing else has; later ones fill the silences."""
        await asyncio.sleep(self._state.header_delay_s)
        period_s = self._state.keep_alive_s
        while True:
            quiet_s = (time.monotonic_ns() - self._last_ns) * 1e-9
            if self._finished:
                return
            if quiet_s >= period_s:
                await self.send(KEEP_ALIVE)
                quiet_s = 0.0
            await asyncio.sleep(period_s - quiet_s)


class _Endpoint:
    """A handler as an ASGI application (Starlette takes an object that is no function for one)."""

    def __init__(self, handler: Callable[[Exchange], Awaitable[None]], about: About | None) -> None:
        self.handler = handler
        self.about = about

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.handler(Exchange(scope, receive, send))


def route(method: str, path: str, handler: Callable[[Exchange], Awaitable[None]], about: About | None = None) -> Route:
    """A Starlette route for ``handler``. ``path`` may have parameters: ``/v1/models/{id:path}``. ``about``: what the published
    description says of it."""
    from starlette.routing import Route

    return Route(path, _Endpoint(handler, about), methods=[method], name=getattr(handler, "__name__", path))


def _read_large(data: bytes, reader: Callable[[dict[str, Any]], T]) -> T:
    """A pass of the garbage collector over hundreds of thousands of values, all in use, would stand every thread still."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return reader(parse(data))
    finally:
        if collects:
            gc.enable()


def _check_media_type(content_type: bytes | None, encoding: bytes | None) -> None:
    kind, _, parameters = (content_type or b"").decode("latin-1").partition(";")
    charset = re.search(r'charset\s*=\s*"?([^\s;"]+)', parameters, re.IGNORECASE)
    if kind.strip().lower() != "application/json":
        said = "is missing" if not content_type else "is another one"
        raise RequestError(
            f"The Content-Type must be application/json; it {said}.", status=415, code="unsupported_media_type"
        )
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise RequestError("The charset must be utf-8.", status=415, code="unsupported_media_type")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise RequestError(
            "A Content-Encoding is not supported; send the body as it is.", status=415, code="unsupported_media_type"
        )
