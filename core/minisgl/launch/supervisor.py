"""The supervisor: starts the processes of a server, watches them, and ends them. It does no other work and loads no torch.

start -> HELLO of each, its plugins compared -> GO -> engine READY -> text workers READY -> api READY: serving
a process that dies, or reports a fault: all end; exit code 70, or 78 if configuration or a plugin is to blame
a text worker that dies while serving: its requests end with an error, and it is started again
SIGTERM, Ctrl+C: drain, then all end with exit code 0; a second one kills at once, exit code 130
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import zmq

from minisgl.base.errors import EXIT_FAULT, Fault, MiniSGLError, PluginError
from minisgl.base.types import EngineInfo, LocalModel
from minisgl.client.keys import api_keys
from minisgl.client.progress import progress_bars
from minisgl.client.tls import check_tls
from minisgl.config.load import settings_to_json
from minisgl.config.schema import Settings
from minisgl.engine.build import architecture
from minisgl.launch.children import Children
from minisgl.launch.process import Child
from minisgl.launch.start import bind_all, make_lock, ready_line, url
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import Registry
from minisgl.text.create import chat_template
from minisgl.text.resolve import resolve_model
from minisgl.wire.messages import Beat, Drain, Drained, FaultReport, Go, Hello, Lost, Message, Progress, Ready, Stop
from minisgl.wire.process import SUPERVISOR, Spec, Stopped
from minisgl.wire.sockets import Inbox, RuntimeDir, address

log = logging.getLogger("minisgl.launch")
HELLO_S = 120.0  # from start to HELLO: Python and the plugins' modules
READY_S = 120.0  # from the engine's READY to the others'
LOAD_SILENCE_S = 3600.0  # a load that tells no progress for so long hangs
BEAT_LOST_S = 30.0
STOP_S = 3.0  # from STOP to SIGKILL
RESOLVER_S = 1.0  # from the end of the server to that of a download or conversion
LAST_WORDS_S = 0.2  # from the end of a process to the arrival of what it reported
FAULT_WAIT_S = 4.0  # how long the api may take to tell open requests of a fault
POLL_MS = 500
EXIT_INTERRUPTED = 130


class ServerFailed(MiniSGLError):
    """A process of the server failed; ``exit_code`` says whose fault it is."""

    def __init__(self, text: str, role: str, exit_code: int) -> None:
        super().__init__(text)
        self.role = role
        self.exit_code = exit_code


class _Interrupted(Exception):
    """A second Ctrl+C."""


class Supervisor:
    """One server. ``run`` returns its exit code. Use it in the main thread."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        hooks: Hooks,
        announce: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        """``announce`` gets the line that says that the server is ready. Raises: PluginError, ConfigError."""
        self.settings, self.registry, self.hooks = settings, registry, hooks
        self._announce = announce
        self.lock = make_lock(settings, registry, hooks)
        self._needs_weights: bool = registry.load("executor", settings.use("executor")[0]).needs_weights
        chat_template(settings)  # files that cannot be used are known before anything starts
        api_keys(settings.server)
        check_tls(settings.server)
        self._go_with_model: Go | None = None  # once the model is there
        self._info: EngineInfo | None = None
        self._events: queue.SimpleQueue[Child | LocalModel | BaseException] = queue.SimpleQueue()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)[::-1]
        self._signals: list[int] = []
        self._started = self._moved = self._beat_at = time.monotonic()
        self._serving = False  # it was announced
        self._drained: set[str] = set()
        self._over = threading.Event()
        self._resolver = threading.Thread(target=self._resolve, name="resolver", daemon=True)
        self._progress: Callable[[str, int, int], None] = lambda what, done, total: None

    # ------------------------------------------------------------------------------------------------------------- life

    def run(self) -> int:
        """Serve until a signal. Raises: MiniSGLError when the server cannot start or has failed."""
        server = self.settings.server
        with contextlib.ExitStack() as stack:
            socks = bind_all(server.host, server.port, server.api_workers)
            for sock in socks:
                stack.callback(sock.close)
            stack.enter_context(self._handling_signals())
            self._folder = RuntimeDir()
            stack.callback(self._folder.remove)
            self._context: zmq.Context[Any] = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            self._inbox = Inbox(self._context, address(self._folder.path, SUPERVISOR))
            self._children = Children(
                server.api_workers, self.settings.text.workers, self._context, lambda r: address(self._folder.path, r),
                self._spec, self._post, self._forward,
            )  # fmt: skip
            stack.callback(self._kill_all)
            self._bars = stack.enter_context(contextlib.ExitStack())
            self._progress = self._bars.enter_context(progress_bars(self.settings.log.level in ("debug", "info")))
            return self._serve(socks)

    def _serve(self, socks: Sequence[socket.socket]) -> int:
        self.hooks.call("process_started", role=SUPERVISOR, rank=0)
        self._url = url(self.settings.server, socks[0])
        log.info("listening on %s, loading %s", self._url, self.settings.model.path)
        try:
            listening = dict(zip(self._children.api, socks, strict=True))
            for role in self._children.roles:
                self._children.start(role, listening.get(role))
            self._resolver.start()
            while not self._signals:
                self._turn()
                self._check_clock()
            return self._drain()
        except _Interrupted:
            log.warning("interrupted again: all processes are killed")
            return EXIT_INTERRUPTED
        except MiniSGLError as exc:
            with contextlib.suppress(_Interrupted):
                self._end_with_fault(exc)
            raise
        finally:
            self._over.set()
            self._kill_all()
            if self._resolver.ident is not None:
                self._resolver.join(RESOLVER_S)
            self.hooks.call("process_stopping", role=SUPERVISOR, rank=0)

    def _spec(self, role: str, listen_fd: int | None) -> Spec:
        return Spec(
            role, self.lock.to_json(), self.lock.fingerprint, settings_to_json(self.settings), self._folder.path, os.getpid(),
            listen_fd,
        )  # fmt: skip

    def _resolve(self) -> None:
        """In a thread of its own: it may download for long."""
        try:
            self._post(
                resolve_model(
                    self.settings, self.registry, self.hooks, self._resolver_progress, weights=self._needs_weights
                )
            )
        except BaseException as exc:
            self._post(exc)

    def _resolver_progress(self, what: str, done: int, total: int) -> None:
        """Progress of the resolver. When the server ends it raises, so that the processes that download or convert end too."""
        if self._over.is_set():
            raise Stopped
        self._draw(what, done, total)

    def _draw(self, what: str, done: int, total: int) -> None:
        self._moved = time.monotonic()
        self._progress(what, done, total)

    def _forward(self, piece: bytes) -> None:
        """A child's output goes to our standard error."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()

    # ----------------------------------------------------------------------------------------------------------- events

    def _post(self, event: Child | LocalModel | BaseException) -> None:
        self._events.put(event)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake, b"x")

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)
            self._ring()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _turn(self, timeout_ms: int = POLL_MS) -> None:
        """Wait for messages, ended children and signals, and handle them. Raises: what they mean."""
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        poller.poll(timeout_ms)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        for message in self._inbox.receive(0):
            self._take(message)
        with contextlib.suppress(queue.Empty):
            while True:
                self._happened(self._events.get_nowait())

    def _happened(self, event: Child | LocalModel | BaseException) -> None:
        if isinstance(event, Child):
            until = time.monotonic() + LAST_WORDS_S
            while time.monotonic() < until:  # what it said before it ended may come after what others say
                for message in self._inbox.receive(20):
                    self._take(message)
            self._child_ended(event)
            return
        if isinstance(event, MiniSGLError):
            raise event
        if isinstance(event, BaseException):
            raise Fault(f"the model could not be made available: {type(event).__name__}: {event}") from event
        self._go_with_model = Go(event, self._lock_of(event))
        for role in self._children.greeted:
            self._go(role)

    def _child_ended(self, child: Child) -> None:
        """Raises: ServerFailed, unless it is a text worker that can be started again."""
        if not (self._serving and not self._signals and self._children.may_restart(child.role)):
            raise ServerFailed(child.obituary(), child.role, EXIT_FAULT)
        log.error("%s", child.obituary(so=", so it is started again and its requests end with an error"))
        self._children.send(self._children.api, Lost(child.role))
        self._moved = time.monotonic()
        self._children.restart(child.role)

    # --------------------------------------------------------------------------------------------------------- messages

    def _take(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Progress):
            self._draw(message.what, message.done, message.total)
        elif isinstance(message, Beat):
            self._beat_at = time.monotonic()
        elif isinstance(message, Ready):
            self._became_ready(message)
        elif isinstance(message, FaultReport):
            if self._serving and message.role in self._children.text:  # what its end means is decided when it has ended
                log.error("%s", message.text)
                return
            raise ServerFailed(message.text, message.role, message.exit_code)
        elif isinstance(message, Drained):
            self._drained.add(message.role)
            if message.open:
                log.warning("requests that were cut off: %d", message.open)

    def _greet(self, hello: Hello) -> None:
        """Raises: PluginError if the child's plugins are not ours."""
        if hello.fingerprint != self.lock.fingerprint:
            self.lock.check(PluginLock.from_json(hello.lock), f"{hello.role} (host {hello.host}, pid {hello.pid})")
            raise PluginError(
                f"{hello.role} has plugin fingerprint {hello.fingerprint}, expected {self.lock.fingerprint}"
            )
        self._children.greeted.add(hello.role)
        self._go(hello.role)
        if hello.role in self._children.restarted:  # the others got it when the engine was ready
            self._children.send([hello.role], Ready(hello.role, self._info))

    def _go(self, role: str) -> None:
        """The api starts at once, so that the port opens; the others need the model."""
        if role in self._children.api:
            if role not in self._children.ready:
                self._children.send([role], Go())
        elif self._go_with_model is not None:
            self._children.send([role], self._go_with_model)

    def _lock_of(self, model: LocalModel) -> str:
        """What the model selects beyond the settings. Raises: PluginError, ModelError if no plugin has its architecture."""
        if not self._needs_weights:  # a device without a model loads no model plugin
            return ""
        lock = self.registry.lock([("model", architecture(self.registry, model))])
        lock.require_importable("the engine process")
        return lock.to_json()

    def _became_ready(self, ready: Ready) -> None:
        children = self._children
        children.ready.add(ready.role)
        children.restarted.discard(ready.role)
        self._moved = self._beat_at = time.monotonic()
        if ready.info is not None:
            self._info = ready.info
        if self._info is None or self._serving:
            return
        relay = Ready(ready.role, self._info)
        if ready.role == "engine":
            children.send(children.text, relay)
        elif children.ready == {"engine", *children.text}:
            children.send(children.api, relay)
        elif children.ready == set(children.roles):
            self._serving = True
            self._bars.close()
            with contextlib.suppress(OSError):  # nobody has to listen
                self._announce(ready_line(self._url, self._info, time.monotonic() - self._started))

    # ------------------------------------------------------------------------------------------------------------ clock

    def _check_clock(self) -> None:
        """Raises: Fault for a process that is overdue."""
        now = time.monotonic()
        late = self._children.late(HELLO_S)
        if late:
            raise Fault(f"{', '.join(late)} did not start within {HELLO_S:g} s", role=late[0])
        if self._info is None:
            if now - self._moved > LOAD_SILENCE_S:
                raise Fault(f"the engine is not ready and told no progress for {LOAD_SILENCE_S:g} s")
            return
        late = [role for role in self._children.roles if role not in self._children.ready]
        if late and now - self._moved > READY_S:
            raise Fault(f"{', '.join(late)} did not get ready within {READY_S:g} s of the engine", role=late[0])
        most = max(BEAT_LOST_S, self.settings.engine.stall_limit(self._info.device))
        if now - self._beat_at > most:
            raise Fault(f"the engine gave no sign of life for {most:g} s", role="engine")

    # -------------------------------------------------------------------------------------------------------------- end

    def _drain(self) -> int:
        """After a signal: let running requests finish, then end all. Returns: the exit code."""
        name = signal.Signals(self._signals[0]).name
        if self._serving:
            grace = self.settings.server.drain_s
            log.info("%s: no new requests; running ones have %g s. Ctrl+C again ends it at once", name, grace)
            self._children.send(self._children.api, Drain(grace))
            until = time.monotonic() + grace + FAULT_WAIT_S
            while not self._drained.issuperset(self._children.api) and time.monotonic() < until:
                self._turn_unless_interrupted()
        else:
            log.info("%s while loading: the server stops", name)
        self._stop_all()
        return 0

    def _turn_unless_interrupted(self) -> None:
        self._turn()
        if len(self._signals) > 1:
            raise _Interrupted

    def _stop_all(self) -> None:
        """STOP to all; those that can not take it are killed after a while."""
        children = self._children
        told = [role for role in children.roles if role in children.ready or role in children.api]
        children.send(children.living(told), Stop(STOP_S))
        children.kill(role for role in children.roles if role not in told)
        until = time.monotonic() + STOP_S
        while children.any_alive and time.monotonic() < until:
            self._wait_woken(until - time.monotonic())
            if len(self._signals) > 1:
                raise _Interrupted

    def _wait_woken(self, seconds: float) -> None:
        """A child's end or a signal rings."""
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.poll(max(1, int(1000 * seconds)))
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _end_with_fault(self, exc: MiniSGLError) -> None:
        """Open requests learn that the server has failed, for which the api has a few seconds; then all end."""
        role = exc.role if isinstance(exc, Fault | ServerFailed) else ""
        children = self._children
        children.kill([role])
        told = children.living(r for r in children.api if r in children.ready)
        children.send(told, FaultReport(role, "fault", str(exc), exc.exit_code))
        until = time.monotonic() + FAULT_WAIT_S
        while time.monotonic() < until and len(self._signals) < 2:
            if self._drained.issuperset(children.living(told)):
                break
            self._drained.update(m.role for m in self._inbox.receive(50) if isinstance(m, Drained))
        self._stop_all()

    def _kill_all(self) -> None:
        self._children.kill()
        for child in self._children.wait(STOP_S):
            log.error("%s (pid %d) does not end", child.role, child.pid)
