"""int4 weights with a scale and a minimum for each group of 32 inputs, for steps of few tokens: reading the weights is what
takes time there, and they are an eighth of float32.

The kernel multiplies in bfloat16 and is slow for many tokens. Steps of more than ``max_tokens`` use an int8 copy of the
int4 weights, see ``int8``. The head, for which int4 is no faster, is int8 always. A rank's share of a layer has groups of its
own, the last of which may be short.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from minisgl.api import PluginSettings
from minisgl.api.device import Apply, QuantContext, QuantMethod
from minisgl_plugins.quant.int8 import Int8Quant, unsupported

GROUP = 32  # inputs that share a scale
_OUTPUTS = 16  # the kernel's outputs come in such numbers
_SMALLEST = 2.0**-100  # scale of a group of equal weights; a bfloat16 that is not denormal


class Int4Quant(QuantMethod):
    experts = True

    class Settings(PluginSettings):
        max_tokens: int | None = Field(
            4,
            ge=1,
            description="most tokens of a step that are multiplied with int4 weights; longer steps use an int8 copy of them, so a "
            "request's numbers differ slightly with its neighbours. none: int4 always, without the copy",
        )

    @classmethod
    def supports(cls, device: str, dtype: str) -> str | None:
        return unsupported(device, dtype)

    def __init__(self, ctx: QuantContext) -> None:
        super().__init__(ctx)
        self._int8 = Int8Quant(ctx)

    def linear(self, weight: Tensor, head: bool) -> Apply:
        if head:
            return self._int8.linear(weight, head)
        low, scale_low = quantize(weight)
        few = _product(low, scale_low, weight.shape)
        limit = self.settings.max_tokens
        if limit is None:
            return few
        many = self._int8.linear(dequantize(low, scale_low)[: weight.shape[0], : weight.shape[1]], head)

        def apply(x: Tensor, bias: Tensor | None) -> Tensor:
            return few(x, bias) if len(x) <= limit else many(x, bias)

        return apply


def _product(low: Tensor, scale_low: Tensor, shape: torch.Size) -> Apply:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(low, 1)
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    outputs, extra = shape[0], low.shape[1] - shape[1]

    def apply(x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(torch.bfloat16)
        out: Tensor = multiply(F.pad(x, (0, extra)) if extra else x, packed, GROUP, scale_low)
        out = out[:, :outputs].to(torch.float32)
        return out if bias is None else out.add_(bias)

    return apply


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to the nearest of 16 steps from a group's least to its greatest weight.

    Args: weight: [outputs, inputs]; zeros are added up to multiples of 16 and 32.
    Returns: int32 0..15 [outputs, inputs], and bfloat16 [inputs / 32, outputs, 2], the scale and the value of step 8.
    """
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % GROUP, 0, -outputs % _OUTPUTS))
    groups = weight.view(weight.shape[0], -1, GROUP)
    least, greatest = torch.aminmax(groups, dim=-1)  # [outputs, groups]
    scale = ((greatest - least) / 15).clamp_min_(_SMALLEST).to(torch.bfloat16)
    middle = (least + 8 * scale.float()).to(torch.bfloat16)
    steps = (groups - middle.float().unsqueeze(-1)).div_(scale.float().unsqueeze(-1)).round_().add_(8).clamp_(0, 15)
    return steps.to(torch.int32).view(weight.shape), torch.stack((scale, middle), -1).transpose(0, 1).contiguous()


def dequantize(low: Tensor, scale_low: Tensor) -> Tensor:
    """The float32 weights that ``quantize`` stands for, padded as it pads."""
    scale, middle = scale_low.float().transpose(0, 1).unsqueeze(-1).unbind(2)  # [outputs, groups, 1]
    groups = low.view(low.shape[0], -1, GROUP)
    return ((groups - 8) * scale + middle).view(low.shape)
