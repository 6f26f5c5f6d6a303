"""Each engine in turn, whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.api import I32, ReplicaLoad, Router, RouterContext


class RoundRobinRouter(Router):
    """The first request goes to engine 0, the next to engine 1, and so on."""

    def __init__(self, ctx: RouterContext) -> None:
        self._next = 0

    def route(self, ids: I32, namespace: bytes, loads: Sequence[ReplicaLoad]) -> int:
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen
