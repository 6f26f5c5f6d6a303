"""Plays requests against a server at their times, and sums up the answers."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minisgl.base.types import I64
from minisgl_cli.bench.client import Answer, Target, ask, completion
from minisgl_cli.simulate.measure import spread
from minisgl_cli.simulate.workload import Request

LEAD_S = 0.05  # from the start of the clock to the first request: all tasks are waiting by then


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests share. Prompt tokens are below ``vocab``."""

    to: Target
    model: str
    vocab: int
    temperature: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds: of the time to the first token, and of the mean time between tokens; None: any."""

    ttft_ms: float | None
    itl_ms: float | None

    def met(self, ttft_s: float, gaps: Sequence[float]) -> bool:
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        return (self.ttft_ms is None or ttft_s * 1e3 <= self.ttft_ms) and (
            self.itl_ms is None or mean * 1e3 <= self.itl_ms
        )


@dataclass(frozen=True, slots=True)
class Played:
    """``answers`` in the order of the requests; ``cpu_s``: processor time of this process meanwhile."""

    answers: list[Answer]
    cpu_s: float


def renamed(requests: Sequence[Request], serial: int) -> list[Request]:
    """The same requests with other tokens, shared as before: what an earlier run left in a cache is of no use to them."""
    offset = np.array(serial, np.int64) << np.int64(40)
    keys: list[I64] = [r.keys + offset for r in requests]
    return [replace(r, keys=k) for r, k in zip(requests, keys, strict=True)]


def play(requests: Sequence[Request], asking: Asking) -> Played:
    """Send each request when it is due; bodies are made before the clock starts."""
    _allow_connections()
    bodies = [
        completion(asking.model, (r.prompt() % asking.vocab).tolist(), r.output_len, asking.temperature)
        for r in requests
    ]
    cpu = time.process_time()
    answers = asyncio.run(_play(requests, bodies, asking))
    return Played(answers, time.process_time() - cpu)


async def _play(requests: Sequence[Request], bodies: Sequence[bytes], asking: Asking) -> list[Answer]:
    start = time.perf_counter() + LEAD_S
    ended = [asyncio.Event() for _ in requests]

    async def one(i: int) -> Answer:
        request, due = requests[i], start
        if request.follows is not None:
            await ended[request.follows].wait()
            due = time.perf_counter()
        answer = Answer(due + request.at_s)
        await asyncio.sleep(answer.due_s - time.perf_counter())
        await ask(asking.to, bodies[i], answer, asking.timeout_s)
        ended[i].set()
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(len(requests))]
    return [task.result() for task in tasks]


def _allow_connections() -> None:
    """Each open request is a file descriptor; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def summary(played: Played, requests: Sequence[Request], slo: Slo) -> dict[str, Any]:
    """Latencies in seconds, of the requests that were answered whole; None where there is none. ``goodput_per_s``: those within
    the limits, per second. ``client``: what this side adds."""
    done = [a for a in played.answers if not a.error]
    failures = Counter(a.error for a in played.answers if a.error)
    sent = np.array([a.sent_s for a in played.answers])
    seconds = max(a.end_s for a in played.answers) - float(sent.min())
    times = [a.times() for a in done]
    gaps = [gap for _, more in times for gap in more]
    output = sum(a.tokens for a in done)
    prompt = sum(r.input_len for r, a in zip(requests, played.answers, strict=True) if not a.error)
    return {
        "requests": len(done),
        "failed": len(played.answers) - len(done),
        "failures": dict(failures.most_common(3)),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "prompt_tokens_per_s": prompt / seconds,
        "output_tokens_per_s": output / seconds,
        "goodput_per_s": sum(slo.met(*t) for t in times) / seconds,
        "ttft_s": spread(np.array([first for first, _ in times])),
        "itl_s": spread(np.array(gaps)),
        "e2e_s": spread(np.array([a.end_s - a.sent_s for a in done])),
        "client": {
            "cpu_s": played.cpu_s,
            "cpu_share": played.cpu_s / seconds,
            "us_per_token": played.cpu_s / output * 1e6 if output else None,
            "late_s": spread(sent - np.array([a.due_s for a in played.answers])),
        },
    }
