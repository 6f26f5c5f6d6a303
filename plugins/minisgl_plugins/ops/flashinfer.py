"""Ops from FlashInfer: norms, rotary embedding and activation in half precision on CUDA.

Its kernels read views of the merged projection as they are, and compute in float32 with one rounding at the end. What a kernel
is not made for goes another way in plain torch: slower, never wrong.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api.device import Ops, OpTable
from minisgl_plugins.ops.needs import HALVES, refusal

ROPE_HEADS = (64, 128, 256, 512)  # sizes its rotary kernel has; others it would send through one that also quantizes
PACK = 8  # elements that its activation kernel reads at once


class FlashInferOps(Ops):
    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return refusal(device, dtype, "flashinfer", HALVES)

    def table(self) -> OpTable:
        return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "rope": rope, "silu_mul": silu_mul}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import flashinfer

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flashinfer.norm.rmsnorm(x, weight, eps, out=out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both in place."""
    import flashinfer

    flashinfer.norm.fused_add_rmsnorm(x, residual, weight, eps)
    return x, residual


def rope(q: Tensor, k: Tensor, pos: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """In place. cos_sin: float32."""
    head_dim = q.shape[2]
    if head_dim not in ROPE_HEADS or cos_sin.shape[1] != head_dim:
        return _turn(q, pos, cos_sin), _turn(k, pos, cos_sin)
    import flashinfer

    flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(pos, q, k, head_dim, cos_sin, is_neox=True)
    return q, k


def _turn(x: Tensor, pos: Tensor, cos_sin: Tensor) -> Tensor:
    """Each pair (x[i], x[i + head_dim / 2]) turned by its angle, in float32."""
    cos, sin = cos_sin.index_select(0, pos).unsqueeze(1).chunk(2, -1)  # [n, 1, head_dim / 2]
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    if x.shape[-1] % (2 * PACK) or not x.is_contiguous():
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    import flashinfer

    out: Tensor = flashinfer.activation.silu_and_mul(x)
    return out
