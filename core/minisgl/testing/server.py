"""A real ``minisgl serve`` in processes of its own, for end-to-end tests::

with Server("--model", str(folder), "--executor", "scripted") as server:
    status, body = server.post("/v1/completions", {"prompt": "hi"})
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal as signals
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY = re.compile(r"^ready: (https?://\S+)", re.MULTILINE)
LISTENING = re.compile(r"listening on (https?://[^\s,]+)")


class Server:
    """Starts at once on a free port of 127.0.0.1; as a context manager it waits until it is ready, and at the end checks that
    nothing is left behind. It gets a temporary folder, a session and a home of its own."""

    def __init__(
        self,
        *args: str,
        command: tuple[str, ...] = (sys.executable, "-m", "minisgl_cli", "serve"),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready_s: float = 60.0,
    ) -> None:
        """``args``: of the command. ``ready_s``: how long the start may take."""
        self.temp = Path(tempfile.mkdtemp(prefix="srv-", dir="/tmp"))  # short: socket paths are limited
        self._ready_s = ready_s
        own = {"TMPDIR": str(self.temp), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **own, **(env or {})},
            cwd=cwd or self.temp,
            start_new_session=True,
        )
        self._texts = {"stdout": "", "stderr": ""}
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._texts]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        fd = getattr(self.process, name).fileno()
        while piece := os.read(fd, 65536):
            with self._changed:
                self._texts[name] += piece.decode(errors="replace")
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------------ waiting

    @property
    def stdout(self) -> str:
        return self._texts["stdout"]

    @property
    def stderr(self) -> str:
        return self._texts["stderr"]

    def _await_text(self, name: str, pattern: re.Pattern[str], seconds: float) -> re.Match[str]:
        until = time.monotonic() + seconds
        with self._changed:
            while (found := pattern.search(self._texts[name])) is None:
                left = until - time.monotonic()
                ended = self.process.poll() is not None and not any(r.is_alive() for r in self._readers)
                if left <= 0 or ended:
                    raise AssertionError(
                        f"{pattern.pattern!r} did not appear in {name} within {seconds:g} s (exit code "
                        f"{self.process.poll()}):\n{self.stdout}\n{self.stderr}"
                    )
                self._changed.wait(min(left, 0.2))
        return found

    def wait_stderr(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        """Wait until the log has a match of ``pattern``. Raises: AssertionError with the output."""
        return self._await_text("stderr", re.compile(pattern, re.MULTILINE), seconds)

    def wait_ready(self) -> Self:
        """Raises: AssertionError with the output if it does not get ready."""
        self._await_text("stdout", READY, self._ready_s)
        return self

    @property
    def url(self) -> str:
        """Known as soon as the port is bound, before the model is loaded."""
        return self._await_text("stderr", LISTENING, 30.0)[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_exit(self, seconds: float = 20.0) -> int:
        """The exit code; raises AssertionError if it goes on."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {seconds:g} s:\n{self.stderr}") from None
        for reader in self._readers:
            reader.join(5)
        return code

    # ---------------------------------------------------------------------------------------------------------- requests

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **kw: Any) -> tuple[int, Any]:
        status, _, body = self.request("GET", path, **kw)
        return status, json.loads(body) if body else None

    def post(self, path: str, body: Any, **kw: Any) -> tuple[int, Any]:
        status, _, answer = self.request("POST", path, body, **kw)
        return status, json.loads(answer) if answer else None

    def stream(self, path: str, body: Any, timeout: float = 30.0) -> Stream:
        """Send a request whose answer is a stream of events."""
        return Stream(self.port, path, body, timeout)

    # --------------------------------------------------------------------------------------------------------- processes

    @property
    def processes(self) -> dict[int, str]:
        """pid -> role ("supervisor", "engine", "text-0", "api-0", or the command line) of all in the server's session."""
        return dict(_session(self.process.pid))

    def pids(self, role: str) -> list[int]:
        return [pid for pid, name in self.processes.items() if name == role]

    def pid(self, role: str) -> int:
        found = self.pids(role)
        assert len(found) == 1, f"{role}: {self.processes}"
        return found[0]

    def loads(self, role: str, library: str) -> bool:
        """Whether a process has mapped a library whose path contains ``library``."""
        return library in Path(f"/proc/{self.pid(role)}/maps").read_text()

    def signal(self, number: int, role: str | None = None) -> None:
        """To one process, or to the supervisor alone."""
        os.kill(self.process.pid if role is None else self.pid(role), number)

    def signal_all(self, number: int) -> None:
        """To every process, as a terminal does it."""
        os.killpg(self.process.pid, number)

    # --------------------------------------------------------------------------------------------------------------- end

    def left_over(self, seconds: float = 2.0) -> list[str]:
        """Processes and socket folders that outlived the server by more than ``seconds``."""
        wait_until(lambda: not self.processes, seconds, must=False)
        return [f"{pid} {role}" for pid, role in self.processes.items()] + [str(p) for p in self.temp.glob("minisgl-*")]

    def stop(self, number: int = signals.SIGTERM, seconds: float = 30.0) -> int:
        """End it if it runs; returns its exit code. Raises: AssertionError for what is left behind."""
        if self.process.poll() is None:
            self.signal(number)
        code = self.wait_exit(seconds)
        left = self.left_over()
        assert not left, f"left behind: {left}\n{self.stderr}"
        return code

    def close(self) -> None:
        """Whatever happened: nothing of it runs or lies around afterwards."""
        for pid in [*self.processes, self.process.pid]:
            if self.process.poll() is None or pid != self.process.pid:
                _kill(pid)
        self.process.wait(10)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self.temp, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if exc is None:
                self.stop()
        finally:
            self.close()


class Stream:
    """Server-sent events of one answer, as they come."""

    def __init__(self, port: int, path: str, body: Any, timeout: float) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._answer: http.client.HTTPResponse | None = None

    @property
    def answer(self) -> http.client.HTTPResponse:
        """Waits for the head of the answer."""
        if self._answer is None:
            self._answer = self._connection.getresponse()
        return self._answer

    @property
    def status(self) -> int:
        return self.answer.status

    def __iter__(self) -> Iterator[Any]:
        """The events' data: JSON values, and the string ``[DONE]``; comments are left out."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)

    def close(self) -> None:
        """Go away, as a client does that lost interest."""
        if self._answer is not None:
            self._answer.close()
        self._connection.close()


def wait_until(fact: Callable[[], bool], seconds: float = 10.0, must: bool = True) -> bool:
    """Look until ``fact`` holds, for what can only be looked at. Raises: AssertionError if it must and does not."""
    until = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > until:
            assert not must, f"not so within {seconds:g} s"
            return False
        time.sleep(0.01)
    return True


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signals.SIGKILL)


def _session(leader: int) -> Iterator[tuple[int, str]]:
    """Living processes of a session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        state, session = fields[0], int(fields[3])
        if session == leader and state not in "ZX":
            is_child = b"minisgl.launch.child" in command
            role = command[-1] if is_child else b"supervisor" if int(entry.name) == leader else b" ".join(command)
            yield int(entry.name), role.decode(errors="replace")
