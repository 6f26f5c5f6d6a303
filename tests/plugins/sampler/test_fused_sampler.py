"""The fused sampler: its state on the host, and its kernels in Triton's interpreter where triton is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from minisgl.api import SamplingSpec
from minisgl.api.device import SamplerContext, SampleRows
from minisgl_plugins.sampler import fused
from minisgl_plugins.sampler.fused import FusedSampler

INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
kernels = pytest.mark.skipif(
    not INTERPRETED, reason="needs triton, and no CUDA device: its interpreter runs the kernels; tests/gpu has the rest"
)
SLOTS, VOCAB, WIDER = 6, 150, 160


@pytest.fixture
def sampler(monkeypatch):
    monkeypatch.setattr(fused, "QUARTER", 16)  # three tiles
    monkeypatch.setattr(fused, "BLOCK", 128)  # two turns
    return FusedSampler(SamplerContext(None, torch.device("cpu"), SLOTS, VOCAB, seed=3))


def sample(sampler, logits, slots, counts):
    sampler.prepare()
    rows = SampleRows(np.array(slots, np.int32), np.array(counts, np.int32), torch.tensor(slots), torch.tensor(counts))
    return sampler.sample(logits, rows).tolist()


def some_logits(rows, seed=0, scale=2.0):
    out = torch.randn(rows, WIDER, generator=torch.Generator().manual_seed(seed)) * scale
    out[:, VOCAB:] = 100.0  # padding of the head: must never be sampled (W4)
    return out


def kept(logits, spec):
    """Probabilities after min-p, top-k and top-p in this order, ties of the last kept one kept, from sorting. [vocab] float64."""
    x = logits[:VOCAB].double().numpy() / spec.temperature
    p = np.exp(x - x.max())
    p[p < spec.min_p * p.max()] = 0
    if spec.top_k:
        p[p < np.sort(p)[-min(spec.top_k, VOCAB)]] = 0
    if spec.top_p < 1:
        falling = np.sort(p)[::-1]
        last = int((falling.cumsum() - falling < spec.top_p * falling.sum()).sum()) - 1
        p[p < falling[last]] = 0
    return p / p.sum()


def chi_square(tokens, p):
    """The statistic of the drawn tokens over cells of 5 or more expected draws, and how many cells there are."""
    expected = p * len(tokens)
    seen = np.bincount(tokens, minlength=len(p))
    big = expected >= 5
    cells = [*zip(seen[big], expected[big]), (seen[~big].sum(), expected[~big].sum())]
    return sum((s - e) ** 2 / e for s, e in cells if e > 0), len(cells)


def test_it_says_why_it_cannot_run_here():
    assert "cpu" in FusedSampler.supports(torch.device("cpu"))


def test_missing_triton_is_the_reason_on_cuda(monkeypatch):
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert "pip install triton" in FusedSampler.supports(torch.device("cuda"))


@pytest.mark.parametrize(
    ("spec", "plain"),
    [
        (SamplingSpec(temperature=0.0), True),
        (SamplingSpec(temperature=0.7), True),
        (SamplingSpec(temperature=0.7, top_k=VOCAB), True),
        (SamplingSpec(temperature=0.7, top_k=VOCAB - 1), False),
        (SamplingSpec(temperature=0.7, top_p=0.9), False),
        (SamplingSpec(temperature=0.7, min_p=0.1), False),
        (SamplingSpec(temperature=0.0, top_k=20, top_p=0.9, min_p=0.1), True),
        (SamplingSpec(temperature=1.0, top_k=1), True),
    ],
)
def test_rows_are_plain_that_do_not_filter(sampler, spec, plain):
    sampler.set_row(2, 1, spec)
    assert sampler.plain(np.array([2], np.int32)) == plain
    assert sampler.plain(np.array([0, 1, SLOTS], np.int32))
    assert sampler.plain(np.array([0, 2], np.int32)) == plain
    sampler.set_row(2, 2, SamplingSpec(temperature=0.7))
    assert sampler.plain(np.array([2], np.int32))


def test_state_goes_to_the_device_once_and_only_what_changed(sampler, monkeypatch):
    sent = []
    send = sampler._uploads.send
    monkeypatch.setattr(sampler._uploads, "send", lambda *a: sent.append(a[0].tolist()) or send(*a))
    sampler.prepare()
    sampler.set_row(1, 1, SamplingSpec(temperature=0.5, seed=-1))
    sampler.set_row(4, 2, SamplingSpec(temperature=2.0, seed=2**40 + 7, top_k=9, top_p=0.25, min_p=0.125))
    sampler.set_row(1, 3, SamplingSpec(temperature=0.25, seed=5))
    sampler.prepare()
    sampler.prepare()
    assert [sorted(s) for s in sent] == [[1, 4]]
    state = {f: sampler._state[:, i] for i, f in enumerate(fused.FIELDS)}
    assert state["greedy"].tolist() == [1, 0, 1, 1, 0, 1, 1]
    scale = state["inv_temperature"].view(torch.float32)
    assert scale[[1, 4]].tolist() == pytest.approx([4 * np.log2(np.e), np.log2(np.e) / 2])
    assert (state["seed_low"][4], state["seed_high"][4]) == (7, 2**8)
    assert (state["top_k"][4], state["top_k"][1]) == (9, 0)
    assert state["top_p"].view(torch.float32)[[1, 4]].tolist() == [1.0, 0.25]
    assert state["min_p_floor"].view(torch.float32)[[1, 4]].tolist() == [-np.inf, -3.0]


@kernels
def test_greedy_rows_get_the_first_of_the_best_among_sampled_neighbours(sampler):
    """P1, W4."""
    sampler.set_row(0, 1, SamplingSpec(temperature=0.0))
    sampler.set_row(1, 2, SamplingSpec(temperature=1.0))
    sampler.set_row(2, 3, SamplingSpec(temperature=1.0, top_p=0.5))
    sampler.set_row(3, 4, SamplingSpec(temperature=1.0, top_k=1))
    logits = some_logits(5)
    logits[0, [70, 20, 149]] = 50.0
    logits[3, [149, 148]] = 50.0
    logits[4] = -1.0
    tokens = sample(sampler, logits, [0, 1, 2, 3, SLOTS], [0, 4, 9, 1, 0])
    assert (tokens[0], tokens[3], tokens[4]) == (20, 148, 0)
    assert sample(sampler, logits[[0]], [0], [7]) == [20]


@kernels
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_token_depends_on_seed_count_and_logits_alone(sampler, top_p):
    """P2: not on the neighbours, the place in the batch, the slot or the request's id."""
    spec = SamplingSpec(temperature=1.0, seed=99, top_p=top_p)
    for slot in range(4):
        sampler.set_row(slot, 100 + slot, spec if slot != 1 else SamplingSpec(temperature=1.0))
    logits = some_logits(1).expand(4, -1).contiguous()
    alone = [sample(sampler, logits[:1], [0], [n])[0] for n in range(6)]
    assert len(set(alone)) > 2
    for n in range(6):
        among = sample(sampler, logits, [1, 3, 0, 2], [n + 1, n, n, n])
        assert among[1:] == [alone[n]] * 3


@kernels
@pytest.mark.parametrize("spec", [SamplingSpec(seed=1), SamplingSpec(temperature=0.8, seed=4, top_k=12, top_p=0.8)])
def test_tokens_are_distributed_as_the_filtered_softmax(sampler, spec, monkeypatch):
    draws = 300
    monkeypatch.setattr(fused, "QUARTER", 64)  # one tile, since the interpreter takes 20 ms for each
    thresholds = sampler._thresholds

    def once(logits, rows):
        one = SampleRows(rows.h_slot[:1], rows.h_out[:1], rows.slot[:1], rows.out[:1])
        return thresholds(logits[:1], one).expand(draws).contiguous()

    monkeypatch.setattr(sampler, "_thresholds", once)
    sampler.set_row(1, 1, spec)
    logits = some_logits(1, seed=8)
    tokens = sample(sampler, logits.expand(draws, -1).contiguous(), [1] * draws, list(range(draws)))
    p = kept(logits[0], spec)
    assert set(tokens) <= set(np.flatnonzero(p))
    statistic, cells = chi_square(tokens, p)
    assert statistic < cells + 4 * (2 * cells) ** 0.5


@kernels
@pytest.mark.parametrize("few", [4, 16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threshold_keeps_what_sorting_keeps(sampler, dtype, few, monkeypatch):
    """With many ties, since bfloat16 has few values, and rows of other filters beside each other; whether few logits are left
    to search, or too many for the room that there is."""
    monkeypatch.setattr(fused, "FEW", few)
    specs = [
        SamplingSpec(temperature=1.0, top_k=1 + 3 * i, top_p=(1.0, 0.9, 0.31)[i % 3], min_p=(0.0, 0.05)[i % 2])
        for i in range(SLOTS)
    ]
    specs[5] = SamplingSpec(temperature=0.7, top_p=0.6)
    for slot, spec in enumerate(specs):
        sampler.set_row(slot, slot, spec)
    sampler.prepare()
    logits = some_logits(SLOTS, seed=5).to(dtype)
    slots = np.arange(1, SLOTS, dtype=np.int32)  # the first is greedy
    rows = SampleRows(slots, slots, torch.from_numpy(slots).long(), torch.from_numpy(slots).long())
    floor = sampler._thresholds(logits[1:], rows)
    for i, slot in enumerate(slots):
        x = logits[slot, :VOCAB].float()
        order = np.where((b := (x + 0.0).numpy().view(np.int32)) < 0, b ^ 0x7FFFFFFF, b)
        assert ((order >= int(floor[i])) == (kept(logits[slot], specs[slot]) > 0)).all()


@kernels
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary(sampler):
    for slot, spec in enumerate(
        (SamplingSpec(temperature=0.0), SamplingSpec(temperature=1.0), SamplingSpec(top_p=0.5))
    ):
        sampler.set_row(slot, slot, spec)
    logits = torch.full((3, WIDER), float("nan"))
    assert all(0 <= t < VOCAB for t in sample(sampler, logits, [0, 1, 2], [0, 0, 0]))
    logits = torch.full((3, WIDER), float("-inf"))
    assert all(0 <= t < VOCAB for t in sample(sampler, logits, [0, 1, 2], [0, 0, 0]))
