"""int8 linear layers: error bounds from the rounding steps in float64, and rows that do not see one another."""

import pytest
import torch

from minisgl.api.device import QuantContext
from minisgl_plugins.quant.int8 import Int8Quant, quantize
from minisgl_plugins.quant.rotation import Basis, Rotation, block, hadamard

SHAPES = [(960, 576), (199, 48), (3, 5), (1, 1), (64, 130)]


@pytest.fixture(scope="module")
def method():
    return Int8Quant(QuantContext(None, torch.device("cpu"), torch.float32))


def tensors(outputs, inputs, rows=9):
    g = torch.Generator().manual_seed(outputs)
    x, w = torch.randn(rows, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
    x[:, 0] *= 30  # an input that is much larger than the rest, as language models have them
    return x, w, torch.randn(outputs, generator=g)


def rotated(x):
    """In float64, by the definition of the Walsh-Hadamard matrix: (-1) ** popcount(i & j)."""
    inputs = x.shape[1]
    size = next(s for s in (64, 32, 16, 8, 4, 2, 1) if inputs % s == 0)
    h = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)], dtype=torch.float64)
    return (x.double().view(len(x), -1, size) @ h).view(x.shape), size


@pytest.mark.parametrize("levels", [127, 63])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_errors_stay_within_the_rounding_of_activations_and_weights(outputs, inputs, levels, method):
    x, w, bias = tensors(outputs, inputs)
    (xr, size), (wr, _) = rotated(x), rotated(w)
    wr /= size
    x_step = xr.abs().amax(1, keepdim=True) / levels  # each value is off by half a step at most
    w_step = wr.abs().amax(1) / 127
    bound = x_step / 2 * wr.abs().sum(1) + (xr.abs() + x_step / 2).sum(1, keepdim=True) * w_step / 2
    error = (method.product(w, levels)(x, bias).double() - (x.double() @ w.double().T + bias)).abs()
    assert (error <= bound * (1 + 1e-3) + 1e-5).all()
    assert (error.mean() < 0.2 * bound.mean()) or inputs < 8  # errors of many inputs cancel


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_is_the_same_to_the_bit_whatever_it_is_batched_with(outputs, inputs, method):
    x, w, bias = tensors(outputs, inputs, rows=300)
    linear = method.linear(w, head=False)
    together = linear(x, bias)
    for rows in ([0], [7, 3], range(16, 33), range(299)):
        assert torch.equal(linear(x[list(rows)], bias), together[list(rows)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("filled", [True, False])
def test_a_row_that_is_not_finite_spoils_no_other(bad, filled, method):
    x, w, _ = tensors(64, 130)
    linear = method.linear(w, head=False)
    expected = linear(x, None)
    for row in range(len(x)):
        spoiled = x.clone()
        spoiled[row, 0 if filled else 50 :] = bad
        others = [i for i in range(len(x)) if i != row]
        out = linear(spoiled, None)
        assert torch.equal(out[others], expected[others])
        assert not out[row].isfinite().any()


def test_a_row_of_zeros_gives_the_bias(method):
    _, w, bias = tensors(199, 48)
    assert torch.equal(method.linear(w, head=False)(torch.zeros(2, 48), bias), bias.expand(2, -1))


def test_weights_that_int8_can_hold_are_kept_exactly(method):
    """63 inputs are not rotated; each output has its largest weight, 127 steps."""
    steps = torch.randint(-127, 128, (40, 63), generator=torch.Generator().manual_seed(0))
    steps[:, 5] = 127
    scale = torch.exp2(-(torch.arange(40.0) % 12))  # powers of two, so that division is exact
    low, scales = quantize(steps * scale[:, None], Rotation(1))
    assert torch.equal(low.int(), steps.int())
    assert torch.equal(scales, scale)
    unit = torch.eye(63)  # one input each: reads the weights back
    assert torch.allclose(method.linear(steps * scale[:, None], head=False)(unit, None), steps.T * scale, rtol=1e-6)


def test_inputs_are_not_changed(method):
    x, w, bias = tensors(64, 130)
    before = x.clone()
    method.linear(w, head=False)(x, bias)
    assert torch.equal(x, before)


def test_layers_of_one_width_share_their_buffer_and_not_their_results(method):
    x, w, _ = tensors(64, 130)
    first, second = method.linear(w, head=False), method.linear(-w, head=False)
    a = first(x, None)
    kept = a.clone()
    b = second(x[:3], None)
    assert torch.equal(a, kept)
    assert torch.equal(b, -a[:3])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_works_in_and_out_of_inference_mode_in_any_order(mode, method):
    x, w, _ = tensors(30, 77)
    linear = method.linear(w, head=False)
    with mode():
        inside = linear(x, None)
    assert torch.equal(linear(x, None), inside)
    with torch.inference_mode():
        assert torch.equal(linear(x, None), inside)


@pytest.mark.parametrize(("inputs", "size"), [(1, 1), (5, 1), (48, 16), (576, 64), (1536, 64), (130, 2)])
def test_rotation_blocks_divide_the_inputs(inputs, size):
    assert block(inputs) == size
    h = hadamard(size)
    assert torch.equal(h @ h.T, size * torch.eye(size))


@pytest.mark.parametrize("size", [1, 2, 56, 63, 64, 80, 576, 960, 2048])
def test_a_basis_is_orthogonal_and_spreads_each_element_over_all(size):
    matrix = Basis(size)(torch.eye(size))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5)
    assert matrix.abs().max() <= (2 / size) ** 0.5 + 1e-6 or size == 1
    assert torch.equal(matrix, Basis(size)(torch.eye(size)))  # all ranks have the same
