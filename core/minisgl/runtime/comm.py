"""What the ranks of one model tell one another. Every rank makes the same calls in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Comm(ABC):
    """The ranks that share a model. It is passed to who needs it; a process may be in several."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Args: x: of one shape on all ranks; may be overwritten. Returns: the sum, the same to the bit on all ranks."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Args: x: of one shape on all ranks. Returns: those of all ranks, in their order, one after the other along ``dim``."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Args: x: of one shape on all ranks; overwritten on all but rank 0. Returns: rank 0's."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Gives back threads and connections. The last call; harmless twice."""


class NoComm(Comm):
    """One rank. Layers of a model on one device do not even call it."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


class TorchComm(Comm):
    """Over a process group of torch.distributed: gloo between CPUs, NCCL between GPUs. The group need not be registered with
    torch, so that a process can be in several unrelated ones. With NCCL calls are enqueued on the current stream. It owns the
    group: a gloo group that outlives the interpreter's end terminates the process, so ``close`` lets go of it."""

    def __init__(self, group: Any) -> None:
        """Args: group: a ``torch.distributed.ProcessGroup`` or one of its backends."""
        self._group = group
        self.rank, self.size = int(group.rank()), int(group.size())

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        whole = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._group._allgather_base(whole, x.contiguous()).wait()  # what dist.all_gather_into_tensor calls
        return along(whole.view(self.size, *x.shape), dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.broadcast(x, 0).wait()
        return x

    def close(self) -> None:
        self._group = None


def along(whole: Tensor, dim: int) -> Tensor:
    """Args: whole: [ranks, ...]. Returns: the ranks' tensors one after the other along their dimension ``dim``."""
    return whole.movedim(0, dim).flatten(dim, dim + 1)
