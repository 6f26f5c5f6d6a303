"""The scheduler policy: which requests take part in a step. It decides; it owns no memory. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, ClassVar, Literal, Protocol

from minisgl.base.component import Component
from minisgl.base.types import I32, Limits, ReqState

UNBOUNDED = 1 << 30


class ReqView(Protocol):
    """What a policy may know of a request. ``arrived``: arrival number, growing. ``ids``: known tokens (prompt; after a
    preemption also its output). ``left``: output tokens still to come. ``kv_len``: tokens whose KV is planned. ``key``: whose request it is."""

    @property
    def uid(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def key(self) -> str: ...
    @property
    def arrived(self) -> int: ...
    @property
    def ids(self) -> I32: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def max_new(self) -> int: ...
    @property
    def emitted(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def kv_len(self) -> int: ...
    @property
    def state(self) -> ReqState: ...


class SchedView(Protocol):
    """Read-only view of the engine's state. ``owed_tokens``: tokens that running rows may still put into the KV cache."""

    @property
    def step(self) -> int: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def evictable_pages(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def n_running(self) -> int: ...
    @property
    def n_decode(self) -> int: ...
    @property
    def owed_tokens(self) -> int: ...
    def waiting(self) -> Iterator[ReqView]:
        """Preempted requests first, then in order of arrival."""
        ...

    def prefilling(self) -> Iterator[ReqView]: ...
    def decoding(self) -> Iterator[ReqView]: ...
    def cached(self, r: ReqView) -> int:
        """Tokens of ``r`` that the cache holds now; memoized until the cache changes."""
        ...


class Deny(StrEnum):
    SLOTS = "no free slot"
    PAGES = "no free pages"
    BUDGET = "token budget used up"
    BUSY = "has work in flight or is not waiting for prefill"
    TWICE = "already in this step"
    SHARED = "shares a page with a prompt that is being prefilled; it will be cached"


@dataclass(frozen=True, slots=True)
class Grant:
    """True if tokens were granted. ``done``: the prompt's last token is among them."""

    tokens: int = 0
    done: bool = False
    deny: Deny | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


class StepBuilder(Protocol):
    """Builds the step. Every call is atomic: all or nothing."""

    @property
    def budget(self) -> int:
        """Tokens left in this step."""
        ...

    def prefill(self, r: ReqView, max_tokens: int = UNBOUNDED, reserve: float = 0.0) -> Grant:
        """Give ``r`` up to ``max_tokens`` tokens of prefill in this step; leases its prefix and a slot if it is waiting.

        A waiting request gets a row only if all its known tokens fit beside the known tokens of every running row, and
        beside them ``reserve`` (0 to 1) of the output that it and they may still produce. With 1.0 nothing admitted ever
        lacks a page; with less, decode rows may have to be preempted.
        """
        ...

    def decode(self, on: bool = True) -> None:
        """Whether the decode rows take part in this step."""
        ...

    def preempt(self, r: ReqView) -> bool:
        """Take its pages away and compute it again later, output unchanged. False if it has work in flight."""
        ...


@dataclass(frozen=True, slots=True)
class SchedContext:
    """``clock``: the logical step. ``rng``: seeded; the only randomness a policy may use."""

    settings: Any
    limits: Limits
    rng: Random
    clock: Callable[[], int]


class SchedulerPolicy(Component):
    """Called on the engine thread once per pass, before the result of the step in flight is known. No I/O, no torch.

    When nothing waits and nothing is prefilling, core plans the decode rows itself and does not call ``plan``. Starving a
    request is the policy's fault; corrupting pages is beyond its power.
    """

    stability: ClassVar[Literal["stable", "experimental"]] = "stable"

    @abstractmethod
    def __init__(self, ctx: SchedContext) -> None: ...

    def arrived(self, r: ReqView) -> None:
        """A request was admitted. O(1)."""

    def changed(self, r: ReqView, old: ReqState) -> None:
        """A request went from state ``old`` to ``r.state``. O(1)."""

    @abstractmethod
    def plan(self, v: SchedView, b: StepBuilder) -> None:
        """Choose what this step computes by calling ``b``."""

    def victim(self, v: SchedView) -> ReqView | None:
        """Whom to preempt when a decode row needs a page and none is left: by default the youngest of lowest priority."""
        return min(v.decoding(), key=lambda r: (r.priority, -r.arrived), default=None)
