"""Requests that come, run beside one another, and are aborted, against what each should answer alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from minisgl.base.types import Delta, GenerateRequest, SamplingParams
from minisgl.testing.oracle import Agreement, Expected

if TYPE_CHECKING:
    from minisgl.client.pipeline import Pipeline


@dataclass
class Traffic:
    """Sends requests as steps go by and aborts some amid their output. ``done``: uids that ended by length. ``abort``: share
    of steps with an abort."""

    pipeline: Pipeline
    rng: Random
    waiting: list[Expected]
    abort: float = 0.08
    case_of: dict[int, Expected] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def play(self) -> None:
        while self.waiting or self.running:
            for _ in range(self.rng.choice((0, 2, 8, 16))):
                self._send()
            if self.running and self.rng.random() < self.abort:
                uid = self.running.pop(self.rng.randrange(len(self.running)))
                self.pipeline.cancel([uid])
                self.aborted.append(uid)
            for out in self.pipeline.step():
                self._take(out)
        while not self.pipeline.idle:
            assert not self.pipeline.step(), "outputs after the last end"

    def _send(self) -> None:
        if not self.waiting:
            return
        case = self.waiting.pop()
        sampling = SamplingParams(temperature=0.0, max_tokens=len(case.output), ignore_eos=True)
        [uid] = self.pipeline.submit(GenerateRequest(ids=case.prompt, sampling=sampling))
        self.case_of[uid], self.ids[uid] = case, []
        self.running.append(uid)

    def _take(self, out: object) -> None:
        assert isinstance(out, Delta), out
        assert out.uid in self.running, f"output of request {out.uid}, which does not run"
        self.ids[out.uid] += out.ids
        if out.finish is not None:
            assert out.finish == "length", out
            self.running.remove(out.uid)
            self.done.append(out.uid)

    def check(self, agreement: Agreement, where: str) -> None:
        """AssertionError where an output is not the expected one, or an aborted one not its beginning."""
        for uid in self.done:
            case = self.case_of[uid]
            assert len(self.ids[uid]) == len(case.output)
            agreement.check(case, self.ids[uid], f"{where}, request {uid}, prompt of {len(case.prompt)}")
        for uid in self.aborted:
            agreement.check(self.case_of[uid], self.ids[uid], f"{where}, aborted request {uid}")
