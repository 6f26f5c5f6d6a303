"""A thread that says that its process lives, and ends it when it hangs: a process that is dead is noticed, one that hangs is not."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from minisgl.base.errors import EXIT_FAULT
from minisgl.wire.messages import Beat, FaultReport, Message
from minisgl.wire.process import Spec, report

BEAT_S = 1.0
HANG_S = 300.0  # no prompt takes so long to tokenize, and nothing may hold up an event loop so long
Look = Callable[[], tuple[int, int]]


class Pulse(threading.Thread):
    """Every second: a beat to ``listeners``, and a look at the pass that runs now. One that takes too long is a fault: the
    stacks of all threads are written to the log, the supervisor is told, and ``end`` ends the process."""

    def __init__(
        self,
        spec: Spec,
        listeners: Sequence[Callable[[Message], None]] = (),
        every_s: float = BEAT_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._spec, self._listeners, self._every_s, self._end = spec, listeners, every_s, end
        self._over = threading.Event()
        self._watched: tuple[Look, float, str] = (lambda: (-1, 0)), float("inf"), ""

    def watch(self, look: Look, limit_s: float = HANG_S, limit: str = "the limit") -> None:
        """``look``: the last step (-1: there are none) and since when the pass that runs now does (monotonic ns; 0: none
        does); called from this thread. ``limit_s``: the longest a pass may take; ``limit``: what that is called."""
        self._watched = look, limit_s, limit

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            look, limit_s, limit = self._watched
            step, began_ns = look()
            age_s = (time.monotonic_ns() - began_ns) / 1e9 if began_ns else 0.0
            for listener in self._listeners:
                listener(Beat(step, age_s))
            if age_s > limit_s:
                self._stalled(step, age_s, f"{limit} = {limit_s:g}")
                return

    def _stalled(self, step: int, age_s: float, limit: str) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        after = f" (after step {step})" if step >= 0 else ""
        text = (
            f"{self._spec.role} has been in one pass for {age_s:.1f} s{after}, more than {limit}; the stacks of its "
            "threads are in the log"
        )
        report(self._spec.folder, FaultReport(self._spec.role, "stall", text, EXIT_FAULT))
        self._end(EXIT_FAULT)

    def stop(self) -> None:
        self._over.set()
        self.join(2 * self._every_s)
