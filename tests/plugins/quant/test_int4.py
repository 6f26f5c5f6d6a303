"""int4 linear layers: the stored weights, the products with few and with many rows."""

import pytest
import torch

from minisgl.api.device import QuantContext
from minisgl_plugins.quant.int4 import GROUP, Int4Quant, dequantize, quantize

SHAPES = [(960, 576), (199, 48), (3, 5), (64, 130)]


def method(**options):
    return Int4Quant(QuantContext(Int4Quant.Settings(**options), torch.device("cpu"), torch.float32))


def tensors(outputs, inputs, rows=9):
    g = torch.Generator().manual_seed(inputs)
    return torch.randn(rows, inputs, generator=g), torch.randn(outputs, inputs, generator=g) / 8


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_weights_are_off_by_half_a_step_of_their_group(outputs, inputs):
    _, w = tensors(outputs, inputs)
    error = (dequantize(*quantize(w))[:outputs, :inputs] - w).abs()
    padded = torch.nn.functional.pad(w, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    step = (padded.amax(2) - padded.amin(2)) / 15
    bfloat16 = 2**-8 * (padded.abs().amax(2) + 8 * step)  # the scale and the middle are rounded to 8 bits
    bound = (step / 2 + bfloat16).repeat_interleave(GROUP, 1)[:, :inputs]
    assert (error <= bound).all()


def test_weights_on_a_grid_of_16_steps_are_kept_exactly():
    steps = torch.randint(0, 16, (32, 96), generator=torch.Generator().manual_seed(1))
    steps[:, ::GROUP], steps[:, 1::GROUP] = 0, 15
    scale = torch.exp2(-(torch.arange(32.0) % 5))[:, None]  # the scale is exact in bfloat16
    low, scale_low = quantize((steps - 8) * scale)
    assert torch.equal(low.long(), steps)
    assert torch.equal(dequantize(low, scale_low), (steps - 8) * scale)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_few_rows_are_products_with_the_stored_weights_in_bfloat16(outputs, inputs, bias):
    x, w = tensors(outputs, inputs, rows=4)
    stored = dequantize(*quantize(w))[:outputs, :inputs].double()
    b = torch.linspace(-1, 1, outputs) if bias else None
    expected = x.double() @ stored.T + (b.double() if b is not None else 0)
    error = (method().linear(w, head=False)(x, b).double() - expected).abs()
    assert (error <= 2**-8 * (x.abs().double() @ stored.abs().T) + 1e-6).all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_many_rows_use_the_same_weights_in_int8(outputs, inputs):
    x, w = tensors(outputs, inputs, rows=5)
    linear = method().linear(w, head=False)
    expected = x.double() @ dequantize(*quantize(w))[:outputs, :inputs].double().T
    assert (linear(x, None) - expected).norm() < 0.02 * expected.norm()
    assert (linear(x[:4], None) - expected[:4]).norm() < 0.01 * expected[:4].norm()
    assert not torch.equal(linear(x, None)[:4], linear(x[:4], None))  # as the option's help says


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_without_the_copy_a_row_does_not_depend_on_its_neighbours(outputs, inputs):
    x, w = tensors(outputs, inputs, rows=40)
    linear = method(max_tokens=None).linear(w, head=False)
    together = linear(x, None)
    for rows in ([0], [7, 3], range(16, 33)):
        assert torch.allclose(linear(x[list(rows)], None), together[list(rows)], rtol=2**-7, atol=1e-5)


def test_the_head_is_int8():
    x, w = tensors(199, 576)
    expected = x.double() @ w.double().T
    out = method().linear(w, head=True)(x[:1], None)
    assert (out - expected[:1]).norm() < 0.015 * expected[:1].norm()  # int4 is off by five times that


def test_a_group_of_equal_weights_is_kept():
    w = torch.full((16, 64), 0.25)
    w[:, 32:] = 0
    assert torch.equal(dequantize(*quantize(w)), w)
