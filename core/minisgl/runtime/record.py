"""CUDA graphs: calls that are recorded once and made again as one launch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
Pieced = Callable[[Callable[[], None]], None]  # calls what it is given wherever a piece ends and the next one begins


class Graph(Protocol):
    def replay(self) -> None: ...


class Pieces(Protocol):
    def replay(self, between: Callable[[int], None]) -> None:
        """Run the pieces in order, and ``between(i)`` after piece i, except after the last."""


class Recorder(Protocol):
    """Makes graphs of calls that work on tensors of fixed places."""

    def record(self, call: Callable[[], None]) -> Graph: ...

    def record_pieces(self, call: Pieced) -> Pieces: ...


@dataclass(frozen=True, slots=True)
class CudaPieces:
    graphs: list[torch.cuda.CUDAGraph]

    def replay(self, between: Callable[[int], None]) -> None:
        *first, last = self.graphs
        for i, graph in enumerate(first):
            graph.replay()
            between(i)
        last.replay()


class CudaRecorder:
    """All graphs share one memory pool: no two of them run at the same time, and none keeps anything in it for another, but for
    the pieces of one recording, which always run in their order."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, call: Callable[[], None]) -> Graph:
        return self.record_pieces(lambda cut: call()).graphs[0]

    def record_pieces(self, call: Pieced) -> CudaPieces:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would collect garbage before each of dozens of graphs
            begin()
            call(cut)
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CudaPieces(graphs)


class EagerRecorder:
    """Calls again what was recorded: what graphs do, where there are none."""

    @dataclass(frozen=True, slots=True)
    class Again:
        replay: Callable[[], None]

    @dataclass(frozen=True, slots=True)
    class PiecesAgain:
        call: Pieced

        def replay(self, between: Callable[[int], None]) -> None:
            numbers = count()
            self.call(lambda: between(next(numbers)))

    def record(self, call: Callable[[], None]) -> Graph:
        call()
        return self.Again(call)

    def record_pieces(self, call: Pieced) -> Pieces:
        call(lambda: None)
        return self.PiecesAgain(call)


class Captures(Generic[T]):
    """What was captured for some ``sizes`` of steps. A step takes that of the least size that it fits in."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sorted(sizes)
        self._made: dict[int, T] = {}

    @property
    def most(self) -> int:
        return self.sizes[-1]

    def make(self, what: str, capture: Callable[[int], T], progress: Callable[[str, int, int], None]) -> None:
        """All sizes, the largest first, since the smaller then fit into its memory. ``what``: how ``progress`` calls it."""
        for done, size in enumerate(reversed(self.sizes)):
            progress(what, done, len(self.sizes))
            self._made[size] = capture(size)
        progress(what, len(self.sizes), len(self.sizes))

    def fits(self, n: int) -> bool:
        return 0 < n <= self.most

    def of(self, n: int) -> T:
        return self._made[self.sizes[bisect_left(self.sizes, n)]]

    def values(self) -> Iterable[T]:
        return self._made.values()

    def clear(self) -> None:
        """Let the graphs go before what they read."""
        self._made.clear()
