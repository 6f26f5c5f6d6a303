"""The torch ops against float64 arithmetic."""

import cmath

import pytest
import torch

from minisgl.api.device import OpsContext
from minisgl_plugins.ops.torch import TorchOps

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


def test_silu_mul(ops):
    x = torch.randn(3, 20)
    gate, up = x.double()[:, :10], x.double()[:, 10:]
    assert torch.allclose(ops["silu_mul"](x.clone()).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6)
