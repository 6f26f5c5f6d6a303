"""The simulated device: it carries plans out on a clock of its own and answers the tokens that the workload says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from minisgl.api import ExecHealth, ExecInfo, Executor, Limits, StepPlan, StepResult, Ticket
from minisgl.base.types import I32, I64
from minisgl_cli.simulate.cost import Cost, Work
from minisgl_cli.simulate.workload import Request, tokens_of


class Clock:
    """``now``: seconds since the start of the simulation, as an engine's host sees it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class Meter:
    """Follows the rows of a device from plans alone, and says how much work each plan is."""

    def __init__(self, max_slots: int) -> None:
        self.kv: I64 = np.zeros(max_slots, np.int64)  # by slot: tokens whose KV is computed
        self.uid: I64 = np.zeros(max_slots, np.int64)
        self.emitted: I64 = np.zeros(max_slots, np.int64)
        self._order: I32 = np.zeros(max_slots, np.int32)

    def run(self, plan: StepPlan) -> tuple[Work, I32]:
        """Apply ``plan``. Returns: its work, and the slots that sample, in the order of results."""
        for init in plan.init:
            self.kv[init.slot], self.uid[init.slot], self.emitted[init.slot] = init.kv_len, init.uid, init.emitted
        self._order[plan.order_pos] = plan.order_slot
        decode = self._order[: plan.n_decode]
        self.kv[decode] += 1
        kv = int(self.kv[decode].sum())  # a decoded token attends to all of its row, itself included
        decode_pairs, pairs = kv, 0
        sampling = [span.slot for span in plan.spans if span.sample]
        for span in plan.spans:
            before = int(self.kv[span.slot])
            self.kv[span.slot] = before + span.n_new
            kv += before + span.n_new
            pairs += span.n_new * before + span.n_new * (span.n_new + 1) // 2
        slots = np.concatenate([decode, np.array(sampling, np.int32)])
        return Work(plan.num_tokens, kv, decode_pairs + pairs, len(slots), plan.n_decode, pairs), slots


class SimTicket(Ticket):
    """``done``: when the device has finished the step, on the clock."""

    __slots__ = ("done", "result")

    def __init__(self, result: StepResult, done: float) -> None:
        super().__init__(result.step)
        self.result, self.done = result, done


class SimExecutor(Executor):
    """Steps run one after another on the device. ``submit`` takes the host's time for a step, ``collect`` waits for its end:
    a loop that submits the next step first hides the host's work behind the device's."""

    needs_weights = False

    def __init__(self, limits: Limits, cost: Cost, clock: Clock, requests: Sequence[Request]) -> None:
        self.limits, self.cost, self.clock = limits, cost, clock
        self.busy_s = 0.0
        self._meter = Meter(limits.max_slots)
        self._outputs: I64 = np.array([r.output_key for r in requests], np.int64)  # by uid
        self._free_at = 0.0
        self._flying: deque[SimTicket] = deque()
        self._done = -1

    def start(self) -> ExecInfo:
        x = self.limits
        return ExecInfo(
            x.num_pages, x.page_size, x.max_slots, x.max_len, x.batch_tokens, 1 << 31, "simulated", "none", 0
        )

    def submit(self, plan: StepPlan) -> Ticket:
        work, slots = self._meter.run(plan)
        self.clock.now += self.cost.host_s
        seconds = self.cost.seconds(work)
        self._free_at = max(self._free_at, self.clock.now) + seconds
        self.busy_s += seconds
        tokens = tokens_of(self._outputs[self._meter.uid[slots]], self._meter.emitted[slots])
        self._meter.emitted[slots] += 1
        ticket = SimTicket(StepResult(plan.step, tokens, np.zeros(len(slots), np.bool_)), self._free_at)
        self._flying.append(ticket)
        return ticket

    def collect(self, ticket: Ticket, timeout: float) -> StepResult:
        due = self._flying.popleft()
        assert due is ticket, f"step {ticket.step} collected where {due.step} was due"
        self.clock.now = max(self.clock.now, due.done)
        self._done = due.step
        return due.result

    def health(self) -> ExecHealth:
        return ExecHealth(True, self._done)

    def stop(self, grace: float) -> None:
        self._flying.clear()
