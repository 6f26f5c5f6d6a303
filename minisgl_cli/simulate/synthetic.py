"""Made-up requests: Poisson or bursty arrivals, shared system prompts, conversations, a share of long inputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from minisgl_cli.simulate.workload import Request

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Lengths in tokens, drawn evenly from ranges (both ends included). ``input_len``: what a user says in a turn;
    ``long_len`` instead in a ``long_share`` of the conversations, in their first turn. Each conversation begins with one of
    ``system_prompts`` texts of ``system_len`` tokens and has ``turns`` turns, each ``think_s`` seconds on average after the
    end of the one before. ``cv``: standard deviation of the time between conversations over its mean; 1 is Poisson."""

    requests: int = 200
    input_len: Range = (128, 1024)
    output_len: Range = (32, 256)
    system_prompts: int = 0
    system_len: int = 512
    turns: Range = (1, 1)
    think_s: float = 5.0
    long_share: float = 0.0
    long_len: Range = (8192, 16384)
    cv: float = 1.0


def draw(s: Synthetic, seed: int) -> list[Request]:
    """``s.requests`` requests with one conversation per second on average. Equal seeds give equal requests."""
    rng = np.random.default_rng(seed)
    keys = count(s.system_prompts)
    shape = 1 / s.cv**2  # of a gamma distribution: mean 1, standard deviation cv
    found: list[Request] = []
    now = 0.0
    while len(found) < s.requests:
        _conversation(s, rng, keys, now, found)
        now += float(rng.gamma(shape, 1 / shape))
    return found


def _conversation(s: Synthetic, rng: np.random.Generator, keys: count[int], at_s: float, found: list[Request]) -> None:
    """Append the requests of one conversation; the prompt of a turn is all that was said before it."""
    said: list[tuple[int, int]] = []  # key, length
    if s.system_prompts:
        said.append((int(rng.integers(s.system_prompts)), s.system_len))
    long = bool(rng.random() < s.long_share)
    for turn in range(_pick(rng, s.turns)):
        if len(found) == s.requests:
            return
        said.append((next(keys), _pick(rng, s.long_len if long and turn == 0 else s.input_len)))
        output, length = next(keys), _pick(rng, s.output_len)
        pieces = np.array(said, np.int64)
        pause = at_s if turn == 0 else float(rng.exponential(s.think_s))
        follows = None if turn == 0 else len(found) - 1
        found.append(Request(pause, pieces[:, 0], pieces[:, 1], output, length, follows))
        said.append((output, length))


def _pick(rng: np.random.Generator, r: Range) -> int:
    return int(rng.integers(r[0], r[1] + 1))
