"""The ops plugins on a CUDA device against float64 arithmetic: values, views with gaps, many sizes, CUDA graphs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from minisgl.api.device import OpsContext
from minisgl.runtime.graph import decode_rows
from minisgl_plugins.ops.flashinfer import FlashInferOps
from minisgl_plugins.ops.sgl import SglOps
from minisgl_plugins.ops.torch import TorchOps
from minisgl_plugins.ops.triton import TritonOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda", 0)
EPS = 1e-6
ROWS = [1, 7, 256, 4096]
# Of the largest value of a row: what one rounding to the dtype, and a few in what leads to it, may amount to.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PLUGINS = {"flashinfer": FlashInferOps, "sgl": SglOps, "torch": TorchOps, "triton": TritonOps}
MODULES = {"flashinfer": "flashinfer", "sgl": "sgl_kernel", "torch": "torch", "triton": "triton"}


def ops(name, dtype):
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"{MODULES[name]} is not installed")
    assert PLUGINS[name].supports(DEVICE, dtype) is None
    return PLUGINS[name](OpsContext(PLUGINS[name].Settings(), DEVICE, dtype)).table()


def random(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    g = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=g, device=DEVICE) * scale).to(dtype)


def close(got, expected, dtype):
    """Within ``TOLERANCE`` of the largest value of each row."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    error = (got.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-3)
    assert error.max() < TOLERANCE[dtype], error.max()


def normed(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def turned(x, pos, cos_sin):
    cos, sin = cos_sin[pos].double().unsqueeze(1).chunk(2, -1)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def cos_sin_table(head_dim, length=5000):
    freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.arange(length)[:, None] * freq
    return torch.cat((angle.cos(), angle.sin()), 1).to(DEVICE)


def merged(n, heads, kv_heads, head_dim, dtype, seed=0):
    """q, k and v as views of one tensor, as a merged projection gives them."""
    qkv = random(n, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=seed)
    return torch.split(qkv, [heads, kv_heads, kv_heads], 1)


def replayed(call):
    """Records ``call`` after one call that compiles. Returns: a graph and what the recorded call returned."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


LIBRARIES = [(n, d) for n in ("flashinfer", "sgl") for d in (torch.bfloat16, torch.float16)]
WITH_TORCH = [*LIBRARIES, ("torch", torch.float32), ("torch", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), WITH_TORCH)
@pytest.mark.parametrize("n", ROWS)
def test_rms_norm(name, dtype, n):
    rms_norm = ops(name, dtype)["rms_norm"]
    for size in (64, 576, 1024, 5120):
        x, weight = random(n, size, dtype=dtype, scale=3), random(size, dtype=dtype, seed=1)
        before = x.clone()
        close(rms_norm(x, weight, EPS), normed(x, weight), dtype)
        assert torch.equal(x, before)  # it is the residual of the first layer


@pytest.mark.parametrize(("name", "dtype"), WITH_TORCH)
@pytest.mark.parametrize("n", ROWS)
def test_rms_norm_of_heads_in_a_view_of_the_merged_projection(name, dtype, n):
    rms_norm = ops(name, dtype)["rms_norm"]
    for head_dim in (64, 128):
        q, k, v = merged(n, 16, 8, head_dim, dtype)
        weight, before = random(head_dim, dtype=dtype), (q.clone(), k.clone(), v.clone())
        close(rms_norm(q, weight, EPS), normed(q, weight), dtype)
        close(rms_norm(k, weight, EPS), normed(k, weight), dtype)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), before))


@pytest.mark.parametrize(("name", "dtype"), WITH_TORCH)
@pytest.mark.parametrize("n", ROWS)
def test_add_rms_norm(name, dtype, n):
    add_rms_norm = ops(name, dtype)["add_rms_norm"]
    for size in (576, 1024, 5120):
        x, residual = (random(n, size, dtype=dtype, seed=s) for s in range(2))
        weight = random(size, dtype=dtype, seed=3)
        total = x.double() + residual.double()
        out, kept = add_rms_norm(x.clone(), residual.clone(), weight, EPS)
        close(out, normed(total, weight), dtype)
        close(kept, total, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [("flashinfer", torch.bfloat16), ("flashinfer", torch.float16), *WITH_TORCH[-2:]]
)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_rope_turns_halves_at_their_positions(name, dtype, n, head_dim):
    rope, cos_sin = ops(name, dtype)["rope"], cos_sin_table(head_dim)
    q, k, v = merged(n, 10, 2, head_dim, dtype)
    pos = torch.randint(0, 5000, (n,), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    expected, kept = (turned(q, pos, cos_sin), turned(k, pos, cos_sin)), v.clone()
    for got, want in zip(rope(q, k, pos, cos_sin), expected):
        close(got, want, dtype)
    assert torch.equal(v, kept)


@pytest.mark.parametrize(("name", "dtype"), WITH_TORCH)
@pytest.mark.parametrize("n", ROWS)
def test_silu_mul(name, dtype, n):
    silu_mul = ops(name, dtype)["silu_mul"]
    for size in (8, 100, 1536, 3072, 17408):
        x = random(n, 2 * size, dtype=dtype, scale=2)
        gate, up = x.double().chunk(2, -1)
        close(silu_mul(x.clone()), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 8, 128), (40, 8, 128), (9, 3, 64), (4, 1, 80), (32, 4, 256)]
)
@pytest.mark.parametrize("with_norm", [True, False])
def test_qk_norm_rope_store(dtype, n, heads, kv_heads, head_dim, with_norm):
    """The heads of q and k normed and turned in place, k and v in the pool, nothing else in the pool touched."""
    fused, cos_sin = ops("triton", dtype)["qk_norm_rope_store"], cos_sin_table(head_dim)
    q, k, v = merged(n, heads, kv_heads, head_dim, dtype)
    weights = (
        (random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2)) if with_norm else (None, None)
    )
    g = torch.Generator().manual_seed(n)
    pos = torch.randint(0, 5000, (n,), generator=g).to(DEVICE)
    page_size, pages = 16, n // 16 + 3
    loc = torch.randperm(page_size * pages, generator=g)[:n].to(DEVICE)
    pool = torch.full((2, pages, page_size, kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    want_q, want_k = (turned(normed(x, w) if with_norm else x, pos, cos_sin) for x, w in zip((q, k), weights))
    values = v.clone()
    out = fused(q, k, v, *weights, EPS, pos, cos_sin, pool, loc)
    close(out, want_q, dtype)
    close(k, want_k, dtype)
    flat = pool.view(2, -1, kv_heads, head_dim)
    assert torch.equal(flat[0, loc], k)
    assert torch.equal(flat[1, loc], values)
    assert torch.equal(v, values)
    rest = torch.ones(page_size * pages, dtype=torch.bool, device=DEVICE)
    rest[loc] = False
    assert (flat[:, rest] == 7.0).all()


@pytest.mark.parametrize("with_norm", [True, False])
def test_qk_norm_rope_store_in_bfloat16_is_as_exact_as_the_torch_ops(with_norm):
    """Its mean error against float64 is not above theirs, which round after every step."""
    n, heads, kv_heads, head_dim = 512, 16, 8, 128
    mine, theirs = ops("triton", torch.bfloat16), ops("torch", torch.bfloat16)
    cos_sin, loc = cos_sin_table(head_dim), torch.arange(n, device=DEVICE)
    pos = torch.arange(n, device=DEVICE) * 9
    q, k, v = merged(n, heads, kv_heads, head_dim, torch.bfloat16)
    weights = [random(head_dim, seed=s) if with_norm else None for s in (1, 2)]
    want = turned(normed(q, weights[0]) if with_norm else q, pos, cos_sin)
    pair = [theirs["rms_norm"](x, w, EPS) if with_norm else x.clone() for x, w in zip((q, k), weights)]
    reference, _ = theirs["rope"](*pair, pos, cos_sin)
    pool = torch.zeros(2, n, 1, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    got = mine["qk_norm_rope_store"](q, k, v, *weights, EPS, pos, cos_sin, pool, loc)
    assert (got.double() - want).abs().mean() <= (reference.double() - want).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (3, 64), (1, 80), (4, 256)])
def test_store_kv(dtype, n, kv_heads, head_dim):
    mine, reference = ops("triton", dtype)["store_kv"], ops("torch", dtype)["store_kv"]
    _, k, v = merged(n, 2, kv_heads, head_dim, dtype)
    pages = n // 16 + 3
    loc = torch.randperm(16 * pages, generator=torch.Generator().manual_seed(n))[:n].to(DEVICE)
    a, b = (torch.zeros(2, pages, 16, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
    mine(k, v, a, loc)
    reference(k, v, b, loc)
    assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 7, 128, 200, 256])
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_rows(rows, page_size):
    """Against the reference, for every number of live rows, with padding after them."""
    mine = ops("triton", torch.bfloat16)["decode_rows"]
    slots, columns = 256, 40
    g = torch.Generator().manual_seed(rows)
    order = torch.randperm(slots, generator=g).to(DEVICE)
    kv_len = torch.randint(0, columns * page_size, (slots + 1,), generator=g).to(DEVICE)
    kv_len[slots] = 0
    next_token = torch.randint(0, 1000, (slots + 1,), generator=g).to(DEVICE)
    table = torch.randint(0, 9000, (slots + 1, columns), generator=g, dtype=torch.int32).to(DEVICE)
    for live in sorted({0, 1, rows // 2, rows}):
        n = torch.tensor([live], device=DEVICE)
        a, b = ([torch.full((rows,), -5, device=DEVICE) for _ in range(5)] for _ in range(2))
        mine(n, order, kv_len, next_token, table, page_size, *a)
        decode_rows(n, order, kv_len, next_token, table, page_size, *b)
        for name, x, y in zip(("slot", "kv", "pos", "loc", "tokens"), a, b):
            assert torch.equal(x, y), name


@pytest.mark.parametrize("name", ["flashinfer", "sgl"])
def test_library_ops_in_a_graph_follow_their_inputs(name):
    table, n, size = ops(name, torch.bfloat16), 24, 1024
    x, residual, weight = random(n, size), random(n, size, seed=1), random(size, seed=2)
    wide = random(n, 2 * size, seed=3)

    def call():
        return (
            table["rms_norm"](x, weight, EPS),
            *table["add_rms_norm"](x.clone(), residual.clone(), weight, EPS),
            table["silu_mul"](wide),
        )

    graph, out = replayed(call)
    for turn in range(2):
        x.copy_(random(n, size, seed=10 + turn))
        residual.copy_(random(n, size, seed=20 + turn))
        wide.copy_(random(n, 2 * size, seed=30 + turn))
        graph.replay()
        got = [t.clone() for t in out]
        assert all(torch.equal(a, b) for a, b in zip(got, call()))


def test_triton_ops_in_a_graph_follow_their_inputs():
    table, n, slots = ops("triton", torch.bfloat16), 8, 32
    cos_sin = cos_sin_table(128)
    qkv = random(n, 32, 128)
    source = qkv.clone()
    q_weight, k_weight = random(128, seed=1), random(128, seed=2)
    pool = torch.zeros(2, 64, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    live = torch.tensor([0], device=DEVICE)
    order, kv_len = torch.arange(slots, device=DEVICE), torch.zeros(slots + 1, dtype=torch.int64, device=DEVICE)
    page_table = torch.full((slots + 1, 4), 63, dtype=torch.int32, device=DEVICE)
    slot, kv, pos, loc, tokens = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for _ in range(5))

    def call():
        table["decode_rows"](live, order, kv_len, kv_len, page_table, 16, slot, kv, pos, loc, tokens)
        qkv.copy_(source)
        q, k, v = torch.split(qkv, [16, 8, 8], 1)
        return table["qk_norm_rope_store"](q, k, v, q_weight, k_weight, EPS, pos, cos_sin, pool, loc)

    graph, out = replayed(call)
    for turn in range(3):
        live.fill_(3 + turn)
        order.copy_(torch.randperm(slots, generator=torch.Generator().manual_seed(turn)))
        kv_len[:slots] = torch.arange(slots, device=DEVICE) + turn
        page_table[:slots] = torch.arange(slots * 4, device=DEVICE, dtype=torch.int32).view(slots, 4) % 62
        source.copy_(random(n, 32, 128, seed=turn))
        pool.zero_()
        graph.replay()
        got, got_pool = out.clone(), pool.clone()
        pool.zero_()
        assert torch.equal(got, call())
        assert torch.equal(got_pool[:, :63], pool[:, :63])  # the dummy page is written by several rows
        assert got_pool[:, :63].any()


@pytest.mark.parametrize("name", ["flashinfer", "torch"])
def test_rope_in_a_graph_follows_the_positions(name):
    """The same tensor of positions, filled anew before each replay."""
    rope, cos_sin = ops(name, torch.bfloat16)["rope"], cos_sin_table(128)
    q, k, _ = merged(4, 4, 2, 128, torch.bfloat16)
    pos = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    graph, (out, _) = replayed(lambda: rope(q.clone(), k.clone(), pos, cos_sin))
    for turn in range(2):
        pos.copy_(torch.arange(4) * 100 + turn)
        graph.replay()
        close(out, turned(q, pos, cos_sin), torch.bfloat16)


MIXTURES = [("sgl", 8, 2), ("sgl", 128, 8), ("torch", 8, 2), ("torch", 128, 8)]


def mixture_by_hand(x, logits, gate_up, down, top_k, renormalize):
    """One expert after the other, in float64."""
    weights, ids = torch.softmax(logits.double(), -1).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for expert in range(len(gate_up)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        out.index_add_(0, token, weights[token, choice, None] * (F.silu(gate) * up @ down[expert].double().T))
    return out


def mixture_inputs(n, experts, hidden, width, seed=0):
    """Logits of rising values, so that bfloat16 leaves no ties between experts."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    rank = torch.rand(n, experts, generator=g, device=DEVICE).argsort(-1)
    logits = (rank.float() / 16).bfloat16()
    gate_up = random(experts, 2 * width, hidden, scale=hidden**-0.5)
    return random(n, hidden, seed=seed), logits, gate_up, random(experts, hidden, width, scale=width**-0.5)


@pytest.mark.parametrize(("name", "experts", "top_k"), MIXTURES)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("renormalize", [True, False])
def test_moe(name, experts, top_k, n, renormalize):
    moe = ops(name, torch.bfloat16)["moe"]
    for hidden, width in ((2048, 768), (1032, 200)):
        inputs = mixture_inputs(n, experts, hidden, width)
        close(moe(*inputs, top_k, renormalize), mixture_by_hand(*inputs, top_k, renormalize), torch.bfloat16)


@pytest.mark.parametrize(("name", "experts", "top_k"), [m for m in MIXTURES if m[0] == "sgl"])
@pytest.mark.parametrize("n", [1, 64])
def test_moe_in_a_graph_follows_the_router(name, experts, top_k, n):
    """K1: captured where tokens choose one expert, replayed where they choose others."""
    moe = ops(name, torch.bfloat16)["moe"]
    x, logits, gate_up, down = mixture_inputs(n, experts, 512, 256)
    logits[:, :top_k] += 32
    graph, out = replayed(lambda: moe(x, logits, gate_up, down, top_k, True))
    for turn in range(3):
        new_x, new_logits, *_ = mixture_inputs(n, experts, 512, 256, seed=5 + turn)
        x.copy_(new_x)
        logits.copy_(new_logits)
        graph.replay()
        close(out, mixture_by_hand(x, logits, gate_up, down, top_k, True), torch.bfloat16)
