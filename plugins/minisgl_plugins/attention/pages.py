"""The pages of some rows in the form that FlashInfer reads: one row's after the other's, with the row offsets beside them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

Fill = Callable[[Tensor, Tensor, Tensor, int, Tensor, Tensor, Tensor], None]
BLOCK = 512  # pages that a program of the kernel copies at a time


def fill_pages(
    kv: Tensor, slot: Tensor, table: Tensor, page_size: int, indptr: Tensor, last: Tensor, indices: Tensor
) -> None:
    """Every shape is known without a look at the device, so that a graph can record it.

    Args: kv, slot: [n] int64, tokens and slot of each row. table: [slots, columns] int32.
    Fills: indptr [n + 1] int32, row offsets into ``indices``; last [n] int32, tokens in each row's last page; indices [m]
    int32, the pages, with m at least their number; what lies beyond them is undefined.
    """
    pages = (kv + page_size - 1) // page_size
    last.copy_(kv - (pages - 1) * page_size)
    indptr[:1].zero_()
    indptr[1:].copy_(pages.cumsum(0))
    at = torch.arange(len(indices), device=kv.device)
    row = torch.searchsorted(indptr[1:], at, right=True).clamp_(max=len(kv) - 1)
    column = (at - indptr.index_select(0, row)).clamp_(max=table.shape[1] - 1)
    cell = slot.index_select(0, row) * table.shape[1] + column
    indices.copy_(table.view(-1).index_select(0, cell))


def fill_pages_triton(
    kv: Tensor, slot: Tensor, table: Tensor, page_size: int, indptr: Tensor, last: Tensor, indices: Tensor
) -> None:
    """``fill_pages`` in one kernel."""
    from minisgl_plugins.attention import triton_kernels

    n = kv.shape[0]
    rows = 1 << (n - 1).bit_length()
    triton_kernels.fill_pages[(n,)](
        kv, slot, table, indptr, last, indices, n, table.shape[1], PAGE_SIZE=page_size, ROWS=rows, BLOCK=BLOCK
    )


def filler(device: torch.device) -> Fill:
    """The kernel on a GPU with Triton, else the reference."""
    return fill_pages_triton if device.type == "cuda" and find_spec("triton") is not None else fill_pages
