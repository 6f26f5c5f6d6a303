"""Triton kernels of the attention backends; imported only where triton is used."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def fill_pages(
    kv, slot, table, indptr, last, indices, n, columns, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """See ``pages.fill_pages``: no library gathers rows of different length from a page table. One program for each row. Each
    adds up the pages of the rows before its own: there are few rows, and so no second kernel is needed for the sum."""
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    pages = (tl.load(kv + every, mask=every < n, other=0) + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(tl.where(every < row, pages, 0))
    length = tl.load(kv + row)
    own = (length + PAGE_SIZE - 1) // PAGE_SIZE
    tl.store(last + row, (length - (own - 1) * PAGE_SIZE).to(tl.int32))
    tl.store(indptr + row + 1, (start + own).to(tl.int32))
    if row == 0:
        tl.store(indptr, 0)
    source = table + tl.load(slot + row) * columns
    for first in range(0, own, BLOCK):
        at = first + tl.arange(0, BLOCK)
        page = tl.load(source + at, mask=at < own, other=0)
        tl.store(indices + start + at, page, mask=at < own)
