"""Ops from sgl_kernel (distribution sglang-kernel): norms and activation in half precision on CUDA."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api import ConfigError
from minisgl.api.device import Ops, OpsContext, OpTable

HALVES = (torch.float16, torch.bfloat16)
PACK = 8  # elements that its activation kernel reads at once


class SglOps(Ops):
    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"device is {device.type!r}; its kernels run on 'cuda'"
        if find_spec("sgl_kernel") is None:
            return "needs package 'sglang-kernel': pip install 'minisgl[cuda]'"
        if dtype not in HALVES:
            return f"dtype is {dtype}; its kernels take float16 and bfloat16"
        return None

    def __init__(self, ctx: OpsContext) -> None:
        super().__init__(ctx)
        if (reason := self.supports(ctx.device, ctx.dtype)) is not None:
            raise ConfigError(f"ops 'sgl' cannot be used: {reason}; use ops=auto, or 'torch' on any device")

    def table(self) -> OpTable:
        return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Its kernel takes rows side by side: heads with gaps between their tokens are copied first."""
    import sgl_kernel

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = sgl_kernel.rmsnorm(rows, weight, eps, out=torch.empty_like(rows))
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both in place."""
    import sgl_kernel

    x, residual = x.contiguous(), residual.contiguous()
    sgl_kernel.fused_add_rmsnorm(x, residual, weight, eps)
    return x, residual


def silu_mul(x: Tensor) -> Tensor:
    if x.shape[-1] % (2 * PACK):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    import sgl_kernel

    out: Tensor = sgl_kernel.silu_and_mul(x.contiguous())
    return out
