"""The products of a mixture of experts in Triton: what sgl_kernel, which routes, sorts and sums, has no kernel for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """``rows``: pairs of a block; each expert's are filled up to a multiple of it. ``columns``, ``depth``: of a block's product."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs (token, expert) by expert. A pair is ``token * top_k + choice``.

    ``pairs`` [blocks * rows] int32, numbers beyond all pairs where a block is not full; ``expert`` [blocks] int32;
    ``padded`` [1] int32: how many of ``pairs`` are used.
    """

    pairs: Tensor
    expert: Tensor
    padded: Tensor


# By the mean number of pairs of an expert, rounded up to blocks: few pairs read weights, many multiply.
FEW, SOME, MANY = Tiles(16, 64, 128, 4, 4), Tiles(64, 64, 64, 4, 4), Tiles(128, 128, 64, 8, 3)


def tiles_for(num_pairs: int, experts: int) -> Tiles:
    mean = num_pairs / experts
    return FEW if mean <= 24 else SOME if mean <= 96 else MANY


def most_padded(num_pairs: int, experts: int, rows: int) -> int:
    """The most that ``Order.padded`` can be, whatever the router chose: the shapes of a step do not depend on it."""
    return rows * min(num_pairs, (num_pairs + experts * (rows - 1)) // rows)


def products(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, order: Order, tiles: Tiles) -> Tensor:
    """Each pair through its expert, times its weight.

    Args: x: [n, hidden]. weights: [n, top_k] float32. gate_up, down: as the op ``moe`` has them.
    Returns: [n, top_k, hidden].
    """
    from minisgl_plugins.ops import triton_kernels

    n, hidden = x.shape
    top_k, width = weights.shape[1], down.shape[2]
    assert gate_up.is_contiguous(), f"strides {gate_up.stride()}"
    assert down.is_contiguous(), f"strides {down.stride()}"
    blocks = order.expert.shape[0]
    inner = torch.empty((n * top_k, width), dtype=x.dtype, device=x.device)
    out = torch.empty((n, top_k, hidden), dtype=x.dtype, device=x.device)
    sizes = {"HIDDEN": hidden, "WIDTH": width, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    triton_kernels.experts_gate_up[blocks * -(-width // tiles.columns),](
        x.contiguous(), gate_up, inner, order.pairs, order.expert, order.padded, n * top_k, top_k,
        **sizes, **launch,
    )  # fmt: skip
    triton_kernels.experts_down[blocks * -(-hidden // tiles.columns),](
        inner, down, weights, out, order.pairs, order.expert, order.padded, n * top_k, **sizes, **launch
    )
    return out
