"""``minisgl bench step``: what one decode step costs the device and the host, and what graphs, changes, sampling and a prompt in the
same step add."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.base.errors import ConfigError
from minisgl.base.types import I32, NO_PAGES, RowInit, SamplingSpec, Span, StepPlan
from minisgl_cli.bench.host import number, numbers
from minisgl_cli.bench.report import json_line, table
from minisgl_cli.options import parse, set_logging

if TYPE_CHECKING:
    from minisgl.runtime.worker import Worker

SAMPLING = {
    "greedy": SamplingSpec(temperature=0.0, max_new=1 << 20),
    "temperature": SamplingSpec(temperature=0.6, max_new=1 << 20),
    "top-p": SamplingSpec(temperature=0.6, top_p=0.9, max_new=1 << 20),
}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=numbers, default=(1, 64, 256), metavar="N,N", help="rows that decode (1,64,256)")
    parser.add_argument(
        "--context", type=number, default=1024, metavar="N", help="tokens of KV of each row at first (1024)"
    )
    parser.add_argument("--steps", type=number, default=50, metavar="N", help="steps measured of each (50)")
    parser.add_argument(
        "--prompt", type=number, default=0, metavar="N", help="also steps that a prompt of N tokens takes part in"
    )


def run(argv: list[str]) -> int:
    """Measure and report; returns the exit code."""
    loaded, registry, hooks, args = parse(argv, verb="bench step", extra=arguments)
    set_logging(loaded)
    from minisgl.engine.build import model_facts
    from minisgl.nn import build_worker
    from minisgl.text.resolve import resolve_model

    settings = loaded.settings
    local = resolve_model(settings, registry, hooks, weights=settings.weights.format != "dummy")
    worker = build_worker(settings, registry, local, model_facts(registry, local), depth=2)
    rows = []
    try:
        check_room(worker, args.rows, args.context + 2 * args.steps + 2, args.prompt)
        for n in args.rows:
            rows += measure_rows(worker, n, args.context, args.steps)
            if args.prompt:
                rows += measure_prompt(worker, n, args.context, args.steps, args.prompt)
    finally:
        worker.close()
    info = worker.info
    table(f"bench step: {local.name} on {info.device}, {' '.join(f'{k}={v}' for k, v in info.picks.items())}", rows)
    json_line("step", model=local.name, device=info.device, dtype=info.dtype, picks=dict(info.picks), rows=rows)
    return 0


def check_room(worker: Worker, rows: Sequence[int], length: int, prompt: int) -> None:
    """Raises: ConfigError if a case does not fit."""
    info, n = worker.info, max(rows)
    if n > info.max_slots:
        raise ConfigError(f"--rows {n} is more than limits.max_running = {info.max_slots}; raise that")
    if prompt and n == info.max_slots:
        raise ConfigError(f"--rows {n} leave no row of limits.max_running = {n} for --prompt; raise that")
    if length > info.max_len:
        raise ConfigError(f"--context and 2 x --steps are {length} tokens; a row can have {info.max_len}")
    if prompt and prompt > min(info.max_len - 1, info.batch_tokens - n):
        raise ConfigError(
            f"--prompt {prompt} beside {n} rows is more than limits.batch_tokens = {info.batch_tokens}, or than the context, "
            f"{info.max_len} tokens"
        )
    pages = n * -(-length // info.page_size) + -(-prompt // info.page_size)
    if pages > info.num_pages:
        raise ConfigError(f"{n} rows of {length} tokens need {pages} KV pages; there are {info.num_pages}")


def measure_rows(worker: Worker, n: int, context: int, steps: int) -> list[dict[str, Any]]:
    """The cases for ``n`` rows, each a row of the table."""
    found = []
    for sampling, spec in SAMPLING.items():
        cases: list[tuple[str, str, Callable[[], Any]]] = [("graph", "none", nullcontext)]
        if sampling == "temperature":
            cases += [
                ("graph", "a page of each row", nullcontext),
                ("layers only", "none", lambda: sampling_outside(worker)),
                ("no", "none", lambda: graphs_off(worker)),
            ]
        for graphs, changes, context_of in cases:
            if worker.graphs is None and graphs != "no":
                if sampling == "temperature" or changes != "none":
                    continue
                graphs = "no"
            driver = Driver(worker, n, context, spec)
            driver.start(2 * steps + 2)  # every case begins with the same context
            with context_of():
                cost = driver.measure(steps, changes != "none")
            found.append({"rows": n, "sampling": sampling, "graph": graphs, "changes": changes, **cost})
    return found


def measure_prompt(worker: Worker, n: int, context: int, steps: int, prompt: int) -> list[dict[str, Any]]:
    """The cases of ``n`` rows and one prompt a step: in piecewise graphs, where there are such, and without."""
    found = []
    pieces = worker.piecewise is not None and worker.piecewise.fits(n + prompt)
    for graphs in ("pieces", "no") if pieces else ("no",):
        driver = Driver(worker, n, context, SAMPLING["temperature"], prompt)
        driver.start(2 * steps + 2)
        with nullcontext() if graphs == "pieces" else graphs_off(worker):
            cost = driver.measure(steps, changes=False)
        changes = f"a prompt of {prompt} tokens"
        found.append({"rows": n, "sampling": "temperature", "graph": graphs, "changes": changes, **cost})
    return found


@contextmanager
def graphs_off(worker: Worker) -> Iterator[None]:
    kept = worker.graphs, worker.piecewise
    worker.graphs = worker.piecewise = None
    try:
        yield
    finally:
        worker.graphs, worker.piecewise = kept


@contextmanager
def sampling_outside(worker: Worker) -> Iterator[None]:
    """The layers come from the graph, the head and the sampler are launched one by one."""
    plain, worker.sampler.plain = worker.sampler.plain, lambda h_slot: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        worker.sampler.plain = plain  # type: ignore[method-assign]


@dataclass(slots=True)
class Driver:
    """``n`` rows that decode for ever; in each step a prompt of ``prompt`` tokens, if any, comes and goes. ``launch_us``,
    ``refresh_us``: of each step, what the host spent in all and in the attention backend's refresh."""

    worker: Worker
    n: int
    context: int
    sampling: SamplingSpec
    prompt: int = 0
    refresh_us: list[float] = field(default_factory=list)
    _pages: I32 = field(default_factory=lambda: NO_PAGES)  # of the prompt

    def start(self, room: int) -> None:
        """Rows whose KV of ``context`` tokens is taken as there, in pages of their own, with ``room`` more tokens."""
        each = -(-(self.context + room) // self.worker.info.page_size)
        init = tuple(
            RowInit(
                i, i, self.context - 1, np.array([1], np.int32), np.arange(i * each, (i + 1) * each, dtype=np.int32),
                self.sampling, 0, self.sampling.max_new,
            )
            for i in range(self.n)
        )  # fmt: skip
        self._run(self._plan(init=init, spans=tuple(Span(i, 1, True) for i in range(self.n))))
        every = np.arange(self.n, dtype=np.int32)
        self._run(self._plan(order=(every, every), n_decode=self.n))
        self._pages = np.arange(-(-self.prompt // self.worker.info.page_size), dtype=np.int32) + self.n * each

    def measure(self, steps: int, changes: bool) -> dict[str, float]:
        """Returns: ``ms``: of a step while two are in flight; ``host_us``: of a launch while the device is idle; of it
        ``refresh_us``: the attention backend's."""
        grow = self._same_pages() if changes else None
        with self._timed_refresh():
            launches = []
            for _ in range(steps):
                synchronize(self.worker)
                began = time.perf_counter()
                pending = self.worker.launch(self._next(grow))
                launches.append(time.perf_counter() - began)
                pending.result()
        synchronize(self.worker)
        began = time.perf_counter()
        last = None
        for _ in range(steps):
            pending = self.worker.launch(self._next(grow))
            if last is not None:
                last.result()
            last = pending
        synchronize(self.worker)
        whole = (time.perf_counter() - began) / steps
        return {
            "ms": 1e3 * whole,
            "host_us": 1e6 * median(launches),
            "refresh_us": median(self.refresh_us) if self.refresh_us else 0.0,
        }

    def _next(self, grow: tuple[Any, Any, Any] | None) -> StepPlan:
        if not self.prompt:
            return self._plan(grow=grow, n_decode=self.n)
        ids = np.full(self.prompt, 1, np.int32)
        row = RowInit(self.n, self.n, 0, ids, self._pages, self.sampling, 0, self.sampling.max_new)
        return self._plan(init=(row,), spans=(Span(self.n, self.prompt, True),), n_decode=self.n)

    def _same_pages(self) -> tuple[Any, Any, Any]:
        """A change for each row, which writes the page that is there already."""
        every = np.arange(self.n, dtype=np.int32)
        first = np.zeros(self.n, np.int32)
        return every, first, self.worker.rows.page_table[every, first].copy()

    @contextmanager
    def _timed_refresh(self) -> Iterator[None]:
        self.refresh_us = []
        backend = self.worker.attention
        refresh = backend.graph_refresh

        def timed(meta: Any, b: Any) -> None:
            began = time.perf_counter()
            refresh(meta, b)
            self.refresh_us.append(1e6 * (time.perf_counter() - began))

        backend.graph_refresh = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            backend.graph_refresh = refresh  # type: ignore[method-assign]

    def _run(self, plan: StepPlan) -> None:
        self.worker.run(plan)

    def _plan(
        self,
        init: tuple[RowInit, ...] = (),
        spans: tuple[Span, ...] = (),
        order: tuple[Any, Any] = (NO_PAGES, NO_PAGES),
        grow: tuple[Any, Any, Any] | None = None,
        n_decode: int = 0,
    ) -> StepPlan:
        slot, at, page = grow or (NO_PAGES, NO_PAGES, NO_PAGES)
        return StepPlan(self.worker.step, NO_PAGES, init, slot, at, page, *order, n_decode, spans)


def synchronize(worker: Worker) -> None:
    if worker.device.type == "cuda":
        import torch

        torch.cuda.synchronize(worker.device)
