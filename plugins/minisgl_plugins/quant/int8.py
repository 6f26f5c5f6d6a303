"""int8 weights, one scale for each output; activations become int8 in each step, one scale for each token.

Torch's fast kernel (``quantized::linear_dynamic``, FBGEMM) has one scale for all tokens of a step, so that what a request
gets would depend on its neighbours. Here each token is rotated (see ``rotation``) and divided by its largest value, and
columns before and after it, whose weights are zero, hold the ends of the range: the kernel always finds the same scale, and a
token's result is the same to the bit whatever it is batched with, for the sums are sums of integers.
"""

from __future__ import annotations

import platform
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api.device import Apply, QuantContext, QuantMethod
from minisgl_plugins.quant.rotation import Rotation, rotations

# Columns before and after the values of a token. The kernel's search for the range begins with the first value of all and ends
# with a vector of 8: with the ends of the range in both, not even another token's NaN makes it find a different one.
_EDGE = 8
_TINY = 1e-30  # in place of the largest value of a token that is all zeros
_CHUNK = 1 << 24  # weights quantized at a time, which bounds the memory that takes


def unsupported(device: str, dtype: str) -> str | None:
    """As ``QuantMethod.supports``, for the kernels of this folder."""
    if device != "cpu":
        return "it has kernels for CPUs only; use --device cpu, or --quant auto"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"it has kernels for x86-64 only, and this is {platform.machine()}; use --quant auto"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch lacks FBGEMM; install torch from PyPI, or use --quant auto"
    if dtype != "float32":
        return "it works with float32 activations; use --dtype float32, which is what auto means on a CPU"
    return None


class Int8Quant(QuantMethod):
    experts = True

    @classmethod
    def supports(cls, device: str, dtype: str) -> str | None:
        return unsupported(device, dtype)

    def __init__(self, ctx: QuantContext) -> None:
        super().__init__(ctx)
        self._rooms: dict[tuple[int, int], _Room] = {}  # by inputs and levels
        self._rotation = rotations()
        self.levels = 127 if self._exact(127) else 63

    def linear(self, weight: Tensor, head: bool) -> Apply:
        return self.product(weight, self.levels)

    def product(self, weight: Tensor, levels: int) -> Apply:
        """``levels``: of an activation's absolute value, 127, or 63 where sums of more could overflow 16 bits."""
        inputs = weight.shape[1]
        rotate, linear = self._rotation(inputs), torch.ops.quantized.linear_dynamic
        packed, reduced = _pack(*quantize(weight, rotate)), levels < 127
        room = self._rooms.setdefault((inputs, levels), _Room(inputs, levels))

        def apply(x: Tensor, bias: Tensor | None) -> Tensor:
            x = rotate(x)
            largest = x.abs().amax(-1, True).clamp_min_(_TINY)  # [n, 1]
            ranged, values = room.of(len(x))
            torch.div(x, largest, out=values)
            out: Tensor = linear(ranged, packed, reduced)
            return out.mul_(largest) if bias is None else torch.addcmul(bias, out, largest)

        return apply

    def _exact(self, levels: int) -> bool:
        """Whether the largest products are summed right. CPUs without VNNI add pairs of them in 16 bits."""
        out = self.product(torch.full((16, 63), 127.0), levels)(torch.ones(1, 63), None)  # 63 inputs are not rotated
        self._rooms.clear()
        return bool((out - 127.0 * 63).abs().max() < 1.0)


class _Room:
    """What activations are written to, between the ends of the range. Layers with as many inputs share it.

    With these ends the kernel computes the scale 1 / levels, and a zero point in the middle.
    """

    def __init__(self, inputs: int, levels: int) -> None:
        self._inputs, self._levels = inputs, levels
        self._rows = 0
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, rows: int) -> tuple[Tensor, Tensor]:
        """Returns: [rows, width], and the part of it for the activations [rows, inputs]."""
        if (found := self._views.get(rows)) is not None:
            return found
        if rows > self._rows:
            self._views.clear()
            self._grow(rows)
        ranged = self._whole[:rows]
        self._views[rows] = ranged, ranged[:, _EDGE : _EDGE + self._inputs]
        return self._views[rows]

    def _grow(self, rows: int) -> None:
        with torch.inference_mode(False):  # whoever calls first, others may write to it
            self._whole = torch.zeros(rows, _width(self._inputs))
            for edge in (self._whole[:, :_EDGE], self._whole[:, -_EDGE:]):
                edge[:, ::2], edge[:, 1::2] = 1.0, -(self._levels + 1) / self._levels
        self._rows = rows


def quantize(weight: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor]:
    """Args: weight: [outputs, inputs]. Returns: int8 of the rotated weight [outputs, inputs] and float32 scales [outputs]."""
    low = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    rows = max(1, _CHUNK // weight.shape[1])
    for at in range(0, weight.shape[0], rows):
        part = rotate.weight(weight[at : at + rows])
        scale = part.abs().amax(1).clamp_min_(_TINY).div_(127)
        scales[at : at + rows] = scale
        low[at : at + rows] = (part / scale[:, None]).round_()
    return low, scales


def _width(inputs: int) -> int:
    """Columns of a row with its edges; whole vectors."""
    return _EDGE + inputs + -inputs % _EDGE + _EDGE


def _pack(low: Tensor, scales: Tensor) -> Any:
    """In the kernel's layout, with zeros for the other columns."""
    inputs = low.shape[1]
    padded = F.pad(low, (_EDGE, _width(inputs) - inputs - _EDGE))
    with warnings.catch_warnings():  # quantized tensors are deprecated since torch 2.13, see docs/decisions/006
        warnings.simplefilter("ignore")
        tensor = torch._make_per_channel_quantized_tensor(
            padded, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
        )
        return torch.ops.quantized.linear_prepack(tensor, None)
