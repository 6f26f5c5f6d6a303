"""One step at a time."""

from __future__ import annotations

from minisgl.api import EngineOps, StepLoop


class SyncLoop(StepLoop):
    """Each step is planned when the result of the one before is known."""

    depth = 1

    def turn(self, e: EngineOps) -> None:
        e.intake(block=e.idle)
        plan = e.schedule()
        if plan is not None:
            e.commit(e.collect(e.submit(plan)))
        e.flush()
