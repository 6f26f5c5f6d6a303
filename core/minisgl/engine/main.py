"""The engine process: builds the engine, runs it until Stop, and tells the others that it lives."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minisgl.base.errors import EXIT_FAULT
from minisgl.base.types import Admit, EngineOutput
from minisgl.engine import port
from minisgl.wire import messages as wire
from minisgl.wire.messages import Beat, FaultReport, Progress, Ready
from minisgl.wire.process import Process, Stopped, report
from minisgl.wire.sockets import Inbox

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

log = logging.getLogger("minisgl.engine")
Send = Callable[[wire.Message], None]
BEAT_S = 1.0
PROGRESS_S = 0.1
CLOSE_S = 5.0


class ZmqPort:
    """The engine's end of the wire. ``to_text``: ways to the text workers; ``to_api``: to the api processes, by index."""

    def __init__(self, inbox: Inbox, to_text: Sequence[Send], to_api: Sequence[Send]) -> None:
        self._inbox, self._to_text, self._to_api = inbox, to_text, to_api
        self.pass_began_ns = 0  # monotonic; when the pass that runs now took in its input; 0 while it waits for some

    def receive(self, timeout_ms: int) -> list[port.EngineInput]:
        self.pass_began_ns = 0
        taken = self._inbox.receive(timeout_ms)
        self.pass_began_ns = time.monotonic_ns()
        return [made for m in taken if (made := self._input(m)) is not None]

    def _input(self, m: wire.Message) -> port.EngineInput | None:
        if isinstance(m, Admit):
            return m
        if isinstance(m, wire.Abort):
            return port.Abort(m.uids)
        if isinstance(m, wire.Control):
            return port.Control(m.op, self._answer(m.uid))
        if isinstance(m, wire.Stop):
            return port.Stop()
        log.warning("a %s came to the engine, which has no use for it", type(m).__name__)
        return None

    def _answer(self, uid: int) -> Callable[[bytes], None]:
        return lambda payload: self._to_api[uid >> wire.API_SHIFT](wire.Reply(uid, payload))

    def send(self, owner: int, outputs: Sequence[EngineOutput]) -> None:
        way = self._to_text[owner]
        for output in outputs:
            way(output)


class Pulse(threading.Thread):
    """Every second: a beat to ``listeners``, and a look at the pass that runs now. One longer than ``stall_s`` is a fault:
    the stacks of all threads are written to the log and ``on_stall`` is called, which does not return."""

    def __init__(self, listeners: Sequence[Send], on_stall: Callable[[str], None], every_s: float = BEAT_S) -> None:
        super().__init__(name="pulse", daemon=True)
        self._listeners, self._on_stall, self._every_s = listeners, on_stall, every_s
        self._over = threading.Event()
        self._watched: tuple[ZmqPort, Engine, float] | None = None

    def watch(self, zmq_port: ZmqPort, engine: Engine, stall_s: float) -> None:
        self._watched = (zmq_port, engine, stall_s)

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            step, age_s, stall_s = self._look()
            for listener in self._listeners:
                listener(Beat(step, age_s))
            if age_s > stall_s:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._on_stall(
                    f"the engine has been in one step for {age_s:.1f} s (after step {step}), more than engine.stall_s = "
                    f"{stall_s:g}; the stacks of its threads are in the log"
                )
                return

    def _look(self) -> tuple[int, float, float]:
        """(last step, seconds in the pass that runs, most seconds)."""
        if self._watched is None:
            return -1, 0.0, float("inf")
        zmq_port, engine, stall_s = self._watched
        step, submitted_ns = engine.heartbeat
        began = min((ns for ns in (zmq_port.pass_began_ns, submitted_ns) if ns), default=0)
        return step, (time.monotonic_ns() - began) / 1e9 if began else 0.0, stall_s

    def stop(self) -> None:
        self._over.set()
        self.join(2 * self._every_s)


def progress_to(tell: Send, role: str) -> Callable[[str, int, int], None]:
    """A progress callback that tells the supervisor, at most ten times a second and always the end."""
    last: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last.get(what, 0.0) >= PROGRESS_S or done >= total:
            last[what] = now
            tell(Progress(role, what, int(done), int(total)))

    return progress


def run(process: Process) -> None:
    """Build and run. Raises: what the build and the steps raise; the engine is then dead."""
    importlib.import_module("minisgl.engine.build")  # while the supervisor looks at our plugins and finds the model
    go = process.wait_go()
    assert go.model is not None, "the supervisor sends the engine the model"
    settings = process.settings
    to_text = [process.to(f"text-{i}") for i in range(settings.text.workers)]
    zmq_port = ZmqPort(process.inbox, to_text, [process.to("api-0")])

    def on_stall(text: str) -> None:
        report(process.spec.folder, FaultReport(process.role, "stall", text, EXIT_FAULT))
        os._exit(EXIT_FAULT)

    pulse = Pulse([process.tell, process.to("api-0")], on_stall)
    pulse.start()
    try:
        build_and_run(process, go, zmq_port, pulse)
    finally:
        pulse.stop()


def build_and_run(process: Process, go: wire.Go, zmq_port: ZmqPort, pulse: Pulse) -> None:
    from minisgl.engine.build import build_engine

    if any(isinstance(m, wire.Stop) for m in process.early):
        raise Stopped
    assert go.model is not None
    progress = progress_to(process.tell, process.role)
    settings = process.settings
    engine = build_engine(settings, process.registry, go.model, zmq_port, progress, queue_limit=settings.limits.queue)
    try:
        pulse.watch(zmq_port, engine, settings.engine.stall_limit(engine.info.device))
        process.tell(Ready(process.role, engine.info))
        engine.run()
    finally:
        engine.close(CLOSE_S)
