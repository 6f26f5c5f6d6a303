"""Ops from sgl_kernel (distribution sglang-kernel): norms, activation and mixtures of experts in half precision on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.api.device import Ops, OpTable
from minisgl_plugins.ops.needs import HALVES, installed, refusal
from minisgl_plugins.ops.triton_moe import Order, most_padded, products, tiles_for

PACK = 8  # elements that its activation kernel reads at once


class SglOps(Ops):
    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return refusal(device, dtype, "sgl_kernel", HALVES)

    def table(self) -> OpTable:
        table: OpTable = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul}
        return table | {"moe": moe} if installed("triton") else table


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


def moe(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool) -> Tensor:
    """Choice, sorting and sum by its kernels, the products by ours. Never waits for the device."""
    import sgl_kernel

    n, experts = logits.shape
    weights = torch.empty((n, top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((n, top_k), dtype=torch.int32, device=x.device)
    sgl_kernel.topk_softmax(weights, ids, logits.contiguous(), renormalize)
    tiles = tiles_for(n * top_k, experts)
    done = products(x, weights, gate_up, down, by_expert(ids, experts, tiles.rows), tiles)
    if x.shape[1] % (2 * PACK):  # its kernel for many tokens would leave the last columns out
        return done.sum(1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    sgl_kernel.moe_sum_reduce(done, out, 1.0)
    return out


def by_expert(ids: Tensor, experts: int, rows: int) -> Order:
    """Args: ids: [n, top_k] int32, the experts of each token. rows: pairs of a block."""
    import sgl_kernel

    size = most_padded(ids.numel(), experts, rows)
    pairs, expert, padded, scratch = (
        torch.empty(length, dtype=torch.int32, device=ids.device) for length in (size, size // rows, 1, experts + 2)
    )
    # It counts pairs that go to no expert as expert 0 and has room for them in its scratch: hence one more.
    sgl_kernel.moe_align_block_size(ids, experts + 1, rows, pairs, expert, padded, scratch, True)
    return Order(pairs, expert, padded)
