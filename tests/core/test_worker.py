"""The worker, driven with hand-made step plans, against transformers' greedy generation."""

import numpy as np
import pytest
import torch

from minisgl.base.types import SamplingSpec
from minisgl.runtime.rows import Rows
from minisgl.testing.checkpoints import llama_checkpoint, make_worker
from minisgl.testing.plans import GREEDY, PlanDriver, ints

VOCAB = 199


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return llama_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """Greedy tokens of transformers: (ids, n) -> n tokens."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint.path)

    def generate(ids, n):
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return out[0, len(ids) :].tolist()

    return generate


def prompt(seed, n):
    return np.random.RandomState(seed).randint(3, VOCAB, n).tolist()


def driver(checkpoint, **settings):
    worker = make_worker(checkpoint, settings)
    return worker, PlanDriver(worker.run, worker.info.page_size)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_rows_of_several_lengths_decode_together(checkpoint, oracle, page_size):
    _, d = driver(checkpoint, kv={"page_size": page_size})
    prompts = [prompt(i, n) for i, n in enumerate((1, 15, 16, 17, 40))]
    for slot, ids in enumerate(prompts):
        d.start(slot, ids)
    d.generate(range(5), 20)
    assert [d.out[s] for s in range(5)] == [oracle(ids, 20) for ids in prompts]


def test_prefill_chunks_ride_with_decoding_rows_and_sample_nothing_before_the_last(checkpoint, oracle):
    """M9: a chunk that does not end its prompt gives no token, and changes no other row's."""
    _, d = driver(checkpoint)
    first, long = prompt(1, 9), prompt(2, 61)
    d.start(3, first)
    d.step(prefill={3: 9})
    d.start(0, long)
    for n in (20, 1, 20):
        assert len(d.step(decode=[3], prefill={0: n}).tokens) == 1
    d.step(decode=[3], prefill={0: 20})
    d.step(decode=[0, 3])
    d.step(decode=[3, 0])
    assert d.out[3] == oracle(first, 7)
    assert d.out[0] == oracle(long, 3)


def test_a_cached_prefix_is_used_in_place(checkpoint, oracle):
    """The second row starts on the pages of the first and computes the rest alone; both then go on over shared pages."""
    _, d = driver(checkpoint)
    common = prompt(3, 32)
    one, two = common + prompt(4, 5), common + prompt(5, 9)
    d.start(0, one, pages=[9, 2, 5, 6, 7])
    d.step(prefill={0: 37})
    d.start(1, two, pages=[9, 2, 30, 31], kv_len=32)
    d.step(decode=[0], prefill={1: 9})
    for _ in range(10):
        d.step(decode=[1, 0])
    assert d.out[0] == oracle(one, 12)
    assert d.out[1] == oracle(two, 11)


def test_pages_arrive_as_the_row_grows_in_any_order(checkpoint, oracle):
    _, d = driver(checkpoint, kv={"page_size": 4})
    ids = prompt(6, 6)
    d.start(2, ids, pages=[11, 3])
    d.step(prefill={2: 6})
    for i in range(20):
        if (6 + i) % 4 == 0:
            d.grow(2, (6 + i) // 4, 60 - 7 * ((6 + i) // 4))
        d.step(decode=[2])
    assert d.out[2] == oracle(ids, 21)


def test_a_preempted_row_is_computed_again_and_goes_on(checkpoint, oracle):
    """Its known tokens are then prompt and output; nothing about the phase is guessed from counts (N4)."""
    _, d = driver(checkpoint)
    ids = prompt(7, 12)
    d.start(0, ids)
    d.generate([0], 6)
    begun = d.out[0]
    d.retire(0)
    d.start(4, ids + begun, emitted=6)
    d.step(prefill={4: 10})
    d.step(prefill={4: 8})
    d.step(decode=[4])
    assert begun + d.out[4] == oracle(ids, 8)


def test_a_recycled_slot_keeps_nothing_of_the_row_before(checkpoint, oracle):
    _, d = driver(checkpoint)
    d.start(0, prompt(8, 60), SamplingSpec(temperature=5.0, top_k=3, stop_ids=tuple(range(90))), room=40)
    d.generate([0], 10)
    d.retire(0)
    ids = prompt(9, 5)
    d.start(0, ids)
    d.generate([0], 10)
    assert d.out[0] == oracle(ids, 10)
    assert d.stopped[0] is False


def test_the_longest_row_fills_the_context_to_the_last_token(checkpoint, oracle):
    """N5: max_len is no multiple of the page size; the last token's KV still has a page, and a column."""
    worker, d = driver(checkpoint, limits={"max_len": 61, "max_running": 2}, kv={"page_size": 16})
    assert worker.info.max_len == 61
    assert worker.rows.columns == 5
    ids = prompt(10, 40)
    d.start(0, ids, pages=[3, 1, 0, 2])
    d.generate([0], 21)
    assert d.out[0] == oracle(ids, 21)


def test_stop_is_true_exactly_for_tokens_of_the_rows_own_stop_set(checkpoint, oracle):
    _, d = driver(checkpoint)
    ids = [prompt(i, 6 + i) for i in range(3)]
    expected = [oracle(x, 12) for x in ids]
    stops = [(), (expected[1][4],), (VOCAB - 1, expected[2][0], expected[2][7], 5)]
    for slot in range(3):
        d.start(slot, ids[slot], SamplingSpec(temperature=0, stop_ids=stops[slot]))
    results = [d.step(prefill={s: len(ids[s]) for s in range(3)})]
    results += [d.step(decode=[0, 1, 2]) for _ in range(11)]
    assert [d.out[s] for s in range(3)] == expected
    for slot in range(3):
        assert [bool(r.stop[slot]) for r in results] == [t in stops[slot] for t in expected[slot]]


def test_seeded_sampling_is_the_same_alone_in_a_crowd_chunked_and_resumed(checkpoint):
    """P2, through the whole device side."""
    spec = SamplingSpec(temperature=1.0, top_p=0.95, seed=11)
    ids = prompt(11, 23)
    _, alone = driver(checkpoint)
    alone.start(0, ids, spec)
    alone.generate([0], 15)

    _, crowd = driver(checkpoint)
    for slot in range(8):
        crowd.start(
            slot, ids if slot == 5 else prompt(20 + slot, 9), spec if slot == 5 else SamplingSpec(temperature=1.3)
        )
    crowd.generate([3, 5, 0, 1, 2, 4, 6, 7], 15)
    assert crowd.out[5] == alone.out[0]

    _, cut = driver(checkpoint)
    cut.start(1, ids, spec)
    cut.step(prefill={1: 22})
    cut.step(prefill={1: 1})
    for _ in range(5):
        cut.step(decode=[1])
    begun = cut.out[1]
    cut.retire(1)
    cut.start(2, ids + begun, spec, emitted=6)
    cut.step(prefill={2: 29})
    for _ in range(8):
        cut.step(decode=[2])
    assert begun + cut.out[2] == alone.out[0]


def test_plans_must_come_in_order(checkpoint):
    _, d = driver(checkpoint)
    d.start(0, [5])
    d.next_step = 3
    with pytest.raises(AssertionError, match="plan 3 came, 0 is next"):
        d.step(prefill={0: 1})


def test_padding_row_and_page_are_apart_from_all_others():
    """I11: slot max_slots and page num_pages exist, and no row's unused column names a page in use."""
    rows = Rows(max_slots=3, max_len=10, num_pages=7, page_size=4)
    assert rows.page_table.shape == (4, 4)
    d = PlanDriver(lambda plan: rows.apply(plan), 4)
    d.start(1, [1, 2, 3], GREEDY, pages=[6, 2])
    with pytest.raises(AttributeError):  # no result: only the rows are looked at
        d.step(prefill={1: 3})
    assert rows.page_table.tolist() == [[7] * 4, [6, 2, 7, 7], [7] * 4, [7] * 4]
    assert rows.locate(ints([1, 1, 1]), ints([0, 3, 4])).tolist() == [24, 27, 8]
