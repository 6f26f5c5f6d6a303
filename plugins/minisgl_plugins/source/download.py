"""Downloads by a hub's own client, watched: the callback is told what has come, and when nothing does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from .artifacts import Progress

POLL_S = 0.5
SILENCE_S = 30.0  # after so long without a byte the user is told


class Stopped(Exception):
    """Raised in the client's threads when the download is not wanted any more."""


@dataclass(slots=True)
class Tally:
    """Bytes of one download. The client's threads write, the caller's thread reads."""

    done: int = 0
    total: int = 0
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
        self.check()

    def expect(self, nbytes: int) -> None:
        with self.lock:
            self.total += nbytes
        self.check()

    def check(self) -> None:
        if self.stopped:
            raise Stopped


def watched(download: Callable[[Tally], str], what: str, progress: Progress) -> str | Exception:
    """What ``download`` returns or raises; it runs in a thread of its own and counts its bytes in the tally.

    ``progress`` is called from this thread, twice a second, once the download takes longer than that; what it raises ends the
    wait at once and the download at its next byte. Raises: what ``progress`` raises.
    """
    tally, ended = Tally(), threading.Event()
    result: list[str | Exception] = []

    def run() -> None:
        try:
            result.append(str(download(tally)))
        except Exception as e:
            result.append(e)
        ended.set()

    threading.Thread(target=run, name="minisgl-download", daemon=True).start()
    try:
        _tell(tally, ended, what, progress)
    except BaseException:
        tally.stopped = True
        raise
    return result[0]


def _tell(tally: Tally, ended: threading.Event, what: str, progress: Progress) -> None:
    seen, since = 0, time.monotonic()
    while not ended.wait(POLL_S):
        progress(what, tally.done, max(tally.total, tally.done))
        if tally.done != seen:
            seen, since = tally.done, time.monotonic()
        elif time.monotonic() - since >= SILENCE_S:
            progress(f"{what}: nothing came for {time.monotonic() - since:.0f} s, waiting", 0, 0)
            since = time.monotonic()
    if tally.total:
        progress(what, tally.total, tally.total)


def bar_class(tally: Tally) -> type:
    """A class for the Hugging Face client's ``tqdm_class``, which draws nothing and counts bytes.

    The client has a bar for bytes that arrive and one for bytes that are in place, both over the whole snapshot; it sets
    their totals as files begin. The greater of the two is what has come.
    """
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kw: Any) -> None:
            self._bytes = kw.get("unit") == "B"
            for own in ("name", "disable", "file"):
                kw.pop(own, None)
            super().__init__(*args, file=StringIO(), **kw)

        def update(self, n: float | None = 1) -> bool | None:
            tally.check()
            shown = super().update(n)
            if self._bytes:
                with tally.lock:
                    tally.done = max(tally.done, int(self.n))
                    tally.total = max(tally.total, int(self.total or 0))
            return shown  # type: ignore[no-any-return]

    return Bar
