"""Decode steps from graphs give the tokens of steps that are launched call by call. On a CPU a graph is the recorded calls made
again, over the same buffers: what a replay reads, how it pads and what it leaves behind is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.base.grammar import U32, Matcher
from minisgl.base.types import LocalModel, SamplingSpec, StepPlan, StepResult
from minisgl.nn.assemble import add_graphs
from minisgl.plugin.registry import Registry
from minisgl.runtime.forms import Forms
from minisgl.runtime.graph import GraphRunner, decode_rows, graph_sizes
from minisgl.runtime.record import EagerRecorder
from minisgl.runtime.worker import Worker
from minisgl.testing.checkpoints import llama_checkpoint, make_worker
from minisgl.testing.plans import GREEDY, PlanDriver
from minisgl.testing.static_attention import StaticAttention
from minisgl_plugins.attention.torch import TorchAttention
from minisgl_plugins.sampler.torch import TorchSampler

ROWS = 12


class RecordedGreedy(TorchSampler):
    """Takes the likeliest token in the graph; rows that sample otherwise are not plain."""

    capturable = True

    def plain(self, h_slot: Any) -> bool:
        return bool(self.greedy[h_slot].all())

    def sample(self, logits: Any, rows: Any) -> Any:
        return super().sample(logits, rows) if len(rows.h_slot) else logits[:, : self.vocab].argmax(-1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["torch", "recorded"])
def make(request: pytest.FixtureRequest, checkpoint: LocalModel) -> Callable[..., Worker]:
    """Makes workers, with a sampler outside the graphs and with one in them."""

    def worker(graph_rows: int = 0, page_size: int = 4, max_len: int = 96) -> Worker:
        registry = Registry.scan(bundled_only=True)
        registry.add("attention", "static", StaticAttention)
        registry.add("sampler", "recorded", RecordedGreedy)
        settings = {
            "kinds": {"attention": {"use": "static"}, "sampler": {"use": request.param}},
            "limits": {"max_running": ROWS, "max_len": max_len},
            "kv": {"page_size": page_size, "num_pages": 1000},
            "engine": {"threads": 1, "seed": 5},
        }
        made = make_worker(checkpoint, settings, registry)
        if graph_rows:
            add_graphs(made, graph_rows, EagerRecorder())
            assert made.graphs is not None
        return made

    return worker


def prompt(seed: int, n: int) -> list[int]:
    return np.random.RandomState(seed).randint(3, 199, n).tolist()


class Pair:
    """The same steps for a worker with graphs and one without."""

    def __init__(self, make: Callable[..., Worker], graph_rows: int = ROWS, **options: Any) -> None:
        self.workers = make(graph_rows, **options), make(0, **options)
        self.drivers = [PlanDriver(w.run, w.info.page_size) for w in self.workers]

    def each(self, call: Callable[[PlanDriver], Any]) -> None:
        for d in self.drivers:
            call(d)

    def start(self, lengths: list[int], **options: Any) -> None:
        for slot, n in enumerate(lengths):
            self.each(lambda d, s=slot, n=n: d.start(s, prompt(s, n), **options))  # type: ignore[misc]
        self.each(lambda d: d.step(prefill=dict(enumerate(lengths))))

    def decode(self, *slots: int) -> None:
        self.each(lambda d: d.step(decode=slots))

    def same(self) -> None:
        first, second = self.drivers
        assert first.out == second.out
        assert first.stopped == second.stopped

    @property
    def replays(self) -> int:
        return self.workers[0].stats["graph_replays"]


LENGTHS = [1, 3, 4, 5, 8, 13, 16, 17, 2, 30, 9, 21]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_number_of_rows_in_every_order(make: Callable[..., Worker], page_size: int) -> None:
    """K2: the sizes are 1, 2, 4, 8 and 12, so that most numbers of rows are padded; rows come in another order each time."""
    p = Pair(make, page_size=page_size)
    p.start(LENGTHS, room=40)
    rng = np.random.RandomState(1)
    for n in [*range(1, ROWS + 1), *range(ROWS, 0, -1)]:
        p.decode(*rng.permutation(ROWS)[:n].tolist())
    p.same()
    assert p.replays == 2 * ROWS
    assert {len(set(t)) for t in p.drivers[0].out.values()} != {1}, "the model says more than one word"


def test_graphs_between_prefill_chunks_and_mixed_steps(make: Callable[..., Worker]) -> None:
    """The rows of the device are the truth for both kinds of step."""
    p = Pair(make)
    p.start([4, 9, 17])
    p.decode(2, 0)
    p.each(lambda d: d.start(7, prompt(70, 20)))
    p.each(lambda d: d.step(decode=[2, 0], prefill={7: 6}))
    p.decode(0, 2, 1)
    p.each(lambda d: d.step(decode=[0, 2, 1], prefill={7: 14}))
    for _ in range(4):
        p.decode(7, 0, 2, 1)
    p.same()
    assert p.replays == 6


def test_a_slot_that_is_given_to_another_row(make: Callable[..., Worker]) -> None:
    """Its length, last token, count and pages are those of the new row."""
    p = Pair(make)
    p.start([30, 9])
    for _ in range(3):
        p.decode(0, 1)
    p.each(lambda d: d.retire(0))
    p.each(lambda d: d.start(0, prompt(40, 2)))
    p.each(lambda d: d.step(decode=[1], prefill={0: 2}))
    for _ in range(5):
        p.decode(1, 0)
    p.same()


def test_a_row_that_was_preempted_and_comes_back_in_another_slot(make: Callable[..., Worker]) -> None:
    """What it has said is prefilled again; a row sampled by seed goes on with its count of tokens."""
    spec = SamplingSpec(temperature=1.0, seed=77, max_new=64)
    p, whole = Pair(make), Pair(make)
    for pair in (p, whole):
        pair.start([6, 11], sampling=spec)
        for _ in range(4):
            pair.decode(0, 1)
    for d in p.drivers:
        said = d.out[0]
        d.retire(0)
        d.start(5, prompt(0, 6) + said, spec, emitted=len(said), uid=0)
        d.step(decode=[1], prefill={5: 6 + len(said)})
        for _ in range(3):
            d.step(decode=[5, 1])
        d.out[5] = said + d.out[5]
    for _ in range(4):
        whole.decode(0, 1)
    p.same()
    assert p.drivers[0].out[5] == whole.drivers[1].out[0]


def test_pages_that_a_row_gets_while_it_decodes(make: Callable[..., Worker]) -> None:
    """A replay sees the page that came with its own plan."""
    p = Pair(make)

    def run(d: PlanDriver) -> None:
        d.start(3, prompt(1, 7), pages=[50, 9])
        d.step(prefill={3: 7})
        for i in range(10):
            if (8 + i) % 4 == 0:
                d.grow(3, (8 + i) // 4, 100 - i)
            d.step(decode=[3])

    p.each(run)
    p.same()


def test_a_sequence_of_the_greatest_length(make: Callable[..., Worker]) -> None:
    """N5: max_len is no multiple of the page, and the last token's page is the last but one column."""
    p = Pair(make, max_len=30)
    p.start([29, 3], room=1)
    p.decode(0, 1)
    p.decode(1)
    p.same()


@pytest.mark.parametrize("most", [1, 4])
def test_steps_of_more_rows_than_were_captured_are_launched(make: Callable[..., Worker], most: int) -> None:
    """M16, N5: outside what was captured nothing is replayed."""
    p = Pair(make, graph_rows=most)
    p.start(LENGTHS)
    for n in (12, 5, 4, 3, 1, 12):
        p.decode(*range(n))
    p.same()
    assert p.replays == sum(n <= most for n in (12, 5, 4, 3, 1, 12))
    assert p.workers[0].stats["decode_steps"] == 6


def test_rows_that_sample_ride_with_rows_that_do_not(make: Callable[..., Worker]) -> None:
    """The sampler is asked for each step whether its graph serves the rows."""
    p = Pair(make)
    specs = [GREEDY, SamplingSpec(temperature=0.8, top_p=0.9, seed=3, max_new=64), GREEDY]

    def run(d: PlanDriver) -> None:
        for slot, spec in enumerate(specs):
            d.start(slot, prompt(slot, 5 + slot), spec)
        d.generate([0, 1, 2], 6)
        for decode in ([0, 2], [1], [2, 0], [2, 1, 0]):
            d.step(decode=decode)

    p.each(run)
    p.same()


def test_rows_with_processors_and_log_probabilities_ride_with_plain_ones(make: Callable[..., Worker]) -> None:
    """S8, A7: the same tokens and scores with graphs and without; what a processor keeps of a row is up to date though the layers
    come from a graph. Steps of plain rows alone have the sampler in the graph, where it can be."""
    p = Pair(make)
    specs = [
        GREEDY,
        replace(GREEDY, frequency_penalty=0.9, repetition_penalty=1.2),
        replace(GREEDY, bias_ids=(7,), biases=(4.0,), logprobs=3),
        SamplingSpec(temperature=0.9, seed=4, max_new=64, presence_penalty=1.5, logprobs=1),
        replace(GREEDY, stop_ids=tuple(range(0, 199, 2)), min_new=5),
    ]
    told: list[list[Any]] = [[], []]

    def run(d: PlanDriver, scores: list[Any]) -> None:
        for slot, spec in enumerate(specs):
            d.start(slot, prompt(slot, 5 + slot), spec)
        d.step(prefill={slot: 5 + slot for slot in range(5)})
        for decode in ([0, 1, 2, 3, 4], [4, 1], [0], [2, 3, 1, 0, 4], [4, 0], [1], [4, 3, 2], [4, 0], [0]):
            block = d.step(decode=decode).logprobs
            scores.append(None if block is None else [getattr(block, f.name).tolist() for f in fields(block)])

    picks: list[int] = []
    picker = p.workers[0].picker
    pick = picker.pick
    picker.pick = lambda logits, rows, *mask: (picks.append(len(rows.h_slot)), pick(logits, rows, *mask))[1]  # type: ignore[method-assign,func-returns-value]
    for d, scores in zip(p.drivers, told, strict=True):
        run(d, scores)
    p.same()
    assert told[0] == told[1]
    assert [block is None for block in told[0]] == [False, True, True, False, True, True, False, True, True]
    in_graph = p.workers[0].sampler.capturable  # the steps [0], [4, 0] after its five tokens, and [0] are
    assert picks == [5, 5, 2, *([] if in_graph else [1]), 5, 2, 1, 3, *([] if in_graph else [2, 1])]


class Counting(Matcher):
    """Allows token 100 + n after n tokens."""

    def __init__(self) -> None:
        self.n = 0

    def fill(self, mask: U32) -> None:
        mask[(100 + self.n) // 32] |= np.uint32(1 << (100 + self.n) % 32)

    def accept(self, token: int) -> bool:
        self.n += 1
        return token == 99 + self.n

    def rollback(self, count: int) -> None:
        self.n -= count

    @property
    def done(self) -> bool:
        return False


def test_rows_that_are_held_to_a_grammar_ride_with_plain_ones(make: Callable[..., Worker]) -> None:
    """Their mask comes between the layers, which a graph has, and the sampler; a step without them is all in the graph again."""
    p = Pair(make)
    for w in p.workers:
        w.forms = Forms(199, torch.device("cpu"), lambda compiled: Counting())
    specs = [GREEDY, replace(GREEDY, grammar=b"g"), replace(GREEDY, grammar=b"g", frequency_penalty=0.5)]

    def run(d: PlanDriver) -> None:
        for slot, spec in enumerate(specs):
            d.start(slot, prompt(slot, 5 + slot), spec)
        d.step(prefill={slot: 5 + slot for slot in range(3)})
        for decode in ([0, 1, 2], [2, 0], [0], [1], [0, 2], [1, 2, 0], [0]):
            d.step(decode=decode)

    p.each(run)
    p.same()
    assert p.drivers[0].out[1] == [100, 101, 102, 103]
    assert p.drivers[0].out[2] == [100, 101, 102, 103, 104]
    assert p.replays == 7


def test_two_steps_in_flight(make: Callable[..., Worker]) -> None:
    """M3: results are read after the next step was launched, which overwrites the buffers of the graph."""
    with_graphs, without = make(ROWS), make(0)
    pending: list[Any] = []
    results: list[list[int]] = []

    def run(plan: StepPlan) -> StepResult:
        pending.append(with_graphs.launch(plan))
        if len(pending) > 2:
            results.append(pending.pop(0).result().tokens.tolist())
        n = plan.n_decode + sum(s.sample for s in plan.spans)
        return StepResult(plan.step, np.zeros(n, np.int32), np.zeros(n, np.bool_))

    expected: list[list[int]] = []

    def plain(plan: StepPlan) -> StepResult:
        result = without.run(plan)
        expected.append(result.tokens.tolist())
        return result

    for call, page_size in ((run, with_graphs.info.page_size), (plain, without.info.page_size)):
        d = PlanDriver(call, page_size)
        rng = np.random.RandomState(4)
        for slot, n in enumerate(LENGTHS):
            d.start(slot, prompt(slot, n), room=40)
        d.step(prefill=dict(enumerate(LENGTHS)))
        for _ in range(20):
            d.step(decode=rng.permutation(ROWS)[: rng.randint(1, ROWS + 1)].tolist())
    results += [p.result().tokens.tolist() for p in pending]
    assert results == expected


def test_nothing_is_captured_with_zero_rows_or_a_backend_without_graphs(make: Callable[..., Worker]) -> None:
    """M16."""
    worker = make(0)
    add_graphs(worker, 0, EagerRecorder())
    assert worker.graphs is None
    worker.attention = TorchAttention(_context(worker))
    add_graphs(worker, None, EagerRecorder())
    assert worker.graphs is None


def _context(worker: Worker) -> Any:
    from minisgl.api.device import AttnContext, AttnFacts, KVSpec

    spec = KVSpec(2, 8, torch.float32, worker.info.page_size)
    facts = AttnFacts(6, 2, 8, "float32", spec.page_size, "cpu")
    return AttnContext(facts, spec, torch.device("cpu"), ROWS, 96, 64, worker.state.table, TorchAttention.Settings())


def test_graph_buffers_never_move(make: Callable[..., Worker]) -> None:
    """What a graph was recorded with is what every replay must find."""
    worker = make(ROWS)
    assert isinstance(worker.graphs, GraphRunner)

    def places() -> list[int]:
        views = [c.view for c in worker.graphs._captured.values()]  # type: ignore[union-attr]
        tensors = [t for v in views for t in (v.slot, v.kv, v.pos, v.loc, v.page_table)]
        state = worker.state
        tensors += [state.table, state.kv_len, state.next_token, state.n_out, state.order, state.n_decode]
        tensors += [t for c in worker.graphs._captured.values() for t in (c.batch.meta.pages, c.batch.meta.planned)]  # type: ignore[union-attr]
        return [t.data_ptr() for t in tensors]

    before = places()
    d = PlanDriver(worker.run, worker.info.page_size)
    for slot, n in enumerate(LENGTHS):
        d.start(slot, prompt(slot, n))
    d.generate(range(ROWS), 5)
    d.step(decode=[3, 1])
    assert places() == before


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100, 256, 300])
def test_sizes_reach_the_most_and_pad_little(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for n in range(1, most + 1):
        padded = next(s for s in sizes if s >= n)
        assert padded - n < (8 if n <= 248 else 32)
    assert graph_sizes(0) == []


def test_inputs_of_a_decode_step_by_hand() -> None:
    """Three slots and the padding row, pages of 4 tokens; rows 2 and 0 decode, the third place is padding."""
    table = torch.tensor([[5, 6], [1, 2], [8, 3], [9, 9]], dtype=torch.int32)
    kv_len, token = torch.tensor([4, 7, 3, 77]), torch.tensor([11, 12, 13, 99])
    slot, kv, pos, loc, tokens = (torch.full((3,), -1) for _ in range(5))
    decode_rows(torch.tensor([2]), torch.tensor([2, 0, 1]), kv_len, token, table, 4, slot, kv, pos, loc, tokens)
    assert slot.tolist() == [2, 0, 3]
    assert pos.tolist() == [3, 4, 0]
    assert kv.tolist() == [4, 5, 1]
    assert loc.tolist() == [8 * 4 + 3, 6 * 4 + 0, 9 * 4]
    assert tokens.tolist() == [13, 11, 0]
