"""The api process: an EngineClient, the HTTP host and the configured frontends in one event loop.

The port opens at once; until the engine is ready requests are answered 503 ``model_loading``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Iterator

import uvloop

from minisgl.base.errors import Fault
from minisgl.client.client import EngineClient
from minisgl.client.frontend import Frontend, FrontendContext, HttpFrontend
from minisgl.client.http import HttpHost
from minisgl.client.hub import MetricsHub
from minisgl.wire.codec import WireError
from minisgl.wire.messages import Drain, Drained, FaultReport, Lost, Message, Ready, Stop
from minisgl.wire.process import Process
from minisgl.wire.pulse import Pulse

BACKLOG = 2048
FAULT_GRACE_S = 1.0
TURN_S = 0.1


def make_client(process: Process) -> EngineClient:
    workers = [process.to(f"text-{i}") for i in range(process.settings.text.workers)]
    return EngineClient(
        workers,
        process.to("engine"),
        process.settings.limits.queue,
        process.spec.index,
        first_token_s=process.settings.server.request_timeout_s,
        check=lambda request, info: process.hooks.call("check_request", request=request, info=info),
    )


def make_frontends(process: Process, client: EngineClient) -> dict[str, Frontend]:
    """The configured frontends by name. Raises: PluginError, ConfigError."""
    settings, registry = process.settings, process.registry
    return {
        name: registry.create(
            "frontend",
            name,
            settings.options("frontend", name),
            lambda s: FrontendContext(s, client, settings, process.hooks),
        )
        for name in settings.use("frontend")
    }


class Api:
    """Routes messages of the supervisor, the text workers and the engine."""

    def __init__(self, process: Process, client: EngineClient, host: HttpHost) -> None:
        self.process, self.client, self.host = process, client, host
        self.stopping = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self.error: Exception | None = None  # what ended this process
        self._cut = 0

    def failed(self, exc: Exception) -> None:
        """A message could not be handled: the process ends with it."""
        self.error = self.error or exc
        self.stopping.set()

    def take(self, message: Message) -> None:
        if self.host.hub.take(message):
            return
        if isinstance(message, Ready) and message.info is not None:
            self.client.ready(message.info)
            self.process.hooks.call("engine_ready", info=message.info)
            self.process.tell(Ready(self.process.role))
        elif isinstance(message, FaultReport):
            self.client.fail(message.text.partition("\n")[0])
            fault = Fault(message.text, role=message.role, exit=message.exit_code)
            self.process.hooks.call("engine_failed", fault=fault)
            self._start_drain(FAULT_GRACE_S)
        elif isinstance(message, Lost):
            self.client.lose_worker(int(message.role.partition("-")[2]))
        elif isinstance(message, Drain):
            self.client.drain()
            self._start_drain(message.grace_s)
        elif isinstance(message, Stop):
            self.stopping.set()
        else:
            self.client.take(message)

    @property
    def draining(self) -> bool:
        """The server is told to stop, or its engine has failed: what serves may end."""
        return self._draining is not None or self.stopping.is_set()

    def _start_drain(self, grace: float) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(grace))

    async def _drain(self, grace: float) -> None:
        def time_is_up() -> None:
            self._cut = self.client.num_open

        timer = asyncio.get_running_loop().call_later(grace, time_is_up)
        try:
            await self.host.drain(grace)
        finally:
            timer.cancel()
            self.process.tell(Drained(self.process.role, self._cut))


async def serve(process: Process, sock: socket.socket) -> None:
    """Until Stop, or a frontend that fails."""
    client = make_client(process)
    frontends = make_frontends(process, client)
    hub = MetricsHub(client, process.spec.index, process.to_apis(), process.settings.metrics.compat == "vllm")
    host = HttpHost(process.settings, client, frontends, process.hooks, hub)
    api = Api(process, client, host)
    loop = asyncio.get_running_loop()
    process.inbox.watch(loop, api.take, api.failed)
    for message in process.early:
        api.take(message)
    own = [f for f in frontends.values() if not isinstance(f, HttpFrontend)]
    tasks = [loop.create_task(f.serve(), name=f"frontend {type(f).__name__}") for f in own]
    http = loop.create_task(host.serve(sock), name="the HTTP host")
    stop = loop.create_task(api.stopping.wait())
    with watched(process, client):
        try:
            await _until(stop, [*tasks, http], api)
        finally:
            await _shut_down(own, host, [*tasks, http, stop])


@contextlib.contextmanager
def watched(process: Process, client: EngineClient) -> Iterator[None]:
    """An event loop that no longer turns, because something blocks it, is a fault; how late it turns is measured."""
    turned_ns = time.monotonic_ns()
    lag = client.meter.histogram("event_loop_lag_seconds")

    async def turn() -> None:
        nonlocal turned_ns
        while True:
            turned_ns = time.monotonic_ns()
            await asyncio.sleep(TURN_S)
            lag.observe(max(0.0, (time.monotonic_ns() - turned_ns) / 1e9 - TURN_S))

    turning = asyncio.get_running_loop().create_task(turn())
    pulse = Pulse(process.spec)
    pulse.watch(lambda: (-1, turned_ns))
    pulse.start()
    try:
        yield
    finally:
        turning.cancel()
        pulse.stop()


async def _until(stop: asyncio.Task[bool], tasks: list[asyncio.Task[None]], api: Api) -> None:
    """Wait for Stop. Raises: what a task raised; Fault for one that ends by itself, as the HTTP host does after a drain only."""
    waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {stop, *tasks}
    while not stop.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stop}:
            task.result()  # raises what it raised
            if not api.draining:
                raise Fault(f"{task.get_name()} ended by itself, so nobody serves its users", role=api.process.role)
    if api.error is not None:
        raise api.error


async def _shut_down(own: list[Frontend], host: HttpHost, tasks: list[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
    host.close()
    await asyncio.gather(*(f.shutdown(FAULT_GRACE_S) for f in own), return_exceptions=True)
    _, late = await asyncio.wait(tasks, timeout=2 * FAULT_GRACE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def listening_socket(process: Process) -> socket.socket:
    fd = process.spec.listen_fd
    if fd is None:
        raise WireError("the api process got no listening socket from the supervisor", role=process.role)
    return socket.socket(fileno=fd)


def run(process: Process) -> None:
    sock = listening_socket(process)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and end are the supervisor's to tell
    process.wait_go()
    sock.listen(BACKLOG)  # before the others can be told that this process is ready
    gc.freeze()  # what is loaded stays: collections look at requests only
    uvloop.run(serve(process, sock))
