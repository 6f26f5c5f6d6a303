"""Ops that no library has, as Triton kernels: head norms, rotation and KV write in one, KV write, inputs of decode steps."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.api.device import Ops, OpTable
from minisgl_plugins.ops.needs import HALVES, refusal

FLOATS = (torch.float32, *HALVES)
HEADS = 4  # of a program: few enough that one decode row fills several programs, enough that prefill has no tiny ones


class TritonOps(Ops):
    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return refusal(device, dtype, "triton", FLOATS)

    def table(self) -> OpTable:
        return {"qk_norm_rope_store": qk_norm_rope_store, "store_kv": store_kv, "decode_rows": decode_rows}


def qk_norm_rope_store(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    pos: Tensor, cos_sin: Tensor, kv: Tensor, loc: Tensor,
) -> Tensor:  # fmt: skip
    """q and k in place. The whole head is turned: cos_sin [max_len, head_dim] float32."""
    from minisgl_plugins.ops import triton_kernels

    n, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    assert cos_sin.shape[1] == head_dim, f"rotary_dim {cos_sin.shape[1]}, head_dim {head_dim}"
    for x in (q, k, v):
        assert x.stride(2) == 1, f"strides {x.stride()}: the elements of a head lie apart"
    values, place, head = _pool_strides(kv)
    groups = -(-heads // HEADS) + 2 * -(-kv_heads // HEADS)
    norm = q_weight is not None
    triton_kernels.qk_norm_rope_store[n, groups](
        q, k, v, q_weight if norm else q, k_weight if norm else k, pos, cos_sin, kv, loc,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], values, place, head, cos_sin.stride(0),
        eps, heads, kv_heads,
        HALF=head_dim // 2, BLOCK=_power(head_dim // 2), GROUP=HEADS, NORM=norm, num_warps=2,
    )  # fmt: skip
    return q


def store_kv(k: Tensor, v: Tensor, kv: Tensor, loc: Tensor) -> None:
    from minisgl_plugins.ops import triton_kernels

    n, kv_heads, head_dim = k.shape
    assert k.stride(2) == v.stride(2) == 1, f"strides {k.stride()}, {v.stride()}: the elements of a head lie apart"
    size = kv_heads * head_dim
    block = min(_power(size), 1024)
    triton_kernels.store_kv[n, 2, -(-size // block)](
        k, v, kv, loc, *k.stride()[:2], *v.stride()[:2], *_pool_strides(kv), size,
        HEAD=head_dim, BLOCK=block, num_warps=2,
    )  # fmt: skip


def decode_rows(
    n: Tensor, order: Tensor, kv_len: Tensor, next_token: Tensor, page_table: Tensor, page_size: int,
    slot: Tensor, kv: Tensor, pos: Tensor, loc: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    from minisgl_plugins.ops import triton_kernels

    rows = len(slot)
    block = min(_power(rows), 128)
    triton_kernels.decode_rows[-(-rows // block),](
        n, order, kv_len, next_token, page_table, slot, kv, pos, loc, tokens,
        rows, len(kv_len) - 1, page_table.stride(0), page_size, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _pool_strides(kv: Tensor) -> tuple[int, int, int]:
    """Of a layer's pool [2, pages, page_size, kv_heads, head_dim]: from K to V, from place to place, from head to head."""
    values, page, place, head, one = kv.stride()
    assert one == 1, f"strides {kv.stride()}: the elements of a head lie apart"
    assert page == place * kv.shape[2], f"strides {kv.stride()}: the places of all pages do not lie evenly"
    return values, place, head


def _power(size: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()
