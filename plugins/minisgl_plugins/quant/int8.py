"""int8 weights, one scale for each output; activations become int8 in each step, one scale for each token.

FBGEMM's kernel has one scale for all tokens of a step. Here each token is rotated (see ``rotation``) and divided by its largest
value, so that one scale is right for all: a token's result is the same to the bit whatever it is batched with, for the sums are
sums of integers.
"""

from __future__ import annotations

import platform
import warnings
from typing import Any

import torch
from torch import Tensor

from minisgl.api.device import Apply, QuantContext, QuantMethod, Turn
from minisgl_plugins.quant.rotation import Basis, Rotation, Turned, rotations

_TINY = 1e-30  # in place of the largest value of a token, or weight of an output, that is all zeros
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
        self._rotation = rotations()
        self.levels = 127 if self._exact(127) else 63

    def linear(self, weight: Tensor, head: bool) -> Apply:
        return self.product(weight, self.levels)

    def basis(self, size: int) -> Turn:
        return Basis(size)

    def turned(self, weight: Tensor, turn: Turn, head: bool) -> Apply:
        return self.product(weight, self.levels, Turned(turn))

    def product(self, weight: Tensor, levels: int, rotate: Rotation | Turned | None = None) -> Apply:
        """``levels``: of an activation's absolute value, 127, or 63 where sums of more could overflow 16 bits. ``rotate``: what
        makes inputs easier to round; None: a rotation of their own."""
        rotate = rotate or self._rotation(weight.shape[1])
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        packed = _pack(*quantize(weight, rotate))
        step, zero = 1 / levels, levels + 1  # unsigned: ``zero`` stands for 0

        def apply(x: Tensor, bias: Tensor | None) -> Tensor:
            x = rotate(x)
            largest = x.abs().amax(-1, True).clamp_min_(_TINY)  # [n, 1]
            out: Tensor = multiply(torch.div(x, largest), step, zero, packed)
            return out.mul_(largest) if bias is None else torch.addcmul(bias, out, largest)

        return apply

    def _exact(self, levels: int) -> bool:
        """Whether the largest products are summed right. CPUs without VNNI add pairs of them in 16 bits."""
        out = self.product(torch.full((16, 63), 127.0), levels)(torch.ones(1, 63), None)  # 63 inputs are not rotated
        return bool((out - 127.0 * 63).abs().max() < 1.0)


def quantize(weight: Tensor, rotate: Rotation | Turned) -> tuple[Tensor, Tensor]:
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


def _pack(low: Tensor, scales: Tensor) -> Any:
    """In the kernel's layout."""
    with warnings.catch_warnings():  # quantized tensors are deprecated since torch 2.13, see docs/decisions/006
        warnings.simplefilter("ignore")
        tensor = torch._make_per_channel_quantized_tensor(
            low, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
        )
        return torch.ops.quantized.linear_prepack(tensor, None)
