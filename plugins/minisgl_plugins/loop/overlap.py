"""Two steps in flight: the device computes one while the host takes in the one before."""

from __future__ import annotations

from minisgl.api import EngineOps, LoopContext, StepLoop, Ticket


class OverlapLoop(StepLoop):
    """Each step is planned and submitted before the result of the one before is looked at.

    A stop token is therefore seen one step late; the scheduler drops that row's extra token.
    """

    depth = 2

    def __init__(self, ctx: LoopContext) -> None:
        super().__init__(ctx)
        self._last: Ticket | None = None

    def turn(self, e: EngineOps) -> None:
        e.intake(block=e.idle and self._last is None)
        plan = e.schedule()
        ticket = None if plan is None else e.submit(plan)
        if self._last is not None:
            e.commit(e.collect(self._last))
        self._last = ticket
        e.flush()
