"""The torch ops against float64 arithmetic."""

import cmath

import pytest
import torch

from minisgl.api.device import OpsContext
from minisgl.nn.experts import mixture
from minisgl_plugins.ops.torch import TorchOps, grouped

EPS = 1e-5


@pytest.fixture
def ops():
    return TorchOps(OpsContext(TorchOps.Settings(), torch.device("cpu"), torch.float32)).table()


def normed(x, weight, eps=EPS):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("n", [1, 3, 40])
def test_rms_norm(ops, n):
    x, weight = torch.randn(n, 64), torch.randn(64)
    before = x.clone()
    assert torch.allclose(ops["rms_norm"](x, weight, EPS).double(), normed(x, weight), atol=1e-5)
    assert torch.equal(x, before)  # it is the residual of the first layer


def test_rms_norm_of_zeros_and_of_tiny_values_follows_epsilon(ops):
    for x in (torch.zeros(1, 8), torch.full((1, 8), 1e-4)):
        for eps in (1e-5, 0.5):
            assert torch.allclose(
                ops["rms_norm"](x, torch.ones(8), eps).double(), normed(x, torch.ones(8), eps), atol=1e-7
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_norm_is_computed_in_float32(ops, dtype):
    x, weight = (torch.randn(5, 64) * 300).to(dtype), torch.randn(64).to(dtype)  # squares overflow float16
    out = ops["rms_norm"](x, weight, EPS)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), normed(x, weight), rtol=0.02, atol=0.02)


def test_add_rms_norm_gives_the_norm_of_the_sum_and_the_sum(ops):
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    total = x + residual
    out, kept = ops["add_rms_norm"](x.clone(), residual.clone(), weight, EPS)
    assert torch.allclose(out.double(), normed(total, weight), atol=1e-5)
    assert torch.allclose(kept, total)


def test_rope_turns_each_pair_by_its_angle_at_its_position(ops):
    """Against complex rotation of the pairs (i, i + head_dim / 2), position by position, for two steps in turn."""
    heads, kv_heads, dim = 3, 2, 8
    freq = [10.0**-i for i in range(dim // 2)]
    angle = torch.arange(30)[:, None] * torch.tensor(freq)
    table = torch.cat((angle.cos(), angle.sin()), 1)
    for pos in (torch.tensor([0, 5, 29]), torch.tensor([7, 7, 1])):
        q, k = torch.randn(3, heads, dim), torch.randn(3, kv_heads, dim)
        for x, got in zip((q, k), ops["rope"](q.clone(), k.clone(), pos, table)):
            for t in range(3):
                for h in range(x.shape[1]):
                    for i in range(dim // 2):
                        pair = complex(x[t, h, i], x[t, h, i + dim // 2]) * cmath.exp(1j * int(pos[t]) * freq[i])
                        assert got[t, h, i].item() == pytest.approx(pair.real, abs=1e-5)
                        assert got[t, h, i + dim // 2].item() == pytest.approx(pair.imag, abs=1e-5)


@pytest.mark.parametrize("normed_heads", [True, False])
def test_rotation_and_kv_write_at_once_are_those_of_the_single_ops(ops, normed_heads):
    """The heads are views of one tensor, as the merged projection gives them."""
    n, heads, kv_heads, dim = 5, 6, 2, 8
    merged = torch.randn(n, (heads + 2 * kv_heads) * dim)
    q, k, v = torch.split(merged.clone().view(n, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    table, pos, loc = torch.randn(30, dim), torch.tensor([0, 5, 29, 7, 7]), torch.tensor([3, 17, 8, 0, 20])
    weights = (torch.randn(dim), torch.randn(dim)) if normed_heads else (None, None)
    single = torch.randn(2, 6, 4, kv_heads, dim)
    fused = single.clone()
    a, b = (x.clone() for x in (q, k))
    if normed_heads:
        a, b = ops["rms_norm"](a, weights[0], EPS), ops["rms_norm"](b, weights[1], EPS)
    a, b = ops["rope"](a, b, pos, table)
    ops["store_kv"](b, v, single, loc)
    assert torch.equal(ops["qk_norm_rope_store"](q, k, v, *weights, EPS, pos, table, fused, loc), a)
    assert torch.equal(fused, single)
    assert torch.equal(k, b)  # attention of a prompt reads it from here


def test_silu_mul(ops):
    x = torch.randn(3, 20)
    gate, up = x.double()[:, :10], x.double()[:, 10:]
    assert torch.allclose(ops["silu_mul"](x.clone()).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6)


def expected_moe(x, logits, gate_up, down, top_k, renormalize):
    """Token by token, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for i, token in enumerate(x.double()):
        weights, chosen = torch.softmax(logits[i].double(), 0).sort(descending=True)
        weights, chosen = weights[:top_k], chosen[:top_k]
        if renormalize:
            weights = weights / weights.sum()
        for w, e in zip(weights, chosen):
            gate, up = (gate_up[e].double() @ token).chunk(2)
            out[i] += w * (down[e].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("n", "experts", "top_k"), [(1, 4, 1), (1, 8, 8), (7, 8, 2), (40, 128, 8), (300, 3, 2)])
def test_moe(ops, n, experts, top_k, renormalize):
    x, logits = torch.randn(n, 16), torch.randn(n, experts)
    gate_up, down = torch.randn(experts, 12, 16) / 4, torch.randn(experts, 16, 6) / 4
    before = x.clone()
    got = ops["moe"](x, logits, gate_up, down, top_k, renormalize)
    assert torch.allclose(got.double(), expected_moe(x, logits, gate_up, down, top_k, renormalize), atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("n", "experts", "top_k"), [(1, 4, 1), (1, 8, 8), (7, 8, 2), (40, 128, 8), (300, 3, 2)])
def test_moe_in_grouped_products_gives_the_same(n, experts, top_k):
    """What a CUDA device runs where torch has a kernel for it: no shape in it depends on the routing."""
    x, logits = torch.randn(n, 16), torch.randn(n, experts)
    gate_up, down = torch.randn(experts, 16, 16) / 4, torch.randn(experts, 16, 8) / 4
    got = mixture(x, logits, top_k, True, lambda rows, ids: grouped(rows, ids, gate_up, down))
    assert torch.allclose(got.double(), expected_moe(x, logits, gate_up, down, top_k, True), atol=1e-5)


def test_moe_with_all_tokens_at_one_expert(ops):
    x, gate_up, down = torch.randn(9, 16), torch.randn(5, 12, 16), torch.randn(5, 16, 6)
    logits = torch.zeros(9, 5)
    logits[:, 3] = 30.0
    got = ops["moe"](x, logits, gate_up, down, 1, False)
    assert torch.allclose(got.double(), expected_moe(x, logits, gate_up, down, 1, False), atol=1e-4)


def test_moe_of_a_token_does_not_depend_on_its_neighbours_p1(ops):
    """Up to the rounding of a product of other size."""
    x, logits = torch.randn(33, 16), torch.randn(33, 8)
    gate_up, down = torch.randn(8, 12, 16), torch.randn(8, 16, 6)
    together = ops["moe"](x, logits, gate_up, down, 2, True)
    alone = torch.cat([ops["moe"](x[i : i + 1], logits[i : i + 1], gate_up, down, 2, True) for i in range(33)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_moe_routes_in_float32_in_half_precision(ops):
    """Two logits that only float32 softmax tells apart would be equal weights in bfloat16."""
    x = torch.randn(2, 16, dtype=torch.bfloat16)
    logits = torch.tensor([[1.0, 1.0078125, -9.0], [0.5, 0.0, 0.25]], dtype=torch.bfloat16)
    gate_up, down = torch.randn(3, 12, 16).bfloat16(), torch.randn(3, 16, 6).bfloat16()
    got = ops["moe"](x, logits, gate_up, down, 1, False)
    assert got.dtype == torch.bfloat16
    expected = expected_moe(x, logits, gate_up, down, 1, False)
    assert torch.allclose(got.double(), expected, atol=0.02 * float(expected.abs().max()))


def test_rms_norm_of_heads_that_lie_apart(ops):
    """q of a merged projection: the norm of each head by itself."""
    qkv = torch.randn(5, 9, 8)
    x, weight = qkv[:, 2:6], torch.randn(8)
    before = qkv.clone()
    assert torch.allclose(ops["rms_norm"](x, weight, EPS).double(), normed(x, weight), atol=1e-5)
    assert torch.equal(qkv, before)
