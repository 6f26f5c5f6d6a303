"""Triton kernels of ``minisgl_plugins.ops.triton``; imported only where triton is used."""

import triton
import triton.language as tl

# Arguments that come at any address or of any size at run time are not specialized on: each form would be compiled anew, in the
# middle of serving.


@triton.jit(do_not_specialize_on_alignment=["pos", "loc"])
def qk_norm_rope_store(
    q, k, v, q_weight, k_weight, pos, cos_sin, kv, loc,
    q_token, q_head, k_token, k_head, v_token, v_head, kv_values, kv_place, kv_head, cos_row,
    eps, heads, kv_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program for each (token, group of heads): those of q first, then those of k, then those of v. ``HALF``: half of a
    head, which is a row of ``BLOCK`` >= HALF; ``GROUP``: heads of a program. The names in the second row are strides."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups = tl.cdiv(heads, GROUP)
    kv_groups = tl.cdiv(kv_heads, GROUP)
    d = tl.arange(0, BLOCK)
    place = tl.load(loc + token) * kv_place
    if group < q_groups + kv_groups:
        at = cos_sin + tl.load(pos + token) * cos_row
        cos = tl.load(at + d, mask=d < HALF, other=0.0)[None, :]
        sin = tl.load(at + HALF + d, mask=d < HALF, other=0.0)[None, :]
        if group < q_groups:
            h = group * GROUP + tl.arange(0, GROUP)
            mask = (h < heads)[:, None] & (d < HALF)[None, :]
            where = q + token * q_token + h[:, None] * q_head + d[None, :]
            first, second = _norm_rope(where, q_weight, d, mask, cos, sin, eps, HALF, NORM)
            tl.store(where, first, mask=mask)
            tl.store(where + HALF, second, mask=mask)
        else:
            h = (group - q_groups) * GROUP + tl.arange(0, GROUP)
            mask = (h < kv_heads)[:, None] & (d < HALF)[None, :]
            where = k + token * k_token + h[:, None] * k_head + d[None, :]
            first, second = _norm_rope(where, k_weight, d, mask, cos, sin, eps, HALF, NORM)
            tl.store(where, first, mask=mask)
            tl.store(where + HALF, second, mask=mask)
            to = kv + place + h[:, None] * kv_head + d[None, :]
            tl.store(to, first, mask=mask)
            tl.store(to + HALF, second, mask=mask)
    else:
        h = (group - q_groups - kv_groups) * GROUP + tl.arange(0, GROUP)
        mask = (h < kv_heads)[:, None] & (d < HALF)[None, :]
        where = v + token * v_token + h[:, None] * v_head + d[None, :]
        to = kv + kv_values + place + h[:, None] * kv_head + d[None, :]
        tl.store(to, tl.load(where, mask=mask), mask=mask)
        tl.store(to + HALF, tl.load(where + HALF, mask=mask), mask=mask)


@triton.jit
def _norm_rope(where, weight, d, mask, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """The halves of the heads at ``where``, normed and turned. In float32, rounded once, when they are stored."""
    first = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(where + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        first = first * scale * tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        second = second * scale * tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize_on_alignment=["loc"])
def store_kv(
    k, v, kv, loc, k_token, k_head, v_token, v_head, kv_values, kv_place, kv_head, size,
    HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each (token, K or V, block of its ``size`` = kv_heads * HEAD elements)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    h, d = i // HEAD, i % HEAD
    to = kv + tl.load(loc + token) * kv_place + h * kv_head + d
    mask = i < size
    if tl.program_id(1) == 0:
        tl.store(to, tl.load(k + token * k_token + h * k_head + d, mask=mask), mask=mask)
    else:
        tl.store(to + kv_values, tl.load(v + token * v_token + h * v_head + d, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def decode_rows(
    n, order, kv_len, next_token, page_table, slot, kv, pos, loc, tokens,
    rows, padding, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each ``BLOCK`` of ``rows``. ``padding``: the slot of the padding row; ``columns``: of the page table."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < rows
    live = i < tl.load(n)
    s = tl.load(order + i, mask=inside & live, other=0)
    s = tl.where(live, s, padding)
    p = tl.load(kv_len + s, mask=inside & live, other=0)
    page = tl.load(page_table + s * columns + p // page_size, mask=inside, other=0).to(tl.int64)
    tl.store(slot + i, s, mask=inside)
    tl.store(pos + i, p, mask=inside)
    tl.store(kv + i, p + 1, mask=inside)
    tl.store(tokens + i, tl.load(next_token + s, mask=inside & live, other=0), mask=inside)
    tl.store(loc + i, page * page_size + p % page_size, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def experts_gate_up(
    x, weight, out, pairs, expert_of, padded, num_pairs, top_k,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``silu(x @ gate.T) * (x @ up.T)`` of pairs (token, expert), one program for each (block of pairs of one expert, block of
    columns). ``pairs`` [blocks * ROWS]: pair numbers by expert, ``num_pairs`` or more where a block is not full;
    ``expert_of`` [blocks]; ``padded`` [1]: how many of ``pairs`` are used. x [tokens, hidden], weight [experts, 2 * width,
    hidden], out [num_pairs, width]."""
    column_blocks = tl.cdiv(WIDTH, COLUMNS)
    block = tl.program_id(0) // column_blocks
    if block * ROWS < tl.load(padded):
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
        live = pair < num_pairs
        column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        rows = x + (tl.where(live, pair, 0) // top_k).to(tl.int64)[:, None] * HIDDEN + k[None, :]
        first = weight + tl.load(expert_of + block).to(tl.int64) * (2 * WIDTH * HIDDEN)
        gates = first + column[None, :] * HIDDEN + k[:, None]
        ups = gates + WIDTH * HIDDEN
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, HIDDEN, DEPTH):
            inside = k < HIDDEN - start
            mask = inside[:, None] & (column < WIDTH)[None, :]
            a = tl.load(rows + start, mask=live[:, None] & inside[None, :], other=0.0)
            gate = tl.dot(a, tl.load(gates + start, mask=mask, other=0.0), gate)
            up = tl.dot(a, tl.load(ups + start, mask=mask, other=0.0), up)
        value = gate * tl.sigmoid(gate) * up
        to = out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(to, value, mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def experts_down(
    x, weight, scale, out, pairs, expert_of, padded, num_pairs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``scale * (x @ down.T)`` of pairs, as ``experts_gate_up``. x [num_pairs, width], weight [experts, hidden, width],
    scale [num_pairs], out [num_pairs, hidden]."""
    column_blocks = tl.cdiv(HIDDEN, COLUMNS)
    block = tl.program_id(0) // column_blocks
    if block * ROWS < tl.load(padded):
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
        live = pair < num_pairs
        column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        rows = x + tl.where(live, pair, 0).to(tl.int64)[:, None] * WIDTH + k[None, :]
        first = weight + tl.load(expert_of + block).to(tl.int64) * (HIDDEN * WIDTH)
        columns = first + column[None, :] * WIDTH + k[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, DEPTH):
            inside = k < WIDTH - start
            a = tl.load(rows + start, mask=live[:, None] & inside[None, :], other=0.0)
            b = tl.load(columns + start, mask=inside[:, None] & (column < HIDDEN)[None, :], other=0.0)
            total = tl.dot(a, b, total)
        total *= tl.load(scale + pair, mask=live, other=0.0)[:, None]
        to = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        tl.store(to, total, mask=live[:, None] & (column < HIDDEN)[None, :])
