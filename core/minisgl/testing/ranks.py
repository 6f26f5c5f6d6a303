"""Several ranks of one model in threads of this process: tests of tensor parallelism without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from minisgl.runtime.comm import Comm, along

T = TypeVar("T")
_TIMEOUT = 60.0  # seconds that a rank waits for the others


class ThreadComm(Comm):
    """One of the ranks that ``run_ranks`` starts. Tensors are handed over in ``board``, between two barriers."""

    def __init__(self, rank: int, board: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._all(x).sum(0, dtype=x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return along(self._all(x), dim)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._all(x)[0].clone()

    def _all(self, x: Tensor) -> Tensor:
        """Returns: the tensors of all ranks, [ranks, ...], a copy of this rank's own."""
        self._board[self.rank] = x
        self._barrier.wait()
        shown = [t for t in self._board if t is not None]
        same = {(tuple(t.shape), t.dtype) for t in shown}
        assert len(same) == 1, f"ranks do not call the same: {[(tuple(t.shape), t.dtype) for t in shown]}"
        whole = torch.stack(shown)
        self._barrier.wait()  # until all have their copy, the tensors stay as they are
        return whole


def run_ranks(size: int, rank_main: Callable[[Comm], T]) -> list[T]:
    """Run ``rank_main`` in ``size`` threads, each with its own ``Comm``. Returns: their results, by rank.

    Raises: what the first rank to fail raised; the others stop at their next call.
    """
    board: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size, timeout=_TIMEOUT)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = rank_main(ThreadComm(rank, board, barrier))
        except threading.BrokenBarrierError as exc:
            errors.append(exc)
        except BaseException as exc:
            errors.insert(0, exc)  # before the broken barriers that it causes
            barrier.abort()

    threads = [threading.Thread(target=main, args=(r,), name=f"rank-{r}") for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return [results[r] for r in range(size)]
