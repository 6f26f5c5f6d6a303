"""The fused sampler on a CUDA device, with the vocabulary of Qwen3: distributions, filters, greedy rows, seeds, graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.api import SamplingSpec
from minisgl.api.device import SamplerContext, SampleRows
from minisgl_plugins.sampler.fused import FusedSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda", 0)
VOCAB, WIDER, SLOTS = 151_669, 151_936, 256
SPECS = [
    SamplingSpec(temperature=0.6, top_k=20, top_p=0.95),
    SamplingSpec(temperature=1.0, top_p=0.9),
    SamplingSpec(temperature=1.2, min_p=0.05),
    SamplingSpec(temperature=0.9, top_k=200, top_p=0.5, min_p=0.01),
    SamplingSpec(temperature=1.0, top_k=5000),
    SamplingSpec(temperature=2.0, top_k=3, top_p=0.99),
]


def make(vocab=VOCAB, slots=SLOTS):
    return FusedSampler(SamplerContext(None, DEVICE, slots, vocab, seed=11))


def rows_of(slots, counts):
    s, c = np.asarray(slots, np.int32), np.asarray(counts, np.int32)
    return SampleRows(s, c, torch.from_numpy(s).long().to(DEVICE), torch.from_numpy(c).long().to(DEVICE))


def sample(sampler, logits, slots, counts):
    sampler.prepare()
    return sampler.sample(logits, rows_of(slots, counts)).cpu().numpy()


def some_logits(rows, dtype=torch.bfloat16, seed=0, scale=3.0, vocab=VOCAB, wider=WIDER):
    out = torch.randn(rows, wider, generator=torch.Generator().manual_seed(seed)) * scale
    out[:, vocab:] = 1000.0  # padding of the head: must never be sampled (W4)
    return out.to(DEVICE, dtype)


def kept(logits, spec, vocab=VOCAB):
    """Probabilities after min-p, top-k and top-p in this order, ties of the last kept one kept, by sorting. [vocab] float64."""
    x = logits[:vocab].double().cpu().numpy() / spec.temperature
    p = np.exp(x - x.max())
    p[p < spec.min_p * p.max()] = 0
    if spec.top_k:
        p[p < np.sort(p)[-min(spec.top_k, vocab)]] = 0
    if spec.top_p < 1:
        falling = np.sort(p)[::-1]
        last = int((falling.cumsum() - falling < spec.top_p * falling.sum()).sum()) - 1
        p[p < falling[last]] = 0
    return p / p.sum()


def assert_distribution(tokens, p):
    """Chi-square over the tokens with 5 or more expected draws and the rest together, 4 standard deviations wide; no token of
    probability 0."""
    seen, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    assert seen[p == 0].sum() == 0
    big = expected >= 5
    cells = [(s, e) for s, e in [*zip(seen[big], expected[big]), (seen[~big].sum(), expected[~big].sum())] if e > 0]
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    assert statistic < len(cells) + 4 * (2 * len(cells)) ** 0.5, (statistic, len(cells))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("n", [1, 7, 256])
def test_greedy_rows_get_the_first_of_the_best(dtype, n):
    """P1, W4: whatever the neighbours do, with the ties that bfloat16 makes."""
    sampler, logits = make(), some_logits(n, dtype)
    for slot in range(0, SLOTS, 2):
        sampler.set_row(slot, slot, SPECS[slot // 2 % len(SPECS)])
    slots = [(2 * i + 1) % SLOTS if i % 3 else 2 * i % SLOTS for i in range(n)] if n > 1 else [1]
    expected = logits[:, :VOCAB].float().cpu().numpy().argmax(-1)
    tokens = sample(sampler, logits, slots, [3] * n)
    greedy = [i for i in range(n) if slots[i] % 2]
    assert (tokens[greedy] == expected[greedy]).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_plain_rows_follow_the_softmax(temperature):
    draws, vocab = 4096 * 16, 61
    sampler = make(vocab)
    sampler.set_row(3, 1, SamplingSpec(temperature=temperature, seed=5))
    logits = some_logits(1, vocab=vocab, wider=64, scale=1.5)
    tokens = sample(sampler, logits.expand(draws, -1).contiguous(), [3] * draws, range(draws))
    assert_distribution(tokens, kept(logits[0], SamplingSpec(temperature=temperature), vocab))


def test_a_flat_distribution_over_the_whole_vocabulary_is_flat():
    draws = 4096
    sampler = make()
    sampler.set_row(0, 1, SamplingSpec(temperature=1.0, seed=9))
    logits = torch.zeros(draws, WIDER, dtype=torch.bfloat16, device=DEVICE)
    tokens = sample(sampler, logits, [0] * draws, range(draws))
    assert tokens.max() < VOCAB
    assert_distribution(tokens * 64 // VOCAB, np.full(64, 1 / 64))  # 64 ranges
    assert_distribution(tokens % 32, np.bincount(np.arange(VOCAB) % 32) / VOCAB)  # lanes


@pytest.mark.parametrize("spec", SPECS)
def test_filtered_rows_follow_the_filtered_softmax(spec):
    draws = 2048
    sampler = make()
    sampler.set_row(3, 1, spec)
    logits = some_logits(1, seed=4)
    tokens = sample(sampler, logits.expand(draws, -1).contiguous(), [3] * draws, range(draws))
    assert_distribution(tokens, kept(logits[0], spec))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_threshold_keeps_what_sorting_keeps(dtype):
    """In float32 a sum may differ by rounding, so that one token more or less is kept at the edge of top-p."""
    sampler, logits = make(), some_logits(len(SPECS), dtype, seed=6)
    for slot, spec in enumerate(SPECS):
        sampler.set_row(slot, slot, spec)
    sampler.prepare()
    slots = list(range(len(SPECS)))
    floor = sampler._thresholds(logits, rows_of(slots, slots)).cpu()
    for i, spec in enumerate(SPECS):
        x = logits[i, :VOCAB].float().cpu()
        bits = (x + 0.0).numpy().view(np.int32)
        got = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >= int(floor[i])
        expected = kept(logits[i], spec) > 0
        edge = np.unique(x.numpy()[got != expected])
        assert len(edge) <= (spec.top_p < 1), (spec, got.sum(), expected.sum())


@pytest.mark.parametrize("filtered", [False, True])
def test_a_token_depends_on_seed_count_and_logits_alone(filtered):
    """P2: alone, among 256 rows, at any place, in any slot, beside filtered and greedy rows."""
    sampler = make()
    spec = SamplingSpec(temperature=1.0, seed=1234, top_p=0.9 if filtered else 1.0)
    for slot in range(SLOTS):
        sampler.set_row(slot, slot, spec if slot in (0, 77, 255) else [SamplingSpec(temperature=0.0), *SPECS][slot % 7])
    one = some_logits(1, seed=2)
    alone = [sample(sampler, one, [0], [n])[0] for n in range(8)]
    assert len(set(alone)) > 2
    logits = some_logits(SLOTS, seed=3)
    logits[[5, 200]] = one
    for n in range(8):
        slots = list(range(SLOTS))
        slots[5], slots[200] = 255, 77
        among = sample(sampler, logits, slots, [n] * SLOTS)
        assert among[5] == among[200] == alone[n]


def test_rows_without_a_seed_differ_and_repeat_with_the_engines_seed():
    tokens = []
    for _ in range(2):
        sampler = make()
        for slot in range(64):
            sampler.set_row(slot, slot, SamplingSpec(temperature=2.0))
        tokens.append(sample(sampler, some_logits(1).expand(64, -1).contiguous(), range(64), [0] * 64).tolist())
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 32


def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary():
    sampler = make()
    for slot, spec in enumerate([SamplingSpec(temperature=0.0), SamplingSpec(temperature=1.0), *SPECS]):
        sampler.set_row(slot, slot, spec)
    n = 2 + len(SPECS)
    for value in (float("nan"), float("-inf"), float("inf")):
        logits = torch.full((n, WIDER), value, dtype=torch.bfloat16, device=DEVICE)
        tokens = sample(sampler, logits, range(n), [0] * n)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_graph_serves_other_rows_at_each_replay():
    """Captured with padding rows; then other slots, counts, logits and changed rows give what the eager call gives."""
    n, none = 8, np.zeros(0, np.int32)
    sampler = make()
    sampler.prepare()
    slot = torch.full((n,), SLOTS, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    logits = some_logits(n)
    rows = SampleRows(none, none, slot, out)
    sampler.sample(logits, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample(logits, rows)
    for turn in range(3):
        for s in range(16):
            sampler.set_row(s, 16 * turn + s, SamplingSpec(temperature=0.0 if s % 3 == 0 else 0.9, seed=turn * s))
        sampler.prepare()
        slots, counts = [(5 * turn + 3 * i) % 16 for i in range(n)], [turn + i for i in range(n)]
        assert sampler.plain(np.array(slots, np.int32))
        logits.copy_(some_logits(n, seed=20 + turn))
        slot.copy_(torch.tensor(slots))
        out.copy_(torch.tensor(counts))
        graph.replay()
        assert tokens.tolist() == sample(sampler, logits.clone(), slots, counts).tolist()


def test_sampling_never_waits_for_the_device():
    """M3: also with filters and changed rows, every call returns while the stream is still busy with what came before."""
    sampler, logits = make(), some_logits(64)
    rows = rows_of(range(64), [0] * 64)
    for turn in range(3):  # the first compiles; the first two take pinned memory
        for slot in range(64):
            sampler.set_row(slot, slot, [SamplingSpec(temperature=1.0), *SPECS][(slot + turn) % 7])
        torch.cuda.synchronize()
        if turn == 2:
            torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
        sampler.prepare()
        sampler.sample(logits, rows)
        waiting = not torch.cuda.current_stream().query()
    assert waiting
    torch.cuda.synchronize()
