"""An engine around a Scheduler and the Simulator: it runs real step loops and keeps what came out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any, TypeVar

import numpy as np

from minisgl.base.component import Component
from minisgl.base.types import Admit, Ended, Limits, Refused, Scores, StepPlan, StepResult, Tokens
from minisgl.engine.loop import StepLoop, Ticket
from minisgl.engine.port import Abort
from minisgl.sched.cache import CacheContext, CachePolicy
from minisgl.sched.policy import SchedContext, SchedulerPolicy
from minisgl.sched.scheduler import Scheduler
from minisgl.sched.validator import PlanValidator
from minisgl.testing.simulator import Simulator, mix, score

MakeCache = Callable[[CacheContext], CachePolicy]
MakePolicy = Callable[[SchedContext], SchedulerPolicy]


C = TypeVar("C", bound=Component)


def build(cls: type[C], **settings: Any) -> Callable[[Any], C]:
    """A maker of ``cls`` with these settings, for SimEngine."""
    return lambda ctx: cls(replace(ctx, settings=cls.Settings(**settings)))  # type: ignore[call-arg]


def check_types(plan: StepPlan) -> None:
    """Raises: AssertionError if an array is not of the type that the device reads."""
    arrays = [plan.retire, plan.grow_slot, plan.grow_at, plan.grow_page, plan.order_pos, plan.order_slot]
    for array in [*arrays, *(i.ids for i in plan.init), *(i.pages for i in plan.init)]:
        assert array.dtype == np.int32, f"{array.dtype} in {plan}, expected int32"


class SimTicket(Ticket):
    __slots__ = ("result",)

    def __init__(self, result: StepResult) -> None:
        super().__init__(result.step)
        self.result = result


class SimEngine:
    """The EngineOps that a loop drives. ``inbox``: what arrives at the next intake. ``tokens``, ``ended``, ``refused``: what
    came out, by uid. Every plan is validated, and after every change all pages and rows are audited."""

    def __init__(self, limits: Limits, cache: MakeCache, policy: MakePolicy, loop: StepLoop, seed: int = 0) -> None:
        self.limits = limits
        built: list[Scheduler] = []

        def clock() -> int:
            return built[0].step if built else 0

        self.cache = cache(CacheContext(limits.page_size, limits.num_pages, None, clock))
        self.policy = policy(SchedContext(None, limits, Random(seed), clock))
        self.scheduler = Scheduler(limits, self.cache, self.policy)
        built.append(self.scheduler)
        self.loop, self.device, self.validator = loop, Simulator(limits), PlanValidator(limits)
        self.validator.committed(-1)
        self.inbox: deque[Admit | Abort] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.owners: dict[int, int] = {}
        self.admits: dict[int, Admit] = {}
        self.scores: dict[int, dict[int, tuple[int, float]]] = {}  # by uid and position: token and log probability
        self.ended: dict[int, Ended] = {}
        self.refused: dict[int, Refused] = {}
        self.plans: list[StepPlan] = []
        self.max_in_flight = 0
        self._flying: deque[int] = deque()
        self._to_commit: deque[int] = deque()

    # ---------------------------------------------------------------------------------------------------- EngineOps

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._flying

    def intake(self, block: bool) -> None:
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, Admit):
                self._admit(item)
            else:
                for uid in item.uids:
                    self.scheduler.abort(uid)
            self.scheduler.audit()
        self.flush()

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.audit()
        return plan

    def submit(self, plan: StepPlan) -> Ticket:
        self.validator.check(plan)
        check_types(plan)
        self.plans.append(plan)
        self._flying.append(plan.step)
        self.max_in_flight = max(self.max_in_flight, len(self._flying))
        assert len(self._flying) <= self.loop.depth, f"{len(self._flying)} steps in flight, depth is {self.loop.depth}"
        return SimTicket(self.device.run(plan))

    def collect(self, t: Ticket) -> StepResult:
        assert isinstance(t, SimTicket), f"collected {t!r}, which submit() did not return"
        assert self._flying[0] == t.step, f"collected step {t.step}, the oldest in flight is {self._flying[0]}"
        self._to_commit.append(self._flying.popleft())
        return t.result

    def commit(self, r: StepResult) -> None:
        assert self._to_commit.popleft() == r.step, f"committed step {r.step} before it was collected"
        self.scheduler.commit(r)
        self.validator.committed(r.step)
        self.scheduler.audit()

    def flush(self) -> None:
        for owner, outputs in self.scheduler.take_outputs().items():
            for output in outputs:
                if isinstance(output, Scores):
                    self._scored(owner, output)
                elif isinstance(output, Tokens):
                    assert output.uids.dtype == np.int64, output
                    assert output.tokens.dtype == np.int32, output
                    for uid, token in zip(output.uids.tolist(), output.tokens.tolist()):
                        assert uid not in self.ended, f"I9: a token of request {uid} after its end"
                        assert self.owners[uid] == owner, f"request {uid} of {self.owners[uid]} sent to {owner}"
                        self.tokens[uid].append(token)
                        self._check_scores(self.admits[uid])
                elif isinstance(output, Ended):
                    assert output.uid not in self.ended, f"request {output.uid} ended twice"
                    assert self.owners[output.uid] == owner, f"end of {output.uid} sent to {owner}"
                    self.ended[output.uid] = output

    def _scored(self, owner: int, scores: Scores) -> None:
        b = scores.block
        for i, position, token, logprob in zip(
            b.row.tolist(), b.position.tolist(), b.token.tolist(), b.logprob.tolist()
        ):
            uid = int(scores.uids[i])
            assert uid not in self.ended, f"I9: a score of request {uid} after its end"
            assert self.owners[uid] == owner, f"request {uid} of {self.owners[uid]} scored to {owner}"
            self.scores[uid][position] = token, logprob

    def _check_scores(self, a: Admit) -> None:
        """With a token, all that is wanted of it and of the prompt has come."""
        known = [*a.ids.tolist(), *self.tokens[a.uid]]
        wanted = [] if a.sampling.prompt_logprobs is None else list(range(1, len(a.ids)))
        wanted += [] if a.sampling.logprobs is None else list(range(len(a.ids), len(known)))
        hashes = list(accumulate(known, mix, initial=0))
        for at in wanted:
            got, want = self.scores[a.uid].get(at), (known[at], score(hashes[at], known[at]))
            assert got == want, f"request {a.uid}: token {at} is scored {got}, expected {want}"

    # ------------------------------------------------------------------------------------------------------- driving

    def turn(self) -> None:
        self.loop.turn(self)

    def run(self, turns: int = 100_000) -> None:
        """Turn until nothing is left to do. Raises: AssertionError after ``turns`` turns."""
        for _ in range(turns):
            if self.idle and not self.inbox:
                return
            self.turn()
        raise AssertionError(f"not done after {turns} turns: {dict(self.scheduler.counts())}")

    def _admit(self, a: Admit) -> None:
        refused = self.scheduler.admit(a)
        if refused is not None:
            self.refused[a.uid] = refused
        else:
            self.tokens[a.uid], self.owners[a.uid] = [], a.owner
            self.admits[a.uid], self.scores[a.uid] = replace(a, ids=a.ids.copy()), {}
