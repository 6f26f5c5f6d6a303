"""How an engine and its text workers reach one another: over sockets, or in one process. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from minisgl.base.types import Admit, EngineOutput


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests; unknown uids have no effect."""

    uids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Control:
    """Run ``op`` ("flush_cache", "stats", ...) between steps and answer with ``reply(json bytes)``."""

    op: str
    reply: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the main loop after the current pass."""


EngineInput = Admit | Abort | Control | Stop


class EnginePort(Protocol):
    def receive(self, timeout_ms: int) -> Sequence[EngineInput]:
        """All that has arrived; waits up to ``timeout_ms`` for the first, 0 does not wait."""
        ...

    def send(self, owner: int, outputs: Sequence[EngineOutput]) -> None:
        """To one text worker. Never blocks."""
        ...


class LocalPort:
    """Both ends in one process and one thread: the caller puts inputs in and takes outputs out."""

    def __init__(self) -> None:
        self.inputs: deque[EngineInput] = deque()
        self.outputs: deque[EngineOutput] = deque()

    def receive(self, timeout_ms: int) -> Sequence[EngineInput]:
        taken = list(self.inputs)
        self.inputs.clear()
        return taken

    def send(self, owner: int, outputs: Sequence[EngineOutput]) -> None:
        self.outputs.extend(outputs)
