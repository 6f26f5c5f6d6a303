"""The attention backends on a GPU, in bfloat16, against the ``torch`` backend in float32; graphs against plain launches.

FlashInfer compiles a kernel for each head size and dtype: all but the tests marked ``slow`` use head_dim 128 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.api.device import AttentionBackend, AttnContext, AttnFacts, KVSpec, Sampler
from minisgl.plugin.registry import Registry
from minisgl.runtime.phase import PhaseSplit
from minisgl.testing.attention import AttentionBench, GraphBench, Step, build, facts_of, relative_error
from minisgl.testing.checkpoints import llama_checkpoint, make_worker
from minisgl.testing.plans import PlanDriver
from minisgl_plugins.attention.fa import FlashAttention
from minisgl_plugins.attention.flashinfer import FlashInferAttention
from minisgl_plugins.attention.pages import fill_pages, filler
from minisgl_plugins.attention.torch import TorchAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CLASSES: dict[str, tuple[type[AttentionBackend], ...]] = {
    "flashinfer": (FlashInferAttention,),
    "fa": (FlashAttention,),
    "fa,flashinfer": (FlashAttention, FlashInferAttention),
}
MAX_LEN = 1024
GROUPS = (1, 2, 3, 5, 6, 7, 8, 16)  # K1: 3, 5, 6, 7 and 16 are those that FlashInfer's other decode kernel refuses
Make = Callable[..., AttentionBench]


def maker(name: str) -> Callable[[AttnContext], AttentionBackend]:
    parts = [build(c, prefill="fa2") if c is FlashInferAttention else build(c) for c in CLASSES[name]]
    return parts[0] if len(parts) == 1 else lambda ctx: PhaseSplit(parts[0](ctx), parts[1](ctx))


def need(name: str, f: AttnFacts) -> None:
    for cls in CLASSES[name]:
        if (reason := cls.supports(f)) is not None:
            pytest.skip(f"{cls.__name__}: {reason}")


@pytest.fixture(params=list(CLASSES))
def bench(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes benches of each backend, and closes them."""
    made: list[AttentionBench] = []

    def make(
        *, group: int = 2, page_size: int = 16, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16,
        window: int | None = None, slots: int = 24, seed: int = 0,
    ) -> AttentionBench:  # fmt: skip
        heads = group * 2, 2, head_dim
        need(request.param, facts_of(torch.device("cuda"), *heads, dtype, page_size, window))
        columns = -(-MAX_LEN // page_size) + 1
        b = AttentionBench(
            maker(request.param), device="cuda", dtype=dtype, heads=heads[0], kv_heads=2, head_dim=head_dim,
            page_size=page_size, slots=slots, pages=12 * columns, columns=columns, window=window, seed=seed,
        )  # fmt: skip
        made.append(b)
        return b

    yield make
    torch.cuda.synchronize()
    for b in made:
        b.backend.close()


def in_torch(b: AttentionBench, s: Step, dtype: torch.dtype, layer: int = 0) -> Tensor:
    """The step as the ``torch`` backend computes it from the same values in ``dtype``."""
    c = b.context
    spec = KVSpec(c.kv.kv_heads, c.kv.head_dim, dtype, c.kv.page_size)
    facts = replace(c.facts, dtype=str(dtype).removeprefix("torch."))
    backend = TorchAttention(replace(c, kv=spec, facts=facts, settings=TorchAttention.Settings()))
    with torch.inference_mode():
        q, k, v, kv = (x.to(dtype) for x in (s.q, s.k, s.v, b.kv))
        return backend.forward(q, k, v, kv, layer, backend.plan(s.view), s.view)


def judge(b: AttentionBench, s: Step, out: Tensor, layer: int = 0) -> None:
    """At most twice the error that the ``torch`` backend has in the same dtype."""
    exact = in_torch(b, s, torch.float32, layer)
    assert relative_error(exact, s.expected) < 1e-3
    usual = relative_error(in_torch(b, s, b.dtype, layer), exact)
    error = relative_error(out, exact)
    assert error <= 2 * usual, f"relative error {error:.2e}; torch in {b.dtype}: {usual:.2e}"


def check(b: AttentionBench, decode: Any = (), spans: Any = None, layer: int = 0) -> None:
    s = b.step(decode, spans, layer)
    judge(b, s, b.run(s, layer), layer)


LENGTHS = (1, 15, 16, 17, 300, 640, 0, 64, 3)


def check_phases(b: AttentionBench, layer: int = 0) -> None:
    """Decode, prefill fresh and after a cached prefix, both mixed, and a prompt in chunks."""
    b.rows(LENGTHS, room=160)
    check(b, [0, 1, 2, 3, 4, 5], layer=layer)
    check(b, spans={6: 33, 7: 50}, layer=layer)
    check(b, [5, 0, 6], {8: 70, 7: 1}, layer=layer)
    check(b, [3], layer=layer)
    b.row(9, 0, room=160)
    for chunk in (40, 1, 64):
        check(b, [1, 4], {9: chunk}, layer=layer)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", GROUPS)
def test_error_is_at_most_twice_that_of_torch(bench: Make, group: int, page_size: int) -> None:
    """K1, K3: every number of query heads per KV head, in eager steps and from a graph."""
    b = bench(group=group, page_size=page_size)
    check_phases(b)
    graph = GraphBench(b, [4, 8])
    for decode in ([2, 0, 5, 4], [5, 1, 0, 4, 2, 3]):
        s = b.step(decode)
        judge(b, s, graph.run(s))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_error_of_other_heads_and_dtypes(bench: Make, head_dim: int, dtype: torch.dtype) -> None:
    check_phases(bench(head_dim=head_dim, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 20, 256])
def test_a_window_holds_in_its_layers_only(bench: Make, window: int) -> None:
    check_phases(bench(window=window), layer=1)
    b = bench(window=window)
    check_phases(b, layer=0)
    for layer in (0, 1):
        graph = GraphBench(b, [4, 8], layer)
        s = b.step([0, 4, 5], layer=layer)
        judge(b, s, graph.run(s), layer)


@pytest.mark.slow
def test_prefill_with_the_kernel_that_flashinfer_chooses() -> None:
    """fa3 on Hopper, which is compiled anew: the other tests prefill with fa2."""
    need("flashinfer", facts_of(torch.device("cuda"), 10, 2, 128, torch.bfloat16, 16, None))
    b = AttentionBench(
        build(FlashInferAttention), device="cuda", dtype=torch.bfloat16, heads=10, head_dim=128, page_size=16,
        slots=24, pages=800, columns=65,
    )  # fmt: skip
    check_phases(b)
    b.backend.close()


# ------------------------------------------------------------------------------------------------------------- graphs
SIZES = (1, 2, 4, 8, 16)


@pytest.fixture
def graphs(bench: Make) -> tuple[AttentionBench, GraphBench]:
    b = bench(group=5)
    b.rows([(37 * i) % 500 + 1 for i in range(16)], room=64)
    return b, GraphBench(b, SIZES)


def test_graph_gives_the_bits_of_plain_launches(graphs: tuple[AttentionBench, GraphBench]) -> None:
    b, graph = graphs
    for n in (*SIZES, 1, 16):
        s = b.step(list(range(n)))
        assert torch.equal(graph.run(s), b.run(s)), f"{n} rows"


def test_padded_graph_agrees_with_plain_launches(graphs: tuple[AttentionBench, GraphBench]) -> None:
    b, graph = graphs
    for n in (3, 5, 7, 9, 13, 15):
        s = b.step(list(range(n)))
        judge(b, s, graph.run(s))


def test_padding_rows_do_not_matter(graphs: tuple[AttentionBench, GraphBench]) -> None:
    """K2: whatever ran before in the same graph, and whatever the dummy page holds."""
    b, graph = graphs
    s = b.step([9, 2, 4])
    first = graph.run(s, 16)
    graph.run(b.step(list(range(16))), 16)
    b.kv[:, b.pages] = 1e4
    assert torch.equal(graph.run(s, 16), first)


def test_rows_may_change_their_order_between_replays(graphs: tuple[AttentionBench, GraphBench]) -> None:
    b, graph = graphs
    rng = np.random.RandomState(1)
    for n in (8, 11, 16):
        s = b.step(rng.permutation(16)[:n].tolist())
        for _ in range(3):
            t = b.permuted(s, rng.permutation(n).tolist())
            judge(b, t, graph.run(t))


def test_pages_may_change_between_replays(graphs: tuple[AttentionBench, GraphBench]) -> None:
    """A slot is given to another row, longer or shorter than the one before."""
    b, graph = graphs
    for length in (400, 5, 90):
        b.row(3, length, room=16)
        s = b.step([3, 0, 1])
        judge(b, s, graph.run(s))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_row_may_fill_all_pages_that_a_row_has(bench: Make, page_size: int) -> None:
    """N5: the last token of a sequence of the greatest length, from a graph, and a prompt of that length."""
    b = bench(page_size=page_size)
    b.rows([MAX_LEN - 1, 5, 0], room=MAX_LEN)
    graph = GraphBench(b, [2, 4])
    s = b.step([0, 1])
    assert s.view.max_kv == MAX_LEN
    judge(b, s, graph.run(s))
    judge(b, s, b.run(s))
    check(b, [1], {2: MAX_LEN})


# ------------------------------------------------------------------------------------------------- steps in flight (M3)
def test_graph_steps_enqueued_ahead_of_the_device_each_read_their_own_plan(
    graphs: tuple[AttentionBench, GraphBench],
) -> None:
    """M3: the device is kept busy while the host plans on; a plan's staging must outlive its copy."""
    b, graph = graphs
    rng = np.random.RandomState(2)
    steps = [b.step(rng.permutation(16)[: rng.randint(1, 17)].tolist()) for _ in range(40)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    outs = [graph.run(s) for s in steps]
    for s, out in zip(steps, outs):
        judge(b, s, out)


def test_plain_steps_enqueued_ahead_of_the_device_each_read_their_own_plan(bench: Make) -> None:
    """M3, with prefill and mixed steps."""
    b = bench(page_size=1)
    b.rows([3] * 6, room=120)
    steps = [b.step([0, 1, 2], {3: 1 + i % 3, 4: 2 + i % 2}) for i in range(24)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    outs = [b.run(s) for s in steps]
    for s, out in zip(steps, outs):
        judge(b, s, out)


def test_planning_never_waits_for_the_device(graphs: tuple[AttentionBench, GraphBench]) -> None:
    """Two steps, which is what the worker has in flight, are enqueued while the device is busy with something else."""
    b, graph = graphs
    steps = [b.step([0, 1, 2]), b.step([2, 1, 0, 3])]
    for s in steps:
        graph.run(s)  # buffers and kernels are there
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [graph.run(s) for s in steps]
        assert not busy.query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for s, out in zip(steps, outs):
        judge(b, s, out)


# ---------------------------------------------------------------------------------------------------------- its parts
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("n", [1, 3, 32, 200])
def test_page_lists_of_the_kernel_equal_the_reference(n: int, page_size: int) -> None:
    rng = np.random.RandomState(n)
    columns, slots = 1100 // page_size + 2, 256
    table = torch.from_numpy(rng.randint(0, 10**6, (slots, columns)).astype(np.int32)).cuda()
    kv = torch.from_numpy(rng.randint(1, 1100, n)).cuda()
    slot = torch.from_numpy(rng.permutation(slots)[:n]).cuda()
    made = []
    for fill in (filler(torch.device("cuda")), fill_pages):
        out = [torch.full((size,), -7, dtype=torch.int32, device="cuda") for size in (n + 1, n, n * columns)]
        fill(kv, slot, table, page_size, *out)
        made.append(out)
    total = int(made[1][0][-1])
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert torch.equal(made[0][2][:total], made[1][2][:total])


# ------------------------------------------------------------------------------------------------------- in a worker
class Forced(Sampler):
    """Keeps the logits, and takes the same tokens whatever they are: so that errors do not add up to other words."""

    def __init__(self, ctx: Any) -> None:
        self.logits: list[Tensor] = []

    def set_row(self, slot: int, uid: int, spec: Any) -> None: ...

    def sample(self, logits: Tensor, rows: Any) -> Tensor:
        self.logits.append(logits.float().cpu())
        return (31 * rows.slot + 7 * rows.out) % 190 + 3


def logits_of(checkpoint: Any, attention: str, dtype: str, graph_rows: int) -> Tensor:
    """Of prefill in two chunks, decode in changing order and mixed steps."""
    registry = Registry.scan(bundled_only=True)
    registry.add("sampler", "forced", Forced)
    use = tuple(attention.split(","))
    settings = {
        "model": {"device": "cuda", "dtype": dtype},
        "kinds": {
            "attention": {"use": use, "options": {"flashinfer": {"prefill": "fa2"}}},
            "sampler": {"use": "forced"},
        },
        "limits": {"max_running": 12, "max_len": 200, "batch_tokens": 512},
        "kv": {"num_pages": 256},
        "engine": {"threads": 1, "cuda_graph_max_rows": graph_rows},
    }
    worker = make_worker(checkpoint, settings, registry)
    sampler: Any = worker.sampler
    sampler.logits.clear()
    d = PlanDriver(worker.run, worker.info.page_size)
    for slot in range(10):
        d.start(slot, [(7 * slot + j) % 190 + 3 for j in range(9 * slot + 1)])
    d.step(prefill={s: len(d.ids[s]) for s in range(9)})
    d.step(decode=[3, 1, 0], prefill={9: 40})
    d.step(decode=[8, 3, 1], prefill={9: 42})
    rng = np.random.RandomState(0)
    for n in (10, 3, 5, 8, 1, 9, 4):
        d.step(decode=rng.permutation(10)[:n].tolist())
    assert worker.stats["graph_replays"] == (7 if graph_rows else 0)
    worker.close()
    return torch.cat(sampler.logits)


@pytest.mark.parametrize("name", CLASSES)
def test_logits_of_a_model_with_graphs_and_without(name: str, tmp_path: Path) -> None:
    """M16, K1: 3 query heads per KV head. At most twice the error that the ``torch`` backend has in bfloat16."""
    need(name, facts_of(torch.device("cuda"), 6, 2, 128, torch.bfloat16, 16, None))
    checkpoint = llama_checkpoint(tmp_path, hidden_size=96, head_dim=128, dtype="bfloat16", seed=3)
    exact = logits_of(checkpoint, "torch", "float32", 0)
    usual = relative_error(logits_of(checkpoint, "torch", "bfloat16", 0), exact)
    for rows in (0, 12):
        error = relative_error(logits_of(checkpoint, name, "bfloat16", rows), exact)
        assert error <= 2 * usual, f"graph rows {rows}: relative error {error:.2e}; torch in bfloat16: {usual:.2e}"
