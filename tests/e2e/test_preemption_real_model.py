"""Preemption on the real model: 200 requests in a pool that is much too small answer as each would alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minisgl.base.types import Delta, GenerateRequest, SamplingParams
from minisgl.client.pipeline import Pipeline
from minisgl.config.load import load_settings
from minisgl.testing.oracle import Agreement, Expected, load

REQUESTS = 200
PROMPT = (4, 40)  # tokens
SHORT = 12  # most prompts are not longer, so that the steps are cheap
OUTPUTS = (2, 5, 9, 10, 11, 12, 12, 12)  # mostly long: rows grow much beyond what they were admitted with
PAGE_SIZE, NUM_PAGES = 2, 112


def mixed_requests(rng: Random) -> list[Expected]:
    """Requests cut out of the oracle's: what transformers continues greedily after ``prompt + output[:k]`` is ``output[k:]``."""
    cases = load(Path(__file__).parent / "oracle" / "smollm2.json")
    requests: list[Expected] = []
    while len(requests) < REQUESTS:
        case = rng.choice(cases)
        n = rng.choice(OUTPUTS)
        k = rng.randint(0, len(case.output) - n)
        length = len(case.prompt) + k
        if PROMPT[0] <= length <= PROMPT[1] and (length <= SHORT or rng.random() < 0.1):
            prompt, output = case.prompt + case.output[:k], case.output[k : k + n]
            requests.append(Expected(prompt, output, min(n, max(0, case.sure - k))))
    return requests


@dataclass
class Run:
    """Sends requests as steps go by and aborts some amid their output. ``done``: uids that ended by length."""

    pipeline: Pipeline
    rng: Random
    waiting: list[Expected]
    case_of: dict[int, Expected] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def play(self) -> None:
        while self.waiting or self.running:
            for _ in range(self.rng.choice((0, 2, 8, 16))):
                self._send()
            if self.running and self.rng.random() < 0.08:
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


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_preempted_requests_answer_as_if_alone(smollm2: Any, loop: str) -> None:
    """The expected ids are those of transformers, one prompt at a time; a request never waits in vain or ends early."""
    rng = Random(20)
    overrides = {
        "kv": {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES},
        "limits": {"max_running": 32, "batch_tokens": 128},
        "scheduler": {"use": "chunked", "chunked": {"reserve": 0.05}},
        "cache": {"use": "radix"},
        "loop": {"use": loop},
        "engine": {"validate": "audit"},
    }
    settings = load_settings(overrides=overrides, environ={}).settings
    with Pipeline(settings, show_progress=False) as p:
        run = Run(p, rng, mixed_requests(rng))
        run.play()
        scheduler = p.engine.scheduler
        scheduler.audit()
        counts = dict(scheduler.counts())
        assert counts["preemptions"] >= 20, counts
        assert counts["free"] + counts["evictable"] == NUM_PAGES, counts
        assert scheduler.clear_cache() == counts["evictable"]
        scheduler.audit()
    assert len(run.aborted) >= 10
    assert len(run.done) + len(run.aborted) == REQUESTS
    agreement = Agreement()
    for uid in run.done:
        case = run.case_of[uid]
        assert len(run.ids[uid]) == len(case.output)
        agreement.check(case, run.ids[uid], f"{loop}, request {uid}, prompt of {len(case.prompt)}")
    for uid in run.aborted:
        agreement.check(run.case_of[uid], run.ids[uid], f"{loop}, aborted request {uid}")
    agreement.enough()
