"""An observer that keeps what the engine says of each step, for tests that count."""

from __future__ import annotations

from minisgl.observe import Observer, ObserverContext, StepStats


class StepRecorder(Observer):
    """``steps``: all since the start, or since the list was cleared."""

    def __init__(self) -> None:
        super().__init__(ObserverContext(None, "engine"))
        self.steps: list[StepStats] = []

    def step(self, s: StepStats) -> None:
        self.steps.append(s)

    @property
    def prefilled(self) -> int:
        """Prompt tokens computed."""
        return sum(s.prefill_tokens for s in self.steps)
