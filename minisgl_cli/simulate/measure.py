"""What came out of a simulation, and when: latencies, throughput, cache hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.base.types import Ended, EngineOutput, Finish, Refused, Tokens

F64 = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)


class Recorder:
    """Times in seconds by request number; NaN until it happens. TTFT: from arrival to the first token. ITL: between two tokens
    of one request. E2E: from arrival to the end."""

    def __init__(self, requests: int) -> None:
        self.arrived, self.first, self.ended = (np.full(requests, np.nan) for _ in range(3))
        self.output_tokens = 0
        self.refused = self.failed = 0
        self._last = np.full(requests, np.nan)
        self._gaps: list[F64] = []

    def take(self, outputs: Sequence[EngineOutput], now: float) -> list[int]:
        """Note what an engine sent at ``now``. Returns: the requests that ended well."""
        done = []
        for out in outputs:
            if isinstance(out, Tokens):
                self._tokens(out, now)
            elif isinstance(out, Refused):
                self.refused += 1
            elif isinstance(out, Ended) and out.finish in (Finish.LENGTH, Finish.STOP):
                self.ended[out.uid] = now
                done.append(out.uid)
            else:
                self.failed += 1
        return done

    def _tokens(self, out: Tokens, now: float) -> None:
        last = self._last[out.uids]
        new = np.isnan(last)
        self.first[out.uids[new]] = now
        if not new.all():
            self._gaps.append(now - last[~new])
        self._last[out.uids] = now
        self.output_tokens += len(out.uids)

    def summary(self) -> dict[str, Any]:
        """Latencies in seconds, of the requests that ended; None where there is none."""
        done = ~np.isnan(self.ended)
        span = float(self.ended[done].max() - np.nanmin(self.arrived)) if done.any() else 0.0
        gaps = np.concatenate(self._gaps) if self._gaps else np.empty(0)
        return {
            "requests": int(done.sum()),
            "refused": self.refused,
            "failed": self.failed,
            "seconds": span,
            "requests_per_s": done.sum() / span if span else None,
            "output_tokens_per_s": self.output_tokens / span if span else None,
            "ttft_s": spread((self.first - self.arrived)[done]),
            "itl_s": spread(gaps),
            "e2e_s": spread((self.ended - self.arrived)[done]),
        }


def spread(values: F64) -> dict[str, float] | None:
    """Mean and percentiles; a percentile between two values is interpolated. None if there are no values."""
    if not len(values):
        return None
    found = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean())} | {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
