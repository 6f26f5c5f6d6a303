"""The HTTP host: owns socket, keys, limits, request ids and errors, and mounts the routes of HTTP frontends.

Envelope (request id, errors, access log, counts) > Cors (preflights) > Gate (drain) > Auth > BodyLimit > routes
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
from starlette.routing import BaseRoute, Router

from minisgl.base.errors import ConfigError, RequestError
from minisgl.client.cors import Cors
from minisgl.client.envelope import clip, unavailable
from minisgl.client.exchange import STATE, ErrorShape, Exchange, route
from minisgl.client.exposition import CONTENT_TYPE
from minisgl.client.frontend import Frontend, HttpFrontend
from minisgl.client.hub import MetricsHub
from minisgl.client.middleware import Auth, BodyLimit, Envelope, Gate
from minisgl.client.openapi import JSON, OBJECT, STRING, TEXT, About, Description, Keys, record

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from minisgl.client.client import EngineClient
    from minisgl.config.schema import Settings
    from minisgl.plugin.hooks import Hooks

PROBES = frozenset({"/health", "/ready", "/ping", "/version"})  # need no key and are answered while draining
METRICS = frozenset({"/metrics"})
ADMIN = frozenset({"/flush_cache", "/stats"})
KEEP_ALIVE_S = 75  # an idle connection outlives those of proxies and client pools, which then never meet a closed one
CUT_S = 2.0  # after the drain time, how long requests that are cut may take to say so


def package_version() -> str:
    try:
        return version("minisgl")
    except PackageNotFoundError:
        return "0"


class HttpHost:
    """``frontends``: the configured frontends by name; those that are no HttpFrontend are left to others.

    ``app`` is the ASGI application. Raises: ConfigError if two frontends claim one path.
    """

    def __init__(
        self,
        config: Settings,
        client: EngineClient,
        frontends: Mapping[str, Frontend],
        hooks: Hooks,
        hub: MetricsHub | None = None,
    ) -> None:
        """``hub``: knows the metrics; by default of this process alone."""
        self.hub = hub or MetricsHub(client, vllm=config.metrics.compat == "vllm")
        self.config = config
        self.client = client
        self.hooks = hooks
        self.frontends = frontends
        self._cut = asyncio.Event()
        self._large = ThreadPoolExecutor(1, "large-body")
        self._server: uvicorn.Server | None = None
        self._shapes: list[tuple[str, ErrorShape]] = []  # of paths whose errors are not written as elsewhere
        admin = ADMIN if config.server.admin_key.get_secret_value() else frozenset[str]()
        self._all = self._routes(bool(admin))
        router = Router(self._all, redirect_slashes=False, default=_unknown_url)
        limited = BodyLimit(router, config.server.max_request_body)
        free = PROBES | METRICS if config.metrics.open else PROBES
        auth = Auth(limited, config.server, free, admin)
        self._keys = Keys(bool(auth.api_keys), free, admin)
        self._gate = Gate(auth, PROBES | METRICS, self._why_closed)
        cors = Cors(self._gate, config.server.cors_origins)
        envelope = Envelope(cors, config.server, self._cut, self._large, client.meter, cors.headers, self._errors)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["app"] = self  # so that Starlette raises its errors instead of answering in plain text
            await envelope(scope, receive, send)

        self.app: ASGIApp = app

    async def serve(self, sock: socket.socket) -> None:
        """Serve on the listening ``sock`` until ``drain`` or ``close``."""
        server = self.config.server
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # Connections inherit it. Without it a small frame waits for the client's delayed ACK: 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            self.app,
            loop="none",  # this runs in one that is chosen already
            http="httptools",
            ssl_certfile=server.tls_cert,
            ssl_keyfile=server.tls_key,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        try:
            await self._server.serve(sockets=[sock])
        finally:
            self._large.shutdown(wait=False)

    async def drain(self, grace: float | None = None) -> None:
        """Refuse new requests (503 server_draining), give running ones ``grace`` seconds (default: server.drain_s), end the
        rest with an error, and make ``serve`` return. Idempotent."""
        self._gate.closed = True
        for seconds in (self.config.server.drain_s if grace is None else grace, CUT_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.empty.wait(), seconds)
            if self._gate.active == 0:
                break
            self._cut.set()
        self.close()

    def close(self) -> None:
        """Make ``serve`` return soon, without waiting for requests."""
        if self._server is not None:
            self._server.should_exit = True

    # ------------------------------------------------------------------------------------------------------------ routes

    def _routes(self, admin: bool) -> list[BaseRoute]:
        owned: list[tuple[str, BaseRoute]] = [("the HTTP host", r) for r in self._own_routes(admin)]
        for name, frontend in self.frontends.items():
            if isinstance(frontend, HttpFrontend):
                routes = self._frontend_routes(name, frontend)
                owned += [(f"frontend {name!r}", r) for r in routes]
                if frontend.errors is not HttpFrontend.errors:
                    self._shapes += [(str(getattr(r, "path", r)).partition("/{")[0], frontend.errors) for r in routes]
        _check_claims(owned)
        for _, r in owned:
            _name_handler(r)
        return [r for _, r in owned]

    def _frontend_routes(self, name: str, frontend: HttpFrontend) -> list[BaseRoute]:
        """Its routes and those that hooks add for it, behind the middleware that hooks add for it."""
        routes = list(frontend.routes())
        wraps: list[Any] = []
        self.hooks.call("http_routes", frontend=name, add=routes.append)
        self.hooks.call("http_middleware", frontend=name, add=wraps.append)
        for r in routes:
            for wrap in wraps:
                if not hasattr(r, "app"):
                    raise ConfigError(f"hook http_middleware cannot wrap {r!r} of frontend {name!r}: it has no 'app'")
                r.app = wrap(r.app)
        return routes

    def _own_routes(self, admin: bool) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            route("GET", "/health", self._health, About("Whether the engine lives.")),
            route("GET", "/ready", self._ready, About("Whether requests are taken.")),
            route("GET", "/ping", self._ping, About("Whether the HTTP server lives.")),
            route("GET", "/version", self._version, About("The version.", {JSON: record({"version": STRING})})),
            route("GET", "/metrics", self._metrics, About("Metrics for Prometheus.", {TEXT: STRING})),
            route("GET", "/openapi.json", self._openapi, About("This description.", {JSON: OBJECT})),
        ]
        if admin:
            flush, stats = (
                About("Empty the prefix cache.", {JSON: OBJECT}),
                About("The engine's counts.", {JSON: OBJECT}),
            )
            routes += [
                route("POST", "/flush_cache", self._flush_cache, flush),
                route("GET", "/stats", self._stats, stats),
            ]
        return routes

    def _errors(self, path: str) -> ErrorShape:
        """How errors are written at ``path``: as the frontend does it that has this path or one above it."""
        for root, shape in self._shapes:
            if path == root or path.startswith(f"{root}/"):
                return shape
        return HttpFrontend.errors

    def _why_closed(self) -> str:
        """A server is drained because it is told to stop, or because its engine has failed."""
        return "engine_dead" if self.client.healthy() == "engine_dead" else "server_draining"

    async def _health(self, x: Exchange) -> None:
        """Alive: loading and failed engines are not, a draining server is."""
        code = self.client.healthy()
        if code is not None and code != "server_draining":
            raise unavailable(code)
        await x.respond(b"", media_type=None)

    async def _ready(self, x: Exchange) -> None:
        code = self._why_closed() if self._gate.closed else self.client.healthy()
        if code is not None:
            raise unavailable(code)
        await x.respond(b"", media_type=None)

    async def _ping(self, x: Exchange) -> None:
        await x.respond(b"", media_type=None)

    async def _version(self, x: Exchange) -> None:
        await x.respond_json({"version": package_version()})

    async def _metrics(self, x: Exchange) -> None:
        await x.respond(await self.hub.render(package_version()), media_type=CONTENT_TYPE)

    async def _openapi(self, x: Exchange) -> None:
        await x.respond(self.description)

    @cached_property
    def description(self) -> bytes:
        """The OpenAPI description of all routes, as JSON."""
        made = Description(self._all, package_version(), self._keys, lambda path: self._errors(path).schema)
        return orjson.dumps(made.document)

    async def _flush_cache(self, x: Exchange) -> None:
        await x.respond_json(await self._control("flush_cache"))

    async def _stats(self, x: Exchange) -> None:
        await x.respond_json(await self._control("stats"))

    async def _control(self, op: str) -> Any:
        code = self.client.healthy()
        if code is not None:
            raise unavailable(code)
        return await self.client.control(op)


class _Server(uvicorn.Server):  # type: ignore[misc]  # uvicorn is untyped here
    """Signals belong to the process that runs the host."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _unknown_url(scope: Scope, receive: Receive, send: Send) -> None:
    url = f"{scope['method']} {clip(scope['path'], 200)}"
    raise RequestError(f"Invalid URL ({url})", status=404, code="unknown_url")


def _name_handler(r: Any) -> None:
    """Have the route say its path, as it is declared, in the request's state."""
    inner = getattr(r, "app", None)
    if inner is None:
        return

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        scope[STATE].handler = r.path
        await inner(scope, receive, send)

    r.app = named


def _check_claims(owned: list[tuple[str, BaseRoute]]) -> None:
    """One owner for each path; within one owner, one route for each method of a path."""
    claims: dict[str, tuple[str, set[str]]] = {}
    for owner, r in owned:
        path = re.sub(r"{[^}]*}", "{}", str(getattr(r, "path", r)))
        methods = set(getattr(r, "methods", None) or {"*"}) - {"HEAD"}
        first, taken = claims.setdefault(path, (owner, set()))
        if first != owner or taken & methods:
            raise ConfigError(
                f"path {path!r} is claimed by {first} and by {owner}; a path has one owner. "
                "Leave one of them out of frontend.use."
            )
        taken |= methods
