"""Routers: which of several engines takes a request. Torch-free; used by the simulator so far."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from minisgl.base.component import Component
from minisgl.base.types import I32


@dataclass(frozen=True, slots=True)
class RouterContext:
    """``replicas``: engines to choose from, >= 1; their number does not change. ``rng``: seeded; the only randomness a
    router may use."""

    settings: Any
    replicas: int
    rng: Random


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a router knows of one engine: the requests it was given that have not ended, and their prompt tokens together."""

    requests: int
    tokens: int


class Router(Component):
    """Sends each request to one engine. No I/O, no torch; deterministic given the calls and ``rng``."""

    @abstractmethod
    def __init__(self, ctx: RouterContext) -> None: ...

    @abstractmethod
    def route(self, ids: I32, namespace: bytes, loads: Sequence[ReplicaLoad]) -> int:
        """Choose an engine for a request, once, when it arrives.

        Args: ids: [num_tokens] int32, the prompt; copy what you keep. namespace: requests of different ones share no cached
            page. loads: of each engine.
        Returns: an index into ``loads``.
        Cost: O(num_tokens + engines).
        """
