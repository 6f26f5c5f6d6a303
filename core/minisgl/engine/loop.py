"""The step loop: in which order to take in requests, schedule, submit, collect and commit. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from minisgl.base.component import Component
from minisgl.base.types import StepPlan, StepResult


class Ticket:
    """A submitted step; executors subclass it."""

    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        self.step = step


class EngineOps(Protocol):
    """The engine's primitives."""

    @property
    def idle(self) -> bool:
        """Nothing is admitted and nothing is in flight."""
        ...

    def intake(self, block: bool) -> None:
        """Take in what has arrived; if ``block``, wait for something (bounded, so that a stop is seen)."""
        ...

    def schedule(self) -> StepPlan | None: ...
    def submit(self, plan: StepPlan) -> Ticket: ...
    def collect(self, t: Ticket) -> StepResult: ...
    def commit(self, r: StepResult) -> None:
        """In order of steps."""
        ...

    def flush(self) -> None:
        """Send queued outputs."""
        ...


@dataclass(frozen=True, slots=True)
class LoopContext:
    settings: Any


class StepLoop(Component):
    """``depth``: the most steps in flight at once; executors size their staging by it."""

    stability: ClassVar[Literal["stable", "experimental"]] = "stable"
    depth: ClassVar[int] = 1

    def __init__(self, ctx: LoopContext) -> None:
        self.settings = ctx.settings

    @abstractmethod
    def turn(self, e: EngineOps) -> None:
        """One pass. Called until the engine stops."""
