"""How busy other processes keep the machine while something is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")  # Linux


class OthersCPU:
    """``cores``: used by other processes since this was made, on average; None where the system does not say."""

    def __init__(self) -> None:
        self._start, self._others = time.perf_counter(), self._read()

    @property
    def cores(self) -> float | None:
        now = self._read()
        if now is None or self._others is None:
            return None
        return max(0.0, (now - self._others) / (time.perf_counter() - self._start))

    @staticmethod
    def _read() -> float | None:
        """CPU seconds of all other processes, and those that a host took from this machine."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
        except (OSError, ValueError):
            return None
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
