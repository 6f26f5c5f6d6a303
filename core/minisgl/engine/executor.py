"""The executor: runs step plans on a device, in this process or in others. Its surface is torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from minisgl.base.component import Component
from minisgl.base.facts import ModelFacts
from minisgl.base.progress import no_progress
from minisgl.base.types import Admit, ExecInfo, LocalModel, StepPlan, StepResult
from minisgl.engine.loop import Ticket

if TYPE_CHECKING:
    from minisgl.config.schema import Settings
    from minisgl.plugin.registry import Registry


@dataclass(frozen=True, slots=True)
class ExecContext:
    """``config``: all settings. ``loop_depth``: steps in flight. ``progress(what, done, total)``: for long starts, in bytes."""

    settings: Any
    config: Settings
    registry: Registry
    model: LocalModel
    facts: ModelFacts
    loop_depth: int
    progress: Callable[[str, int, int], None] = no_progress


@dataclass(frozen=True, slots=True)
class ExecHealth:
    """``ok`` is False after a fault; ``step``: last finished."""

    ok: bool
    step: int
    detail: str = ""


class Executor(Component):
    """``needs_weights``: False for simulated devices; the model source then fetches no weights, and no model plugin is loaded."""

    needs_weights: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, ctx: ExecContext) -> None: ...

    @abstractmethod
    def start(self) -> ExecInfo:
        """Load the model and allocate. Raises: Fault, ModelError, CapacityError, PluginError."""

    def check(self, extra: Mapping[str, Any]) -> None:
        """Look at a request's parameters of logits processors, by their names, before it is admitted.

        Raises: RequestError for those that a processor refuses.
        """

    def prepare(self, admit: Admit) -> Future[None] | None:
        """Begin what this request needs before its first step and takes too long to hold up a step. None: there is nothing.

        The request is admitted when it is done.
        """
        return None

    @abstractmethod
    def submit(self, plan: StepPlan) -> Ticket:
        """Hand over a step; plans come gap-free and in order. Does not wait for the device."""

    @abstractmethod
    def collect(self, ticket: Ticket, timeout: float) -> StepResult:
        """Wait for a step, in order. Raises: Fault after ``timeout`` seconds, or what the step raised."""

    @abstractmethod
    def health(self) -> ExecHealth: ...

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Free everything within ``grace`` seconds; idempotent."""
