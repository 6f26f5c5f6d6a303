"""What a child process of the server starts with, and its line to the supervisor."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from minisgl.base.errors import EXIT_CONFIG, Fault
from minisgl.config.schema import Settings
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import Registry
from minisgl.wire.messages import FaultReport, Go, Hello, Message, Stop
from minisgl.wire.sockets import Inbox, Outbox, address

SUPERVISOR = "supervisor"
# The supervisor, which watches the clock, downloads meanwhile; a dead one takes this process along.
WAIT_S = 24 * 3600.0
POLL_MS = 500

log = logging.getLogger("minisgl.wire")


@dataclass(frozen=True, slots=True)
class Spec:
    """``role``: "engine", "text-0", "api-0". ``lock``: PluginLock as JSON. ``settings``: all settings as JSON, secrets
    included. ``parent``: pid of the supervisor. ``listen_fd``: the bound TCP socket, for the api process."""

    role: str
    lock: str
    fingerprint: str
    settings: str
    folder: Path
    parent: int
    listen_fd: int | None = None

    @property
    def kind(self) -> str:
        """``text`` of ``text-0``."""
        return self.role.partition("-")[0]

    @property
    def index(self) -> int:
        return int(self.role.partition("-")[2] or 0)


class Stopped(Exception):
    """The supervisor told this process to leave before it had work."""


class Process:
    """A child process: its settings and plugins, its inbox, and the ways to the others. Passed to the role's ``run``."""

    def __init__(self, spec: Spec, settings: Settings, registry: Registry, hooks: Hooks, lock: PluginLock) -> None:
        """``lock``: the selected plugins as this process's own environment has them."""
        self.spec, self.settings, self.registry, self.hooks, self.lock = spec, settings, registry, hooks, lock
        self.context: zmq.Context[Any] = zmq.Context()
        self.inbox = Inbox(self.context, address(spec.folder, spec.role))
        self._outboxes: dict[str, Outbox] = {}
        self.early: list[Message] = []  # arrived while this process waited for something else

    @property
    def role(self) -> str:
        return self.spec.role

    def to(self, role: str) -> Callable[[Message], None]:
        """The way to another process's inbox."""
        if role not in self._outboxes:
            self._outboxes[role] = Outbox(self.context, address(self.spec.folder, role))
        return self._outboxes[role].send

    def to_apis(self) -> list[Callable[[Message], None]]:
        """The ways to the api processes, by index."""
        return [self.to(f"api-{i}") for i in range(self.settings.server.api_workers)]

    def tell(self, message: Message) -> None:
        """To the supervisor."""
        self.to(SUPERVISOR)(message)

    def hello(self) -> None:
        lock = self.lock
        self.tell(
            Hello(self.role, os.getpid(), socket.gethostname(), lock.fingerprint, lock.to_json(), self.spec.index)
        )

    def wait_for(self, kind: type[Any], seconds: float = WAIT_S) -> Any:
        """The next message of ``kind``; what else comes is kept in ``early``. Raises: Stopped; Fault after ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for i, message in enumerate(self.early):
                if isinstance(message, Stop):
                    raise Stopped
                if isinstance(message, kind):
                    del self.early[i]
                    return message
            self.early += self.inbox.receive(POLL_MS)
        raise Fault(f"{self.role} got no {kind.__name__} from the supervisor within {seconds:g} s", role=self.role)

    def wait_go(self) -> Go:
        """The plugins are accepted: work may begin. Raises: PluginError if what the model selects is another plugin here."""
        go: Go = self.wait_for(Go)
        if go.lock:
            expected = PluginLock.from_json(go.lock)
            expected.check(
                expected.observed(self.registry), f"{self.role} (host {socket.gethostname()}, pid {os.getpid()})"
            )
        return go

    def close(self) -> None:
        """Deliver what was sent, for up to a second."""
        self.inbox.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self.context.term()


def report(folder: Path, fault: FaultReport) -> None:
    """Tell the supervisor of a failure; from any thread and in any state of the process, within a second."""
    context: zmq.Context[Any] = zmq.Context()
    outbox = Outbox(context, address(folder, SUPERVISOR))
    outbox.send(fault)
    outbox.close()
    context.term()


def fault_report(role: str, exc: BaseException, lock: PluginLock | None) -> FaultReport:
    """What to tell the user of an exception that ends a process."""
    code = getattr(exc, "exit_code", Fault.exit_code)
    notes = [*blame(exc, lock), *getattr(exc, "__notes__", ())]
    known = code == EXIT_CONFIG or isinstance(exc, Fault)
    text = str(exc) if known else f"{role} failed: {type(exc).__name__}: {exc}{_place(exc)}"
    return FaultReport(
        role,
        "config" if code == EXIT_CONFIG else "fault",
        "\n".join([text, *dict.fromkeys(notes)]),
        code if known else Fault.exit_code,
    )


def blame(exc: BaseException, lock: PluginLock | None) -> list[str]:
    """``in cache 'lfu' (minisgl-lfu 0.1), evict()``: the plugin whose code raised, read off the traceback."""
    if lock is None:
        return []
    owners = {e.target.partition(":")[0]: e for e in lock.entries}
    found: list[str] = []
    while exc.__cause__ is not None:  # what a worker's thread or another process raised comes wrapped
        exc = exc.__cause__
    tb = exc.__traceback__
    while tb is not None:
        entry = owners.get(tb.tb_frame.f_globals.get("__name__", ""))
        if entry is not None:
            package = f"{entry.dist} {entry.version}".strip()
            found = [f"in {entry.kind} {entry.name!r} ({package}), {tb.tb_frame.f_code.co_name}()"]
        tb = tb.tb_next
    return found


def _place(exc: BaseException) -> str:
    tb = exc.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return "" if tb is None else f"\n  at: {tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}"
