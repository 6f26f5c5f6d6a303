"""The engine with the fewest open requests."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.api import I32, ReplicaLoad, Router, RouterContext


class LeastLoadedRouter(Router):
    """Fewest open requests; among equals fewest prompt tokens, then the lowest index."""

    def __init__(self, ctx: RouterContext) -> None: ...

    def route(self, ids: I32, namespace: bytes, loads: Sequence[ReplicaLoad]) -> int:
        return min(range(len(loads)), key=lambda i: (loads[i].requests, loads[i].tokens, i))
