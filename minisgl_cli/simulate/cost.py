"""How long a step takes: from sizes and rates of a device, or fitted to measured steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from minisgl.base.errors import ConfigError
from minisgl_cli.simulate.shapes import Shape

FIELDS = ("tokens", "kv", "seconds")


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes. ``tokens``: through the layers. ``kv``: KV tokens that its rows have afterwards, together, which
    attention reads. ``pairs``: of a new token and a token it attends to. ``sampled``: rows of the LM head."""

    tokens: int
    kv: int
    pairs: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """``bandwidth``: bytes/s read. ``flops``: of matrix products, 1/s. ``memory``: bytes for weights and KV cache together.
    ``layer_s``: seconds each layer takes however small the step (kernel starts). ``host_s``: seconds in which the host makes
    a step ready; step loops that overlap hide it. ``value_bytes``: of a weight and of a KV number. ``batch_tokens``,
    ``max_running``: limits of the engine on such a device, where the settings have none."""

    name: str
    bandwidth: float
    flops: float
    memory: int
    layer_s: float
    host_s: float
    value_bytes: int
    batch_tokens: int
    max_running: int


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # H200, bf16: 4.3 TB/s is between reading once (4.5) and attention over pages (3.5-3.8); products of 8192 run at
        # 790 TFLOP/s; a step of one row takes about 50 us a layer more than its bytes.
        Hardware("h200", 4.3e12, 790e12, 141 * 10**9, 50e-6, 250e-6, 2, 8192, 256),
        # Two AVX512 cores, float32: 538 MB of weights are read at 30 GB/s; 128 rows run at 240 GFLOP/s.
        Hardware("laptop-cpu", 30e9, 240e9, 8 * 2**30, 170e-6, 500e-6, 4, 256, 32),
    )
}


class Cost(Protocol):
    """``host_s``: seconds of the host for each step, before the device can begin it."""

    @property
    def host_s(self) -> float: ...
    def seconds(self, w: Work) -> float:
        """Of the device, for one step."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Each part of a step takes as long as its bytes or its products, whichever is more; parts add up.

    seconds = layers * layer_s + linear + attention + head, where
    linear = max(weights read / bandwidth, 2 * weights used * tokens / flops),
    attention = max(kv * bytes of a KV token / bandwidth, 4 * layers * heads * head_dim * pairs / flops),
    head = max(head bytes / bandwidth, 2 * head weights * sampled / flops), if a row samples.
    """

    shape: Shape
    hardware: Hardware

    @property
    def host_s(self) -> float:
        return self.hardware.host_s

    def seconds(self, w: Work) -> float:
        s, h = self.shape, self.hardware
        read = s.dense_values + self._experts_read(w.tokens) * s.expert_values
        used = s.dense_values + s.top_k * s.expert_values
        linear = self._longer(read, 2 * used * w.tokens)
        attention = self._longer(w.kv * s.kv_values, 4 * s.layers * s.heads * s.head_dim * w.pairs)
        head = self._longer(s.head_values, 2 * s.head_values * w.sampled) if w.sampled else 0.0
        return s.layers * h.layer_s + linear + attention + head

    def _longer(self, values: float, flops: float) -> float:
        return max(values * self.hardware.value_bytes / self.hardware.bandwidth, flops / self.hardware.flops)

    def _experts_read(self, tokens: int) -> float:
        """Experts of a layer that at least one of the tokens uses, on average, if all are equally likely."""
        s = self.shape
        return s.experts * (1 - (1 - s.top_k / s.experts) ** tokens) if s.experts else 0.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """seconds = step_s + token_s * tokens + kv_s * kv, with the host's time in ``step_s``: a measured step has both."""

    step_s: float
    token_s: float
    kv_s: float
    host_s: float = 0.0

    def seconds(self, w: Work) -> float:
        return self.step_s + self.token_s * w.tokens + self.kv_s * w.kv


def calibrate(path: Path) -> Fitted:
    """Fit measured steps: JSON lines with ``tokens``, ``kv`` and ``seconds`` (see Work). Raises: ConfigError with the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--calibrate {path}: it cannot be read: {exc}") from exc
    rows = list(_measured(path, lines))
    if len(rows) < len(FIELDS):
        raise ConfigError(f"--calibrate {path} has {len(rows)} measured steps; at least {len(FIELDS)} are needed")
    return fit(rows)


def _measured(path: Path, lines: Sequence[str]) -> Iterator[tuple[float, float, float]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
        except ValueError as exc:
            raise ConfigError(f"--calibrate {path}:{number}: not JSON: {exc}") from exc
        values = [found.get(key) if isinstance(found, dict) else None for key in FIELDS]
        for key, value in zip(FIELDS, values, strict=True):
            good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
            if not good:
                raise ConfigError(f"--calibrate {path}:{number}: {key} = {value!r}; a number >= 0 is needed")
        tokens, kv, seconds = values
        yield float(tokens), float(kv), float(seconds)  # type: ignore[arg-type]


def fit(rows: Sequence[tuple[float, float, float]]) -> Fitted:
    """The least-squares fit of (tokens, kv, seconds) whose three parts are not negative: more work never takes less time."""
    data = np.array(rows, np.float64)
    features = np.column_stack([np.ones(len(data)), data[:, 0], data[:, 1]])
    best, least = np.zeros(3), float("inf")
    for n in range(1, 4):
        for columns in combinations(range(3), n):
            found, error = _solve(features, data[:, 2], columns)
            # Among equally good fits the one with fewer parts stays.
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = found, error
    return Fitted(*best.tolist())


def _solve(
    features: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], columns: tuple[int, ...]
) -> tuple[npt.NDArray[np.float64], float]:
    """Coefficients with all but ``columns`` zero, and the squared error."""
    part = features[:, list(columns)]
    scale = np.maximum(np.abs(part).max(axis=0), 1.0)  # so that tokens, kv and 1 weigh alike in the solver's tolerance
    solved = np.linalg.lstsq(part / scale, seconds, rcond=None)[0] / scale
    found = np.zeros(3)
    found[list(columns)] = solved
    return found, float(((features @ found - seconds) ** 2).sum())
