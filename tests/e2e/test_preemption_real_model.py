"""Preemption on the real model: 200 requests in a pool that is much too small answer as each would alone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from minisgl.client.pipeline import Pipeline
from minisgl.config.load import load_settings
from minisgl.testing.greedy_traffic import Traffic
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
        run = Traffic(p, rng, mixed_requests(rng))
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
    run.check(agreement, loop)
    agreement.enough()
