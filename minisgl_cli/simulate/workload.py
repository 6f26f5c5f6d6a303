"""Requests of a simulation: when they come, and tokens that are made up when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from minisgl.base.errors import ConfigError
from minisgl.base.types import I32, I64

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Request:
    """``at_s``: when it comes; if it ``follows`` an earlier request (its index), seconds after that one's end. Its prompt is
    made of pieces: ``keys`` [n] int64, ``lengths`` [n] int64 in tokens. Pieces with one key begin with the same tokens.
    ``output_key``: of the piece that it answers, ``output_len`` tokens."""

    at_s: float
    keys: I64
    lengths: I64
    output_key: int
    output_len: int
    follows: int | None = None

    @property
    def input_len(self) -> int:
        return int(self.lengths.sum())

    def prompt(self) -> I32:
        """[input_len] int32."""
        keys = np.repeat(self.keys, self.lengths)
        starts = np.cumsum(self.lengths) - self.lengths
        return tokens_of(keys, np.arange(len(keys)) - np.repeat(starts, self.lengths))


def tokens_of(keys: I64, at: I64) -> I32:
    """Token ``at[i]`` of the piece ``keys[i]``: a hash, so that other pieces have other tokens."""
    x: U64 = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + at.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(33)).astype(np.int32)


def rate_of(requests: Sequence[Request]) -> float:
    """Requests per second on average, each that follows another counted with the first of its line; inf if all come at once."""
    firsts = [r.at_s for r in requests if r.follows is None]
    span = max(firsts) - min(firsts)
    return len(requests) * (len(firsts) - 1) / len(firsts) / span if span > 0 else float("inf")


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """The same requests in the same pattern at ``rate`` per second (see rate_of); with inf all at once, but for those that
    follow another: they keep their distance from that one's end. Raises: ConfigError if there is no pattern."""
    firsts = [r.at_s for r in requests if r.follows is None]
    factor = rate_of(requests) / rate if isfinite(rate) and len(firsts) > 1 else 0.0
    if not isfinite(factor):
        raise ConfigError(f"--rate {rate:g}: all requests come at one time, so there is no pattern to stretch")
    start = min(firsts)
    return [r if r.follows is not None else replace(r, at_s=(r.at_s - start) * factor) for r in requests]
