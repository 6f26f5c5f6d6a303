"""Two attention backends as one: each gets the rows of its phase as a step of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl.base.types import LocalModel
from minisgl.nn.assemble import add_graphs
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttnContext, GraphSupport
from minisgl.runtime.phase import PhaseSplit, cut
from minisgl.runtime.record import EagerRecorder
from minisgl.testing.attention import AttentionBench, GraphBench, build
from minisgl.testing.checkpoints import llama_checkpoint, make_worker
from minisgl.testing.plans import PlanDriver
from minisgl.testing.static_attention import StaticAttention
from minisgl_plugins.attention.torch import TorchAttention


class Seen(TorchAttention):
    """Notes the rows of each step and the layers that it computed."""

    def __init__(self, ctx: AttnContext) -> None:
        super().__init__(ctx)
        self.steps: list[list[int]] = []
        self.closed = False

    def plan(self, b: Any) -> Any:
        self.steps.append(b.h_slot.tolist())
        assert b.h_q_start.tolist() == [0, *np.cumsum(b.h_q).tolist()]
        assert b.n_tokens == len(b.pos) == len(b.loc) == b.h_q_start[-1]
        assert (b.max_q, b.max_kv) == (b.h_q.max(), b.h_kv.max())
        assert b.kv.tolist() == b.h_kv.tolist()
        assert b.slot.tolist() == b.h_slot.tolist()
        return super().plan(b)

    def close(self) -> None:
        self.closed = True
        super().close()


def split(ctx: AttnContext) -> PhaseSplit:
    return PhaseSplit(build(Seen)(ctx), build(Seen)(ctx))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layer", [0, 1])
def test_every_kind_of_step(layer: int, page_size: int) -> None:
    b = AttentionBench(split, heads=6, page_size=page_size, pages=320, columns=64 // page_size + 1, window=7)
    b.rows([1, 15, 16, 17, 30, 0, 9, 0], room=20)
    b.check([0, 1, 2, 3], layer=layer)
    b.check(spans={5: 13, 6: 4}, layer=layer)
    b.check([4, 0, 5], {7: 6, 6: 1}, layer=layer)
    b.check([2], {7: 3}, layer=layer)
    backend: Any = b.backend
    assert backend.decode.steps == [[0, 1, 2, 3], [4, 0, 5], [2]]
    assert backend.prefill.steps == [[5, 6], [7, 6], [7]]
    backend.close()
    assert backend.prefill.closed
    assert backend.decode.closed


def test_graphs_are_those_of_the_backend_for_decode() -> None:
    def make(ctx: AttnContext) -> PhaseSplit:
        return PhaseSplit(build(TorchAttention)(ctx), build(StaticAttention)(ctx))

    b = AttentionBench(make)
    assert b.backend.graph == GraphSupport.DECODE
    b.rows([5, 9, 1, 30], room=20)
    graph = GraphBench(b, [2, 4])
    for decode in ([0, 1, 2], [3], [2, 1, 0, 3]):
        s = b.step(decode)
        b.compare(s, graph.run(s))
    b.check([0, 3], {1: 4})
    other = AttentionBench(lambda ctx: PhaseSplit(build(StaticAttention)(ctx), build(TorchAttention)(ctx)))
    assert other.backend.graph == GraphSupport.NONE


def test_a_cut_step_is_the_step_of_its_rows() -> None:
    b = AttentionBench(build(TorchAttention))
    b.rows([5, 9, 0, 3], room=20)
    v = b.step([1, 0], {2: 6, 3: 2}).view
    assert cut(v, 0, 4) is v
    tail = cut(v, 1, 3)
    assert (tail.n_decode, tail.n_rows, tail.n_tokens, tail.max_q, tail.max_kv) == (1, 2, 7, 6, 6)
    assert tail.h_slot.tolist() == tail.slot.tolist() == [0, 2]
    assert tail.h_q_start.tolist() == [0, 1, 7]
    assert torch.equal(tail.loc, v.loc[1:8])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


def test_a_worker_with_two_backends_gives_the_tokens_of_one(checkpoint: LocalModel) -> None:
    """``--attention=torch,static``, with graphs, against ``torch`` alone."""

    def run(use: Any) -> dict[int, list[int]]:
        registry = Registry.scan(bundled_only=True)
        registry.add("attention", "static", StaticAttention)
        worker = make_worker(
            checkpoint, {"kinds": {"attention": {"use": use}}, "limits": {"max_running": 8, "max_len": 96}}, registry
        )
        assert worker.info.picks["attention"] == (use if isinstance(use, str) else ",".join(use))
        add_graphs(worker, 4, EagerRecorder())
        d = PlanDriver(worker.run, worker.info.page_size)
        for slot, n in enumerate((4, 30, 17)):
            d.start(slot, list(range(3, 3 + n)))
        d.generate([0, 1, 2], 5)
        d.start(5, list(range(40, 60)))
        d.step(decode=[2, 0], prefill={5: 8})
        d.step(decode=[0, 1], prefill={5: 12})
        for _ in range(4):
            d.step(decode=[5, 1, 2])
        assert worker.stats["graph_replays"] == (8 if use != "torch" else 0)
        return d.out

    assert run(("torch", "static")) == run("torch")
