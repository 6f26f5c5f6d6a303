"""Step times fitted to measured steps, and how those are written and read: JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.base.errors import ConfigError
from minisgl_cli.simulate.cost import Fitted, Work

F64 = npt.NDArray[np.float64]
NEEDED = ("tokens", "kv", "seconds")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a step computed (see Work) and how long it took. ``decode`` and ``prompt_pairs`` None: not known."""

    tokens: float
    kv: float
    seconds: float
    decode: float | None = None
    prompt_pairs: float | None = None

    @classmethod
    def of(cls, work: Work, seconds: float) -> MeasuredStep:
        return cls(work.tokens, work.kv, seconds, work.decode, work.prompt_pairs)


FIELDS = tuple(f.name for f in fields(MeasuredStep))


def write_steps(path: Path, steps: Sequence[MeasuredStep]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(asdict(step)) + "\n" for step in steps)


def calibrate(path: Path) -> Fitted:
    """Fit the measured steps of a file. Raises: ConfigError with the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--calibrate {path}: it cannot be read: {exc}") from exc
    steps = list(_measured(path, lines))
    if len(steps) < len(NEEDED):
        raise ConfigError(f"--calibrate {path} has {len(steps)} measured steps; at least {len(NEEDED)} are needed")
    return fit(steps)


def _measured(path: Path, lines: Sequence[str]) -> Iterator[MeasuredStep]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
        except ValueError as exc:
            raise ConfigError(f"--calibrate {path}:{number}: not JSON: {exc}") from exc
        values: dict[str, Any] = {key: found.get(key) if isinstance(found, dict) else None for key in FIELDS}
        for key, value in values.items():
            good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
            if not good and (value is not None or key in NEEDED):
                raise ConfigError(f"--calibrate {path}:{number}: {key} = {value!r}; a number >= 0 is needed")
        yield MeasuredStep(**values)


def fit(steps: Sequence[MeasuredStep]) -> Fitted:
    """The least-squares fit whose parts are not negative: more work never takes less time. Decoded rows and pairs have parts
    of their own if every step says them."""
    columns = np.array([[np.nan if (v := getattr(s, f)) is None else v for f in FIELDS] for s in steps], np.float64)
    tokens, kv, seconds, decode, pairs = columns.T
    known = not np.isnan(columns).any()
    features = [np.ones(len(steps)), tokens - decode if known else tokens, kv]
    features += [decode, pairs] if known else []
    step_s, token_s, kv_s, *more = _not_negative(np.column_stack(features), seconds).tolist()
    return replace(Fitted(step_s, token_s, kv_s), **dict(zip(("decode_s", "pair_s"), more, strict=False)))


def _not_negative(features: F64, seconds: F64) -> F64:
    """Coefficients >= 0 with the least squared error; among equally good ones those with fewer parts."""
    n = features.shape[1]
    best, least = np.zeros(n), float("inf")
    for k in range(1, n + 1):
        for columns in combinations(range(n), k):
            found, error = _solve(features, seconds, columns)
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = found, error
    return best


def _solve(features: F64, seconds: F64, columns: tuple[int, ...]) -> tuple[F64, float]:
    """Coefficients with all but ``columns`` zero, and the squared error."""
    part = features[:, list(columns)]
    scale = np.maximum(np.abs(part).max(axis=0), 1.0)  # so that all parts weigh alike in the solver's tolerance
    solved = np.linalg.lstsq(part / scale, seconds, rcond=None)[0] / scale
    found = np.zeros(features.shape[1])
    found[list(columns)] = solved
    return found, float(((features @ found - seconds) ** 2).sum())
