"""One inbox per process, and outboxes to the inboxes of others, over ZMQ in a private folder of this machine.

A sender never waits: queues are unbounded, sends do not block. A message to a process that has not bound its inbox yet is
kept until it has.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from minisgl.base.errors import ConfigError
from minisgl.wire.codec import WireError
from minisgl.wire.messages import Message
from minisgl.wire.packing import decode, encode

IPC_PATH_BYTES = 107  # sun_path of a Unix socket, without its final zero
LONGEST_ROLE = "/supervisor"
PREFIX = "minisgl-"
LINGER_MS = 1000
_DRAIN = 512  # messages taken in one go, so that one busy peer does not starve the rest of an event loop
_RECONNECT_MS = 10


class RuntimeDir:
    """The folder (mode 0700) of a server's sockets: ``minisgl-<random>`` under the temporary directory."""

    def __init__(self, base: Path | None = None) -> None:
        """Makes it, and removes those of servers that were killed.

        Raises: ConfigError if the paths of sockets in it would be too long for the system.
        """
        parent = Path(tempfile.gettempdir()) if base is None else base
        if base is None and not _fits(parent):
            parent = Path("/tmp")
        if not _fits(parent):
            raise ConfigError(
                f"runtime folder {str(parent)!r} is too long for sockets: a path may have {IPC_PATH_BYTES} bytes; "
                "set TMPDIR to a shorter folder"
            )
        _remove_stale(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        made = self.path / "lock.new"
        self._lock = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / "lock")  # held before another server that starts can see it

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def address(folder: Path, role: str) -> str:
    """The inbox of ``role`` ("engine", "text-0", "api-0", "supervisor")."""
    return f"ipc://{folder}/{role}"


def _fits(parent: Path) -> bool:
    return len(os.fsencode(parent / f"{PREFIX}12345678")) + len(LONGEST_ROLE) <= IPC_PATH_BYTES


def _remove_stale(parent: Path) -> None:
    """A server holds a lock in its folder as long as it lives, so a folder with a free lock is left over."""
    for lock in parent.glob(f"{PREFIX}*/lock"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)


class Inbox:
    """Where a process receives. One thread, or one event loop, at a time."""

    def __init__(self, context: zmq.Context[Any], where: str) -> None:
        self._socket: zmq.Socket[Any] = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(where)
        self._watching: asyncio.AbstractEventLoop | None = None

    def receive(self, timeout_ms: int) -> list[Message]:
        """All that has arrived, up to a batch; waits up to ``timeout_ms`` >= 0 for the first. Raises: WireError."""
        return self._take() if self._socket.poll(timeout_ms) else []

    @property
    def socket(self) -> zmq.Socket[Any]:
        """To wait on together with other things; read it by ``receive(0)``."""
        return self._socket

    def watch(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Message], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call ``handle`` for every message, in the event loop, until ``close``; ``failed`` if it raises or a message is
        malformed: a message that is lost may be one that somebody waits for."""
        self._watching = loop
        loop.add_reader(self._socket.fileno(), self._on_readable, loop, handle, failed)
        # The descriptor signals changes only; what was there before, or is left after a batch, needs a look of its own.
        loop.call_soon(self._on_readable, loop, handle, failed)

    def _on_readable(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Message], None],
        failed: Callable[[Exception], None],
    ) -> None:
        if self._watching is None:
            return
        try:
            messages = self._take()
            if len(messages) == _DRAIN:
                loop.call_soon(self._on_readable, loop, handle, failed)
            for message in messages:
                handle(message)
        except Exception as exc:
            failed(exc)

    def _take(self) -> list[Message]:
        taken: list[Message] = []
        while len(taken) < _DRAIN:
            try:
                taken.append(decode(self._socket.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return taken

    def close(self) -> None:
        if self._watching is not None:
            self._watching.remove_reader(self._socket.fileno())
            self._watching = None
        self._socket.close()


class Outbox:
    """The way to another process's inbox. Any thread may send."""

    def __init__(self, context: zmq.Context[Any], where: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 20 * _RECONNECT_MS)
        self._socket.connect(where)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Never waits. Raises: what ``encode`` raises; WireError if it is closed."""
        frames = encode(message)
        with self._lock:
            if self._socket.closed:
                raise WireError(f"{type(message).__name__} cannot be sent: this end is closed")
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """What is queued is still sent for up to a second, while the context ends."""
        with self._lock:
            self._socket.close()
