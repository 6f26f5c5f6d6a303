"""The torch sampler: distributions, filters, greedy rows, seeds."""

import numpy as np
import pytest
import torch

from minisgl.api import SamplingSpec
from minisgl.api.device import SamplerContext, SampleRows
from minisgl_plugins.sampler.torch import TorchSampler

DRAWS = 20_000
CHI2_999 = {3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32, 9: 27.88}  # 99.9th percentile by degrees of freedom


def sampler(vocab=8, slots=64, seed=0):
    return TorchSampler(SamplerContext(TorchSampler.Settings(), torch.device("cpu"), slots, vocab, seed))


def sample_rows(slot, out):
    return SampleRows(slot, out, torch.from_numpy(slot).long(), torch.from_numpy(out).long())


def sample(s, logits, slots, outs):
    rows = sample_rows(np.array(slots, np.int32), np.array(outs, np.int32))
    return s.sample(logits.clone(), rows).tolist()


def draw(logits, spec, n=DRAWS, vocab=None):
    """``n`` tokens of one row with fixed logits: counts by token."""
    vocab = vocab or len(logits)
    s = sampler(vocab)
    s.set_row(3, 77, spec)
    tokens = s.sample(logits.expand(n, -1).clone(), sample_rows(np.full(n, 3, np.int32), np.arange(n, dtype=np.int32)))
    return torch.bincount(tokens, minlength=len(logits)).numpy()


def assert_distribution(counts, probabilities):
    """Chi-square at 0.1 % over the tokens that may come; no other token ever comes."""
    p = np.asarray(probabilities, float)
    assert counts[p == 0].sum() == 0, counts
    used = p > 0
    expected = p[used] * counts.sum()
    chi2 = ((counts[used] - expected) ** 2 / expected).sum()
    assert chi2 < CHI2_999[used.sum() - 1], (chi2, counts, expected)


LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.5, -1.0, 0.5, 1.5])


def softmax(temperature=1.0, keep=None):
    w = np.exp(LOGITS.double().numpy() / temperature)
    if keep is not None:
        w[[i for i in range(len(w)) if i not in keep]] = 0
    return w / w.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax(temperature):
    assert_distribution(draw(LOGITS, SamplingSpec(temperature=temperature, seed=1)), softmax(temperature))


def test_top_k_keeps_the_k_likeliest_renormalized():
    assert_distribution(draw(LOGITS, SamplingSpec(top_k=4, seed=1)), softmax(keep={1, 3, 4, 7}))


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    p = softmax()
    order = np.argsort(-p)
    keep = set(order[: int(np.searchsorted(np.cumsum(p[order]), 0.8)) + 1].tolist())
    assert len(keep) == 4
    assert_distribution(draw(LOGITS, SamplingSpec(top_p=0.8, seed=1)), softmax(keep=keep))


def test_min_p_keeps_what_is_at_least_a_part_of_the_likeliest():
    p = softmax()
    keep = set(np.flatnonzero(p >= 0.2 * p.max()).tolist())
    assert len(keep) == 4
    assert_distribution(draw(LOGITS, SamplingSpec(min_p=0.2, seed=1)), softmax(keep=keep))


def test_top_p_is_of_the_mass_that_top_k_left():
    """Of the five likeliest, 0.8 of their own mass; of the whole vocabulary it would be more tokens."""
    p = softmax(keep={1, 4, 3, 7, 0})
    order = np.argsort(-p)
    keep = set(order[: int(np.searchsorted(np.cumsum(p[order]), 0.9)) + 1].tolist())
    assert_distribution(draw(LOGITS, SamplingSpec(top_k=5, top_p=0.9, seed=1)), softmax(keep=keep))


def test_filters_act_after_the_temperature():
    flat, sharp = (draw(LOGITS, SamplingSpec(temperature=t, top_p=0.7, seed=1), n=500) for t in (2.0, 0.3))
    assert (flat > 0).sum() > (sharp > 0).sum()


@pytest.mark.parametrize(
    "spec", [SamplingSpec(top_p=0.0), SamplingSpec(top_p=1e-9), SamplingSpec(top_k=1), SamplingSpec(min_p=1.0)]
)
def test_the_tightest_filters_keep_the_likeliest_token(spec):
    assert draw(LOGITS, spec, n=200).tolist() == [0, 200, 0, 0, 0, 0, 0, 0]


def test_minus_infinity_is_never_drawn():
    logits = LOGITS.clone()
    logits[[1, 5]] = float("-inf")
    counts = draw(logits, SamplingSpec(temperature=2.0, seed=1))
    assert counts[1] == counts[5] == 0


def test_logits_that_are_no_numbers_give_valid_ids_and_touch_no_neighbour():
    s, alone = sampler(3000), sampler(3000)
    specs = [SamplingSpec(), SamplingSpec(top_p=0.9), SamplingSpec(top_k=2000), SamplingSpec(temperature=0)]
    for slot, spec in enumerate(specs * 2):
        s.set_row(slot, slot, spec)
        alone.set_row(slot, slot, spec)
    good = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))
    both = torch.cat((torch.full((4, 3000), float("nan")), good))
    tokens = sample(s, both, range(8), [0] * 8)
    assert all(0 <= t < 3000 for t in tokens)
    assert tokens[4:] == sample(alone, good, range(4, 8), [0] * 4)


# -------------------------------------------------------------------------------------------------------------- large vocabularies


@pytest.mark.parametrize(
    "spec",
    [SamplingSpec(top_k=2000), SamplingSpec(top_p=0.97), SamplingSpec(top_k=50), SamplingSpec(top_p=0.5), SamplingSpec(min_p=1e-3),
     SamplingSpec(top_k=3000, top_p=0.99, min_p=1e-6), SamplingSpec(top_k=1024), SamplingSpec(top_k=64)],
)  # fmt: skip
def test_sorting_few_tokens_gives_what_a_full_sort_gives(spec, monkeypatch):
    """Rows that keep more tokens than are sorted first are exact too."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0))
    fast, full = sampler(5000), sampler(5000)
    for s in (fast, full):
        for slot in range(40):
            s.set_row(slot, slot, spec)
    got = sample(fast, logits, range(40), range(40))
    monkeypatch.setattr("minisgl_plugins.sampler.torch.CANDIDATES", ())
    assert got == sample(full, logits, range(40), range(40))


def test_ties_at_the_edge_of_the_sorted_tokens():
    """All logits are equal: any cut would be arbitrary, so every token can come."""
    logits = torch.zeros(3000)
    counts = draw(logits, SamplingSpec(top_k=64, seed=5), n=3000)
    assert (counts > 0).sum() > 1500
    assert counts[:1500].sum() == pytest.approx(1500, abs=150)


def test_wide_uniform_distribution_is_uniform():
    counts = draw(torch.zeros(50_000), SamplingSpec(seed=2), n=500)
    by_block = counts.reshape(10, -1).sum(1)
    assert_distribution(by_block, np.full(10, 0.1))


# ----------------------------------------------------------------------------------------------------------------- greedy rows


def test_greedy_rows_get_the_argmax_whatever_their_neighbours_do_p1():
    """Ties go to the lowest id; temperature 0 with top_p is greedy too."""
    s = sampler(6)
    tied = torch.tensor([0.0, 5.0, 5.0, 1.0, 5.0, 0.0])
    specs = [SamplingSpec(temperature=0), SamplingSpec(temperature=1.0), SamplingSpec(temperature=0, top_p=0.9),
             SamplingSpec(temperature=1.0, top_k=3), SamplingSpec(temperature=0.7, top_k=1)]  # fmt: skip
    for slot, spec in enumerate(specs):
        s.set_row(slot, slot, spec)
    for step in range(50):
        tokens = sample(s, tied.expand(5, -1), range(5), [step] * 5)
        assert [tokens[i] for i in (0, 2, 4)] == [1, 1, 1]
        assert tokens[3] in (1, 2, 4)


def test_all_greedy_batch_is_argmax():
    s = sampler(1000)
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1))
    for slot in range(7):
        s.set_row(slot, slot, SamplingSpec(temperature=0))
    assert sample(s, logits, range(7), [0] * 7) == [max(range(1000), key=row.__getitem__) for row in logits.tolist()]


def test_logits_wider_than_the_vocabulary_are_cut_w4():
    s = sampler(4)
    for slot, spec in enumerate([SamplingSpec(temperature=0), SamplingSpec(), SamplingSpec(top_p=0.99)]):
        s.set_row(slot, slot, spec)
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0, 50.0, 50.0]).expand(3, -1)
    for step in range(20):
        assert max(sample(s, logits, range(3), [step] * 3)) < 4


# ------------------------------------------------------------------------------------------------------------------------- seeds

SEEDED = [SamplingSpec(temperature=1.0, seed=1234), SamplingSpec(temperature=0.8, top_p=0.9, seed=1234),
          SamplingSpec(temperature=1.1, top_k=40, min_p=0.01, seed=1234)]  # fmt: skip


@pytest.mark.parametrize("spec", SEEDED)
def test_a_seeded_row_is_the_same_alone_and_among_31_others_p2(spec):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 32, 2000, generator=rng)
    alone, among = sampler(2000), sampler(2000, seed=99)
    alone.set_row(0, 5, spec)
    others = [
        SamplingSpec(),
        SamplingSpec(temperature=0),
        SamplingSpec(top_k=5),
        SamplingSpec(top_p=0.3, seed=7),
        SamplingSpec(top_p=0.999),
    ]
    for slot in range(32):
        among.set_row(slot, 100 + slot, spec if slot == 17 else others[slot % len(others)])
    slots = np.random.RandomState(0).permutation(32)
    at = int(np.flatnonzero(slots == 17)[0])
    for step in range(20):
        first = sample(alone, logits[step, at : at + 1], [0], [step])
        assert sample(among, logits[step], slots, [step] * 32)[at] == first[0]


def test_a_seeded_row_continues_after_a_preemption_as_if_nothing_had_been_p2():
    """Its random numbers follow from the seed and the number of its tokens, not from how often it was sampled."""
    logits = torch.randn(10, 1, 500, generator=torch.Generator().manual_seed(3))
    spec = SamplingSpec(seed=42)
    straight, resumed = sampler(500), sampler(500)
    straight.set_row(0, 1, spec)
    whole = [sample(straight, logits[i], [0], [i])[0] for i in range(10)]
    resumed.set_row(0, 1, spec)
    first = [sample(resumed, logits[i], [0], [i])[0] for i in range(4)]
    resumed.set_row(9, 1, spec)  # another slot, after other rows had theirs
    rest = [sample(resumed, logits[i], [9], [i])[0] for i in range(4, 10)]
    assert first + rest == whole


def test_seeds_and_steps_give_different_tokens():
    logits = torch.zeros(1, 50_000)
    s = sampler(50_000)
    seen = set()
    for seed in (0, 1, 2, -1, 2**63):
        s.set_row(0, 0, SamplingSpec(seed=seed))
        seen |= {(seed, step, sample(s, logits, [0], [step])[0]) for step in range(5)}
    assert len({token for _, _, token in seen}) == 25


def test_rows_without_a_seed_differ_by_uid_and_by_the_samplers_seed():
    logits = torch.zeros(1, 5000)

    def first(seed, uid):
        s = sampler(5000, seed=seed)
        s.set_row(0, uid, SamplingSpec())
        return sample(s, logits, [0], [0])[0]

    assert len({first(0, 1), first(0, 2), first(1, 1), first(1, 2), first(0, 1 << 48)}) == 5
    assert first(0, 1) == first(0, 1)


def test_a_recycled_slot_keeps_nothing_of_its_former_row():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(8))
    fresh, used = sampler(300), sampler(300)
    used.set_row(0, 1, SamplingSpec(temperature=0.1, top_k=2, top_p=0.1, min_p=0.9, seed=9))
    sample(used, logits, [0], [0])
    for spec in (SamplingSpec(seed=3), SamplingSpec(temperature=0), SamplingSpec(top_k=7, seed=3)):
        for s in (fresh, used):
            s.set_row(0, 2, spec)
        for step in range(30):
            assert sample(fresh, logits, [0], [step]) == sample(used, logits, [0], [step])
