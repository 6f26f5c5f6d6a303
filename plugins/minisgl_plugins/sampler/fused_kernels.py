"""Triton kernels of ``minisgl_plugins.sampler.fused``; imported only where triton is used.

The state of a slot is a row of int32: see ``FIELDS`` in ``fused.py``, whose order the constants below follow.
"""

import triton
import triton.language as tl

GREEDY = tl.constexpr(0)
INV_TEMPERATURE = tl.constexpr(1)  # of the exponent 2: log2(e) / temperature
SEED_LOW = tl.constexpr(2)
SEED_HIGH = tl.constexpr(3)
TOP_K = tl.constexpr(4)
TOP_P = tl.constexpr(5)
MIN_P_FLOOR = tl.constexpr(6)  # log2(min_p), -inf without
WIDTH = tl.constexpr(7)
LOWEST = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize_on_alignment=["slot", "out"])  # views at any address: not a kernel for each
def best_of_tiles(
    logits, state, slot, out, threshold, scores, tokens,
    row_stride, columns, vocab, tiles,
    QUARTER: tl.constexpr, THRESHOLD: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One program for each (row, tile of the vocabulary): its best score and that token, in [rows, tiles]. A tile is
    four times ``QUARTER`` tokens. With ``THRESHOLD`` only tokens whose ordered logit is at least the row's ``threshold`` count."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = state + tl.load(slot + row) * WIDTH
    greedy = tl.load(at + GREEDY)
    inv_temperature = tl.load(at + INV_TEMPERATURE).to(tl.float32, bitcast=True)
    low = tl.load(at + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(at + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    count = tl.load(out + row).to(tl.int32)
    floor = LOWEST
    if THRESHOLD:
        floor = tl.load(threshold + row)
    lane = tl.arange(0, QUARTER)
    # four random words for each of a quarter's lanes: word w of lane i belongs to token (4 * tile + w) * QUARTER + i
    counter = tile * QUARTER + lane
    zero = tl.zeros((QUARTER,), tl.int32)
    r0, r1, r2, r3 = tl.philox((high << 32) | low, counter, zero + count, zero, zero, 7)
    start = logits + row * row_stride
    token = 4 * tile * QUARTER + lane
    best, where = _best(start, token, columns, vocab, r0, greedy, inv_temperature, floor, THRESHOLD, FAST)
    b, w = _best(start, token + QUARTER, columns, vocab, r1, greedy, inv_temperature, floor, THRESHOLD, FAST)
    where = tl.where(b > best, w, where)
    best = tl.maximum(best, b)
    b, w = _best(start, token + 2 * QUARTER, columns, vocab, r2, greedy, inv_temperature, floor, THRESHOLD, FAST)
    where = tl.where(b > best, w, where)
    best = tl.maximum(best, b)
    b, w = _best(start, token + 3 * QUARTER, columns, vocab, r3, greedy, inv_temperature, floor, THRESHOLD, FAST)
    where = tl.where(b > best, w, where)
    best = tl.maximum(best, b)
    tl.store(scores + row * tiles + tile, best)
    tl.store(tokens + row * tiles + tile, where)


@triton.jit
def _best(
    start, token, columns, vocab, bits, greedy, inv_temperature, floor, THRESHOLD: tl.constexpr, FAST: tl.constexpr
):
    """The best score of some tokens and the first token that has it. The score of a greedy row is the logit; else it is
    log2(p) + a Gumbel number: the token with the largest is a sample of p (Gumbel-max). No number scores -inf."""
    x = _logit(start, token, columns, vocab)
    score = x
    if greedy == 0:
        # 1 - 2^-E = u is uniform, and small E decide: the series keeps the digits that 1 - u would lose
        u = tl.minimum(bits.to(tl.float32) * 2.3283064e-10 + 1.1641532e-10, 0.99999994)
        series = u * (1.442695 + u * (0.7213475 + u * (0.48089835 + u * 0.36067376)))
        exponential = tl.where(u < 0.01, series, -_log2(1.0 - u, FAST))
        score = x * inv_temperature - _log2(exponential, FAST)
    if THRESHOLD:
        score = tl.where(_ordered(x) >= floor, score, float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, 2147483647), axis=0)


@triton.jit
def _logit(start, token, columns, vocab):
    """Of tokens beyond ``vocab``: -inf. The load is cut at ``columns``, a round number, so that it takes many at once."""
    x = tl.load(start + token, mask=token < columns, other=float("-inf")).to(tl.float32)
    return tl.where(token < vocab, x, float("-inf"))


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST: in one instruction, to 22 bits; what Triton makes of ``tl.log2`` takes twenty-five."""
    if FAST:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def best_of_rows(scores, tokens, picked, tiles, BLOCK: tl.constexpr):
    """One program for each row: the best of its tiles, the first of equals."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    score = tl.load(scores + row * tiles + i, mask=i < tiles, other=float("-inf"))
    token = tl.load(tokens + row * tiles + i, mask=i < tiles, other=2147483647)
    best = tl.max(score, axis=0)
    tl.store(picked + row, tl.min(tl.where(score == best, token, 2147483647), axis=0).to(tl.int64))


@triton.jit
def _ordered(x):
    """int32 that order as the floats do; -0.0 is 0.0, and what is no number is below all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, order, LOWEST)


@triton.jit
def _float(order):
    """The float that ``_ordered`` makes ``order`` of."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["slot"])  # views at any address: not a kernel for each
def thresholds(
    logits, state, slot, few, threshold, row_stride,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One program for each row: the least ordered logit that min-p, top-k and top-p keep, in this order. ``SHIFT``: low bits of
    ordered logits that say nothing, since the logits have fewer than float32 has. ``few``: room for FEW logits of each row."""
    row = tl.program_id(0).to(tl.int64)
    at = state + tl.load(slot + row) * WIDTH
    top_k = tl.load(at + TOP_K)
    top_p = tl.load(at + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(at + MIN_P_FLOOR).to(tl.float32, bitcast=True)
    keep = tl.full((), LOWEST, tl.int32)
    if (top_k > 0) | (top_p < 1.0) | (min_p > float("-inf")):
        scale = tl.load(at + INV_TEMPERATURE).to(tl.float32, bitcast=True)
        start = logits + row * row_stride
        keep = _threshold(start, few + row * FEW, scale, top_k, top_p, min_p, COLUMNS, VOCAB, SHIFT, BLOCK, FEW)
    tl.store(threshold + row, keep)


@triton.jit
def _threshold(
    start, few, scale, top_k, top_p, min_p,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Searches halve a range of keys until one is left, so that ties are all kept or all dropped, and nothing is sorted. A key is
    an ordered logit without its ``SHIFT`` low bits. The best of each of ``BLOCK`` lanes tell which logits can matter; if they
    are few, the searches look at those alone."""
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOWEST, tl.int32)
    for first in range(0, VOCAB, BLOCK):
        x = _logit(start, first + lane, COLUMNS, VOCAB)
        top = tl.maximum(top, _ordered(x))
    best = tl.max(top, axis=0)
    peak = _float(best)
    best = best >> SHIFT
    keep = tl.full((), LOWEST >> SHIFT, tl.int32)
    if min_p > float("-inf"):
        floor = _ordered(peak + min_p / scale)
        floor = tl.where(floor < 0, floor, floor + ((1 << SHIFT) - 1)) >> SHIFT  # the least key that is not below it
        keep = tl.minimum(floor, best)
    if (top_k > 0) | (top_p < 1.0):
        limit = tl.full((), 0.0, tl.float32)
        lanes = top >> SHIFT
        if top_k > 0:  # k lanes have a logit from here on, so the k-th largest is not below
            low = _search_count(lanes, keep, best, top_k)
        else:
            limit = top_p * _mass(start, keep, peak, scale, COLUMNS, VOCAB, SHIFT, BLOCK)
            low = _search_mass(lanes, tl.exp2((_float(top) - peak) * scale), keep, best, limit)
        n = _collect(start, low, few, COLUMNS, VOCAB, SHIFT, BLOCK, FEW)
        if n <= FEW:
            tl.debug_barrier()  # other threads have stored what this one loads
            i = tl.arange(0, FEW)
            x = tl.load(few + i, mask=i < n, other=float("-inf"))
            keys = tl.where(i < n, _ordered(x) >> SHIFT, LOWEST >> SHIFT)
            keep = low
            if top_k > 0:
                keep = _search_count(keys, low, best, top_k)
            if top_p < 1.0:
                weights = tl.where(i < n, tl.exp2((x - peak) * scale), 0.0)
                if top_k > 0:
                    limit = top_p * tl.sum(tl.where(keys >= keep, weights, 0.0), axis=0)
                keep = _search_mass(keys, weights, keep, best, limit)
        else:
            keep = _search_all(start, low, best, peak, scale, top_k, top_p, limit, COLUMNS, VOCAB, SHIFT, BLOCK)
    return keep << SHIFT


@triton.jit
def _search_count(keys, low, best, enough):
    """The largest key of [low, best] that at least ``enough`` of ``keys`` reach; low if none."""
    high = best.to(tl.int64) + 1
    low = low.to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= enough
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low.to(tl.int32)


@triton.jit
def _search_mass(keys, weights, low, best, enough):
    """The largest key of [low, best] such that the weights of those that reach it sum up to ``enough``; low if none."""
    high = best.to(tl.int64) + 1
    low = low.to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), axis=0) >= enough
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low.to(tl.int32)


@triton.jit
def _search_all(
    start, low, best, peak, scale, top_k, top_p, limit,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What ``_threshold`` does with few logits, with all of them: they are read again for each turn of the search."""
    keep = low
    if top_k > 0:
        at = low.to(tl.int64)
        high = best.to(tl.int64) + 1
        while high - at > 1:
            middle = (at + high) >> 1
            reached = _count(start, middle.to(tl.int32), COLUMNS, VOCAB, SHIFT, BLOCK) >= top_k
            at = tl.where(reached, middle, at)
            high = tl.where(reached, high, middle)
        keep = at.to(tl.int32)
        limit = top_p * _mass(start, keep, peak, scale, COLUMNS, VOCAB, SHIFT, BLOCK)
    if top_p < 1.0:
        at = keep.to(tl.int64)
        high = best.to(tl.int64) + 1
        while high - at > 1:
            middle = (at + high) >> 1
            reached = _mass(start, middle.to(tl.int32), peak, scale, COLUMNS, VOCAB, SHIFT, BLOCK) >= limit
            at = tl.where(reached, middle, at)
            high = tl.where(reached, high, middle)
        keep = at.to(tl.int32)
    return keep


@triton.jit
def _collect(
    start, floor, few, COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """Stores the logits with a key of at least ``floor`` in ``few``, in the order of the vocabulary, as far as they fit.
    Returns: how many there are."""
    lane = tl.arange(0, BLOCK)
    n = tl.full((), 0, tl.int32)
    for first in range(0, VOCAB, BLOCK):
        x = _logit(start, first + lane, COLUMNS, VOCAB)
        hit = (((_ordered(x) >> SHIFT) >= floor) & (first + lane < VOCAB)).to(tl.int32)
        hits = tl.sum(hit, axis=0)
        if (hits > 0) & (n + hits <= FEW):
            to = n + tl.cumsum(hit, axis=0) - 1
            tl.store(few + to, x, mask=hit > 0)
        n += hits
    return n


@triton.jit
def _count(start, floor, COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a key of at least ``floor``."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, VOCAB, BLOCK):
        x = _logit(start, first + lane, COLUMNS, VOCAB)
        total += (((_ordered(x) >> SHIFT) >= floor) & (first + lane < VOCAB)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _mass(
    start, floor, peak, scale, COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of the weights of tokens with a key of at least ``floor``, that of the likeliest being 1."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        x = _logit(start, first + lane, COLUMNS, VOCAB)
        total += tl.where((_ordered(x) >> SHIFT) >= floor, tl.exp2((x - peak) * scale), 0.0)
    return tl.sum(total, axis=0)
