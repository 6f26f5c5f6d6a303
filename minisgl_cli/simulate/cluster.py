"""Several simulated engines behind a router, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minisgl.base.errors import PluginError
from minisgl.base.types import I32, EngineOutput, Limits
from minisgl.client.router import Router
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl_cli.simulate.cost import Cost
from minisgl_cli.simulate.measure import Recorder
from minisgl_cli.simulate.replica import Replica
from minisgl_cli.simulate.workload import Request


@dataclass(frozen=True, slots=True)
class World:
    """What is the same for all policies that are compared."""

    registry: Registry
    limits: Limits
    cost: Cost
    replicas: int


class Cluster:
    """Plays requests into engines. Each has its own clock; the one that is furthest behind goes on, and a request is routed
    when every busy engine has reached its arrival, so that routers see loads of that time."""

    def __init__(self, world: World, settings: Settings, router: Router | None, requests: Sequence[Request]) -> None:
        self.requests, self.router = requests, router
        self.recorder = Recorder(len(requests))
        self.replicas = [
            Replica(settings, world.registry, world.limits, world.cost, requests, self._take)
            for _ in range(world.replicas)
        ]
        self._due = [(r.at_s, uid) for uid, r in enumerate(requests) if r.follows is None]
        heapq.heapify(self._due)
        self._followers: dict[int, list[int]] = {}
        for uid, r in enumerate(requests):
            if r.follows is not None:
                self._followers.setdefault(r.follows, []).append(uid)

    def run(self) -> dict[str, Any]:
        """Until every request has ended. Returns: the recorder's summary, with ``hit_rate`` (prompt tokens from the cache over
        all), ``preemptions``, ``busy`` (share of the time in which devices computed), ``steps``, and ``unsent`` (requests that follow one that did not end well)."""
        while True:
            next_at = self._due[0][0] if self._due else float("inf")
            behind = min(
                (r for r in self.replicas if not r.idle and r.clock.now < next_at),
                key=lambda r: r.clock.now,
                default=None,
            )
            if behind is not None:
                behind.turn()
            elif self._due:
                self._arrive(*heapq.heappop(self._due))
            else:
                return self._summary()

    def _arrive(self, at_s: float, uid: int) -> None:
        r = self.requests[uid]
        prompt = r.prompt()
        self.recorder.arrived[uid] = at_s
        self.replicas[self._route(prompt)].deliver(uid, prompt, r.output_len, at_s)

    def _route(self, prompt: I32) -> int:
        if self.router is None:
            return 0
        n = len(self.replicas)
        chosen = self.router.route(prompt, b"", [replica.load for replica in self.replicas])
        if not (isinstance(chosen, int) and 0 <= chosen < n):
            kind = type(self.router)
            raise PluginError(
                f"router {kind.__module__}.{kind.__qualname__} chose {chosen!r}; an index from 0 to {n - 1} is needed"
            )
        return chosen

    def _take(self, outputs: Sequence[EngineOutput], now: float) -> None:
        for uid in self.recorder.take(outputs, now):
            for follower in self._followers.get(uid, ()):
                heapq.heappush(self._due, (now + self.requests[follower].at_s, follower))

    def _summary(self) -> dict[str, Any]:
        summary = self.recorder.summary()
        counts = [r.engine.scheduler.counts() for r in self.replicas]
        total = partial(_total, counts)
        prompt = total("prompt_tokens_total")
        device = sum(r.executor.busy_s for r in self.replicas)
        return summary | {
            "hit_rate": total("cached_tokens_total") / prompt if prompt else 0.0,
            "preemptions": total("preemptions"),
            "unsent": int(np.isnan(self.recorder.arrived).sum()),
            "busy": device / summary["seconds"] / len(self.replicas) if summary["seconds"] else 0.0,
            "steps": sum(r.engine.scheduler.step for r in self.replicas),
        }


def _total(counts: Sequence[Any], key: str) -> int:
    return sum(int(c[key]) for c in counts)
