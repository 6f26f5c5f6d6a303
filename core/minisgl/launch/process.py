"""A child process as the supervisor holds it: start, log, how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

from minisgl.wire import codec
from minisgl.wire.process import Spec

TAIL_BYTES = 4096
TAIL_LINES = 12
SPAWN_MASK = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Child:
    """``on_exit`` is called from another thread, once, when the process has ended and its output is read."""

    def __init__(self, spec: Spec, on_exit: Callable[[Child], None], log: Callable[[bytes], None]) -> None:
        """Starts the process. Call it from the main thread: the kernel ends the child with the thread that started it."""
        self.role = spec.role
        self._tail = b""
        self._log = log
        fds = () if spec.listen_fd is None else (spec.listen_fd,)
        self._process = _spawn(spec.role, fds)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(codec.dumps(spec))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is dead already, which the watcher tells
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(on_exit,), daemon=True).start()

    def _read(self, pipe: IO[bytes]) -> None:
        """Pass the output on and keep its end."""
        fd = pipe.fileno()
        while piece := os.read(fd, 65536):
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
            self._log(piece)

    def _watch(self, on_exit: Callable[[Child], None]) -> None:
        self._process.wait()
        self._reader.join(1.0)  # a grandchild may hold the pipe
        on_exit(self)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        if self.alive:
            self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within ``seconds``."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def last_lines(self) -> list[str]:
        lines = self._tail.decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]

    def obituary(self, so: str = ", so the server stops") -> str:
        """Who ended, how, and its last words."""
        text = f"{self.role} (pid {self.pid}) {how_it_ended(self.exit_code)}{so}."
        if self.exit_code == -signal.SIGKILL:
            text += (
                " If nobody killed it, the system ran out of memory (see dmesg): lower kv.memory or limits.max_running."
            )
        if self.last_lines:
            text += f"\nThe last lines of {self.role}:\n" + "\n".join(f"  {line}" for line in self.last_lines)
        return text


def how_it_ended(code: int | None) -> str:
    if code is None:
        return "does not answer"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name} (signal {-code})"
    except ValueError:
        return f"was killed by signal {-code}"


def _spawn(role: str, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """The child inherits the blocked signals and unblocks them when it ignores them, so none can kill it in between."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SPAWN_MASK)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "minisgl.launch.child", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
