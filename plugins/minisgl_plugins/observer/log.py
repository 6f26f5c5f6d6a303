"""One line every few seconds while the engine works: rows, tokens per second, pages."""

from __future__ import annotations

import logging
import time

from pydantic import Field

from minisgl.api import Observer, ObserverContext, PluginSettings, RequestEvent, StepStats

logger = logging.getLogger("minisgl.steps")


class LogObserver(Observer):
    class Settings(PluginSettings):
        every_s: float = Field(10.0, gt=0, description="seconds between two lines")

    def __init__(self, ctx: ObserverContext) -> None:
        super().__init__(ctx)
        self._every_ns = int(ctx.settings.every_s * 1e9)
        self._start_ns = self._last_ns = 0
        self._steps = self._decode = self._prefill = self._ended = 0

    def step(self, s: StepStats) -> None:
        now = time.monotonic_ns()
        if self._steps == 0 or now - self._last_ns > self._every_ns:  # do not average over idle time
            self._reset()
            self._start_ns = now - s.run_ns
        self._last_ns = now
        self._steps += 1
        self._decode += s.n_decode
        self._prefill += s.prefill_tokens
        if now - self._start_ns >= self._every_ns:
            self._line(s, (now - self._start_ns) / 1e9)

    def request(self, e: RequestEvent) -> None:
        if e.event == "ended":
            self._ended += 1

    def _line(self, s: StepStats, seconds: float) -> None:
        logger.info(
            "%d running, %d waiting, %d ended | decode %.0f tok/s, prefill %.0f tok/s, %.1f steps/s | "
            "pages: %d free, %d cached, %d locked",
            s.n_running,
            s.n_waiting,
            self._ended,
            self._decode / seconds,
            self._prefill / seconds,
            self._steps / seconds,
            s.free_pages,
            s.evictable_pages,
            s.locked_pages,
        )
        self._reset()

    def _reset(self) -> None:
        self._steps = self._decode = self._prefill = self._ended = 0
