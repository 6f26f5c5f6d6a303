"""The engine process: builds the engine, runs it until Stop, and tells the others that it lives."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from minisgl.base.types import Admit, EngineOutput
from minisgl.engine import port
from minisgl.observe.engine import EngineMetrics
from minisgl.wire import messages as wire
from minisgl.wire.messages import Progress, Ready
from minisgl.wire.process import Process, Stopped
from minisgl.wire.pulse import Pulse
from minisgl.wire.sockets import Inbox

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

log = logging.getLogger("minisgl.engine")
Send = Callable[[wire.Message], None]
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


def what_runs(zmq_port: ZmqPort, engine: Engine) -> tuple[int, int]:
    """The last step, and since when the pass or the step that runs now does; 0 if none does. Any thread may ask."""
    step, submitted_ns = engine.heartbeat
    return step, min((ns for ns in (zmq_port.pass_began_ns, submitted_ns) if ns), default=0)


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
    zmq_port = ZmqPort(process.inbox, to_text, process.to_apis())

    pulse = Pulse(process.spec, [process.tell, *process.to_apis()])
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
    engine = build_engine(
        settings, process.registry, go.model, zmq_port, progress, [EngineMetrics()], queue_limit=settings.limits.queue
    )
    try:
        pulse.watch(
            partial(what_runs, zmq_port, engine), settings.engine.stall_limit(engine.info.device), "engine.stall_s"
        )
        process.tell(Ready(process.role, engine.info))
        engine.run()
    finally:
        engine.close(CLOSE_S)
