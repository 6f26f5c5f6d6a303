"""Paged attention in torch against a dense float64 reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from minisgl.api.device import AttnContext, AttnFacts, BatchView, KVSpec
from minisgl_plugins.attention.torch import TorchAttention, similar

SLOTS, PAGES = 8, 96


class Bench:
    """A pool with random history, a page table, and the dense K and V of every row beside it."""

    def __init__(
        self, heads=6, kv_heads=2, head_dim=8, page_size=4, dtype=torch.float32, seed=0, columns=33, window=None
    ):
        self.heads, self.kv_heads, self.head_dim, self.page_size, self.dtype = (
            heads,
            kv_heads,
            head_dim,
            page_size,
            dtype,
        )
        self.window = window  # of layer 1; layer 0 sees everything
        self.rng = np.random.RandomState(seed)
        torch.manual_seed(seed)
        spec = KVSpec(kv_heads, head_dim, dtype, page_size)
        self.table = torch.full((SLOTS + 1, columns), PAGES, dtype=torch.int32)
        facts = AttnFacts(heads, kv_heads, head_dim, str(dtype).removeprefix("torch."), page_size, "cpu", window=window)
        facts = replace(facts, window_layers=frozenset() if window is None else frozenset({1}))
        assert TorchAttention.supports(facts) is None
        ctx = AttnContext(
            facts, spec, torch.device("cpu"), SLOTS, columns * page_size, 256, self.table, TorchAttention.Settings()
        )
        self.backend = TorchAttention(ctx)
        self.kv = torch.randn(TorchAttention.kv_shape(spec, PAGES + 1)).to(dtype)  # stale values everywhere
        self.dense = {}  # slot -> (K, V), each [kv_len, kv_heads, head_dim]

    def row(self, slot, kv_len, pages):
        """A row with ``kv_len`` tokens of random history in ``pages``."""
        self.table[slot, : len(pages)] = torch.tensor(pages)
        self.dense[slot] = tuple(torch.randn(kv_len, self.kv_heads, self.head_dim).to(self.dtype) for _ in range(2))
        for i in range(kv_len):
            for side in range(2):
                self.kv[side, pages[i // self.page_size], i % self.page_size] = self.dense[slot][side][i]

    def view(self, decode, spans):
        slots = [*decode, *spans]
        h_q = np.array([1] * len(decode) + list(spans.values()), np.int32)
        before = np.array([len(self.dense[s][0]) for s in slots], np.int32)
        pos = np.concatenate([np.arange(b, b + q) for b, q in zip(before, h_q)])
        of = np.repeat(slots, h_q)
        page = self.table.numpy()[of, pos // self.page_size].astype(np.int64)
        return BatchView(
            step=0, n_decode=len(decode), n_rows=len(slots), n_tokens=len(pos), max_q=int(h_q.max()), max_kv=int((before + h_q).max()),
            h_slot=np.array(slots, np.int32), h_q=h_q, h_kv=before + h_q, h_q_start=np.concatenate(([0], np.cumsum(h_q))).astype(np.int32),
            slot=torch.tensor(slots), kv=torch.from_numpy((before + h_q).astype(np.int64)), pos=torch.from_numpy(pos.astype(np.int64)),
            loc=torch.from_numpy(page * self.page_size + pos % self.page_size), page_table=self.table,
        )  # fmt: skip

    def step(self, decode=(), spans=None, layer=0):
        """One step. Returns: (output of the backend, float64 reference), both [n_tokens, heads, head_dim]."""
        b = self.view(list(decode), spans or {})
        q = torch.randn(b.n_tokens, self.heads, self.head_dim).to(self.dtype)
        k, v = (torch.randn(b.n_tokens, self.kv_heads, self.head_dim).to(self.dtype) for _ in range(2))
        for side, new in enumerate((k, v)):
            self.kv[side].view(-1, self.kv_heads, self.head_dim)[b.loc] = new
        out = self.backend.forward(q, k, v, self.kv, layer, self.backend.plan(b), b)
        expected = []
        for row, slot in enumerate(b.h_slot.tolist()):
            at = slice(b.h_q_start[row], b.h_q_start[row + 1])
            self.dense[slot] = tuple(torch.cat((old, new[at])) for old, new in zip(self.dense[slot], (k, v)))
            expected.append(reference(q[at], *self.dense[slot], self.window if layer else None))
        return out, torch.cat(expected)

    def check(self, decode=(), spans=None, layer=0):
        out, expected = self.step(decode, spans, layer)
        tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[self.dtype]
        assert out.shape == expected.shape
        assert out.dtype == self.dtype
        error = (out.double() - expected).abs().max()
        assert error < tolerance, error


def reference(q, k, v, window=None):
    """Causal attention of the last len(q) positions, one head after the other, in float64. ``window``: tokens seen."""
    q, k, v = q.double(), k.double(), v.double()
    group, (n, total) = q.shape[1] // k.shape[1], (len(q), len(k))
    out = torch.empty_like(q)
    for i, h in itertools.product(range(n), range(q.shape[1])):
        seen = total - n + i + 1
        at = slice(max(0, seen - window) if window else 0, seen)
        scores = (k[at, h // group] @ q[i, h]) / q.shape[2] ** 0.5
        out[i, h] = torch.softmax(scores, 0) @ v[at, h // group]
    return out


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 8), (9, 3, 64), (4, 1, 16), (8, 8, 128), (10, 2, 80)]
)
def test_grid_of_heads_dims_and_pages(heads, kv_heads, head_dim, page_size):
    b = Bench(heads, kv_heads, head_dim, page_size)
    pages = b.rng.permutation(PAGES).tolist()
    lengths = [1, 5, 16, 13]
    for slot, n in enumerate(lengths):
        b.row(slot, n, [pages.pop() for _ in range((n + 12) // page_size + 1)])
    b.check(decode=[0, 1, 2, 3])
    b.check(decode=[2], spans={3: 7, 0: 3})
    b.check(decode=[3, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    b = Bench(dtype=dtype)
    b.row(0, 9, [3, 4, 5])
    b.row(1, 2, [8])
    b.row(2, 0, [9, 10])
    b.check(decode=[0, 1], spans={2: 6})


def test_one_row_decodes_over_scattered_pages_and_over_a_run():
    b = Bench()
    b.row(0, 10, [7, 2, 30])
    b.row(1, 10, [11, 12, 13])
    for _ in range(2):
        b.check(decode=[0])
        b.check(decode=[1])


def test_first_token_of_a_row_and_prefill_of_one_token():
    """q = 1 with nothing cached, and q = 1 that ends a chunked prompt."""
    b = Bench()
    b.row(0, 0, [5])
    b.row(1, 4, [6, 7])
    b.check(spans={0: 1, 1: 1})


def test_chunked_prefill_with_a_cached_prefix():
    b = Bench(page_size=4)
    b.row(0, 8, [20, 3, 11, 40, 9])  # a prefix of two whole pages
    b.check(spans={0: 5})
    b.check(spans={0: 4})  # starts in mid-page
    b.check(decode=[0])


def test_mixed_batch_of_decode_fresh_and_cached_prefill():
    b = Bench()
    b.row(4, 21, [1, 2, 3, 50, 51, 52])
    b.row(2, 3, [9])
    b.row(0, 0, [30, 31, 32])
    b.row(7, 8, [40, 22, 41])
    b.check(decode=[4, 2], spans={0: 9, 7: 4})


@pytest.mark.parametrize("gain", [1, 20, 10**9])
def test_rows_are_computed_in_groups_of_similar_length(gain, monkeypatch):
    """However many groups are made, in whatever order the rows come, each row gets its own result."""
    monkeypatch.setattr("minisgl_plugins.attention.torch.SPLIT_GAIN", gain)
    b = Bench(page_size=4)
    pages = b.rng.permutation(PAGES).tolist()
    for slot, n in enumerate((40, 3, 100, 41, 2, 97)):
        b.row(slot, n, [pages.pop() for _ in range(n // 4 + 4)])
    b.check(decode=[0, 1, 2, 3, 4, 5])
    b.check(decode=[5, 1, 0, 2], spans={4: 1, 3: 6})


def test_groups_are_a_partition_and_save_padding():
    lengths = np.array([500, 20, 480, 30, 1000, 25], np.int32)
    groups = similar(lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(6))
    assert [sorted(lengths[g].tolist()) for g in groups] == [[20, 25, 30], [480, 500], [1000]]
    assert [g.tolist() for g in similar(np.array([100, 90, 100], np.int32))] == [[0, 1, 2]]
    assert [g.tolist() for g in similar(np.array([7], np.int32))] == [[0]]


def test_rows_that_share_pages_of_a_prefix():
    b = Bench(page_size=4)
    b.row(0, 8, [20, 21, 22])
    b.table[1, :3] = torch.tensor([20, 21, 33])
    b.dense[1] = b.dense[0]
    b.check(decode=[0, 1])
    b.check(decode=[1], spans={0: 3})


@pytest.mark.parametrize("stale", [0, 63, -1, 10**6])
def test_entries_beyond_the_length_of_a_row_are_never_followed(stale):
    """The page table keeps what former rows left in it (N5)."""
    b = Bench()
    b.table.fill_(stale)
    b.row(0, 2, [17])
    b.row(1, 30, list(range(40, 48)))
    b.check(decode=[0, 1])
    b.check(decode=[0], spans={1: 1})


def test_new_tokens_are_stored_where_the_view_says_and_nowhere_else():
    b = Bench(page_size=4)
    b.row(0, 5, [3, 9])
    b.row(1, 0, [12, 13])
    before = b.kv.clone()
    b.step(decode=[0], spans={1: 6})
    changed = (b.kv != before).flatten(3).any(-1)  # [2, pages, page_size]
    expected = torch.zeros_like(changed)
    expected[:, 9, 1] = True
    expected[:, 12, :] = True
    expected[:, 13, :2] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("window", [1, 4, 7, 12, 30])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_window_hides_what_lies_before_it_in_its_layers_only(layer, window):
    """Decode rows shorter and longer than the window, alone and together; fresh and cached prefill across its edge."""
    b = Bench(window=window)
    pages = b.rng.permutation(PAGES).tolist()
    for slot, n in enumerate([1, 6, 11, 25, 0, 9]):
        b.row(slot, n, [pages.pop() for _ in range(12)])
    b.check(decode=[3], layer=layer)
    b.check(decode=[0, 1, 2, 3], spans={4: 10, 5: 5}, layer=layer)
    b.check(decode=[2, 4], spans={1: 12}, layer=layer)
