"""Steps whose layers come in recorded pieces, with attention called between them, give what whole forwards give. On a CPU a piece
is the recorded calls made again, over the same buffers: what a replay reads, how it pads and what it leaves behind is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.base.types import LocalModel, SamplingSpec
from minisgl.nn.assemble import add_graphs, add_piecewise
from minisgl.plugin.registry import Registry
from minisgl.runtime.piecewise import token_sizes
from minisgl.runtime.record import EagerRecorder
from minisgl.runtime.worker import Worker
from minisgl.testing.checkpoints import llama_checkpoint, llama_config, make_worker, random_checkpoint
from minisgl.testing.plans import PlanDriver
from minisgl.testing.static_attention import StaticAttention

ROWS, TOKENS, PAGES = 8, 48, 200
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    path = tmp_path_factory.mktemp("model")
    if request.param == "llama":
        return llama_checkpoint(path)
    from transformers import Qwen3MoeConfig

    return random_checkpoint(path, Qwen3MoeConfig(**llama_config(**MOE)))


@pytest.fixture
def make(checkpoint: LocalModel) -> Callable[..., Worker]:
    def worker(tokens: int, attention: str = "static", graph_rows: int = 0) -> Worker:
        registry = Registry.scan(bundled_only=True)
        registry.add("attention", "static", StaticAttention)
        settings = {
            "kinds": {"attention": {"use": attention}},
            "limits": {"max_running": ROWS, "max_len": 128},
            "kv": {"page_size": 4, "num_pages": PAGES},
            "engine": {"threads": 1, "seed": 5},
        }
        made = make_worker(checkpoint, settings, registry)
        add_graphs(made, graph_rows, EagerRecorder())
        add_piecewise(made, tokens, EagerRecorder())
        return made

    return worker


def prompt(seed: int, n: int) -> list[int]:
    return np.random.RandomState(seed).randint(3, 199, n).tolist()


def traffic(d: PlanDriver) -> None:
    """Prompts of all sizes, in chunks and beside decoding rows; a large step comes before smaller ones, and slots are used again."""
    for slot, n in enumerate([40, 17, 1, 29]):
        d.start(slot, prompt(slot, n), room=20)
    d.step(prefill={0: 40, 2: 1})
    d.step(decode=[0, 2], prefill={1: 5})
    d.step(decode=[2, 0], prefill={1: 12, 3: 7})
    d.step(prefill={3: 22})
    for _ in range(3):
        d.step(decode=[3, 1, 0, 2])
    d.retire(0)
    d.start(0, prompt(50, 60), SamplingSpec(temperature=0.9, seed=8, max_new=64), room=20)
    d.step(decode=[1, 3], prefill={0: 55})  # more than was captured
    d.step(decode=[3], prefill={0: 5})
    for _ in range(3):
        d.step(decode=[1, 0, 3, 2])


def run(worker: Worker) -> PlanDriver:
    driver = PlanDriver(worker.run, worker.info.page_size)
    traffic(driver)
    return driver


def test_tokens_and_kv_are_those_of_whole_forwards(make: Callable[..., Worker]) -> None:
    """K2: padding writes to the dummy page alone, after a larger step too."""
    pieces, whole = make(TOKENS), make(0)
    assert whole.piecewise is None
    first, second = run(pieces), run(whole)
    assert first.out == second.out
    assert len({token for out in second.out.values() for token in out}) > 5, "the model says more than one word"
    for mine, other in zip(pieces.kv, whole.kv, strict=True):
        torch.testing.assert_close(mine[:, :PAGES], other[:, :PAGES], rtol=1e-4, atol=1e-5)
    assert pieces.stats["piecewise_replays"] == first.next_step - 1
    assert whole.stats["piecewise_replays"] == 0


def test_decode_steps_with_graphs_of_their_own_keep_them(make: Callable[..., Worker]) -> None:
    both, whole = make(TOKENS, graph_rows=2), make(0)
    assert run(both).out == run(whole).out
    assert both.stats == {"decode_steps": 6, "graph_replays": 0, "piecewise_replays": 11}
    driver = PlanDriver(both.run, both.info.page_size)
    driver.next_step = both.step
    driver.start(5, prompt(9, 3), pages=[190, 191, 192])
    driver.generate([5], 4)
    assert both.stats == {"decode_steps": 9, "graph_replays": 3, "piecewise_replays": 12}


def test_buffers_never_move(make: Callable[..., Worker]) -> None:
    """What a piece was recorded with is what every replay must find."""
    worker = make(TOKENS)
    runner: Any = worker.piecewise

    def places() -> list[int]:
        calls = [call for c in runner._captured.values() for call in c.calls]
        return [t.data_ptr() for c in calls for t in (c.q, c.k, c.v, c.out)]

    before = places()
    run(worker)
    assert len(before) == 4 * len(worker.kv) * len(token_sizes(TOKENS))
    assert places() == before


def test_nothing_is_captured_with_zero_tokens_or_a_backend_that_writes_kv_or_has_no_graphs(
    make: Callable[..., Worker],
) -> None:
    class Writing(StaticAttention):
        writes_kv = True

    assert make(TOKENS, "torch").piecewise is None
    worker = make(0)
    assert worker.piecewise is None
    worker.attention.__class__ = Writing
    add_piecewise(worker, TOKENS, EagerRecorder())
    assert worker.piecewise is None


@pytest.mark.parametrize("most", [1, 3, 16, 100, 512, 700])
def test_sizes_reach_the_most_and_pad_little(most: int) -> None:
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for n in range(1, most + 1):
        padded = next(s for s in sizes if s >= n)
        assert padded - n < max(16, n / 2)
    assert token_sizes(0) == []
