"""The child processes of one server: who they are, how far each is, and which may be started again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from minisgl.launch.process import Child
from minisgl.wire.messages import Message
from minisgl.wire.process import Spec
from minisgl.wire.sockets import Outbox

RESTARTS = 3  # of one role, within RESTART_WINDOW_S; one that dies more often is a fault of the server
RESTART_WINDOW_S = 60.0


class Children:
    """``make``: the Spec of a role, given its listening socket's descriptor. ``way``: the address of a role's inbox."""

    def __init__(
        self,
        api: int,
        text: int,
        context: zmq.Context[Any],
        way: Callable[[str], str],
        make: Callable[[str, int | None], Spec],
        on_exit: Callable[[Child], None],
        log: Callable[[bytes], None],
    ) -> None:
        self.api = [f"api-{i}" for i in range(api)]
        self.text = [f"text-{i}" for i in range(text)]
        self.roles = [*self.api, *self.text, "engine"]
        self.greeted: set[str] = set()
        self.ready: set[str] = set()
        self.restarted: set[str] = set()  # those that are on their way back
        self._context, self._way, self._make, self._on_exit, self._log = context, way, make, on_exit, log
        self._running: dict[str, Child] = {}
        self._ways: dict[str, Outbox] = {}
        self._started: dict[str, float] = {}  # monotonic
        self._deaths: dict[str, list[float]] = {}

    def start(self, role: str, sock: socket.socket | None = None) -> None:
        """Call it from the main thread."""
        self._started[role] = time.monotonic()
        spec = self._make(role, None if sock is None else sock.fileno())
        self._running[role] = Child(spec, self._on_exit, self._log)
        if role not in self._ways:
            self._ways[role] = Outbox(self._context, self._way(role))

    def may_restart(self, role: str) -> bool:
        """A text worker that has served holds nothing but its own requests. Counts the death."""
        now = time.monotonic()
        recent = [t for t in self._deaths.get(role, ()) if now - t < RESTART_WINDOW_S]
        self._deaths[role] = [*recent, now]
        return role in self.text and role in self.ready and len(recent) < RESTARTS

    def restart(self, role: str) -> None:
        """Its inbox is the same, so what is under way to it waits for the new one."""
        self.greeted.discard(role)
        self.ready.discard(role)
        self.restarted.add(role)
        self.start(role)

    def send(self, roles: Iterable[str], message: Message) -> None:
        for role in roles:
            self._ways[role].send(message)

    def late(self, seconds: float) -> list[str]:
        """Those that have not greeted within ``seconds`` of their start."""
        now = time.monotonic()
        return [r for r in self.roles if r not in self.greeted and now - self._started.get(r, now) > seconds]

    def living(self, roles: Iterable[str]) -> list[str]:
        return [r for r in roles if r in self._running and self._running[r].alive]

    @property
    def any_alive(self) -> bool:
        return any(c.alive for c in self._running.values())

    def kill(self, roles: Iterable[str] | None = None) -> None:
        for role in self._running if roles is None else roles:
            if role in self._running:
                self._running[role].kill()

    def wait(self, seconds: float) -> list[Child]:
        """Those that do not end within ``seconds`` each."""
        return [c for c in self._running.values() if not c.wait(seconds)]
