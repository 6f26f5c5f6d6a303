"""Ops plugins for GPUs where there is none: the reasons they give, what ``auto`` makes of them, and kernels in Triton's
interpreter where triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from minisgl.api import ConfigError
from minisgl.api.device import OpsContext
from minisgl.config.schema import Settings
from minisgl.nn.choose import pick_ops, pick_sampler
from minisgl.plugin.registry import Registry
from minisgl.runtime.graph import decode_rows
from minisgl_plugins.ops import triton
from minisgl_plugins.ops.flashinfer import FlashInferOps, rope, silu_mul
from minisgl_plugins.ops.sgl import SglOps
from minisgl_plugins.ops.torch import TorchOps
from minisgl_plugins.ops.triton import TritonOps
from minisgl_plugins.ops.triton_moe import Order, Tiles, most_padded, products, tiles_for

INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
kernels = pytest.mark.skipif(
    not INTERPRETED, reason="needs triton, and no CUDA device: its interpreter runs the kernels; tests/gpu has the rest"
)
CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
PLUGINS = {"flashinfer": FlashInferOps, "sgl": SglOps, "triton": TritonOps}


@pytest.mark.parametrize("name", PLUGINS)
def test_on_a_cpu_the_device_is_the_reason(name):
    assert "device is 'cpu'" in PLUGINS[name].supports(CPU, BF16)
    with pytest.raises(ConfigError, match=rf"ops '{name}' cannot be used.*device is 'cpu'.*ops=auto"):
        pick_ops(Settings.model_validate({"kinds": {"ops": {"use": [name]}}}), Registry.scan(), CPU, BF16)


@pytest.mark.parametrize(
    ("name", "command"), [("flashinfer", "'minisgl[cuda]'"), ("sgl", "'minisgl[cuda]'"), ("triton", "triton")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, command, monkeypatch):
    monkeypatch.setattr("minisgl_plugins.ops.needs.find_spec", lambda name: None)
    assert f"pip install {command}" in PLUGINS[name].supports(CUDA, BF16)


@pytest.mark.parametrize("name", PLUGINS)
def test_dtypes_that_a_plugin_has_kernels_for(name, monkeypatch):
    monkeypatch.setattr("minisgl_plugins.ops.needs.find_spec", lambda name: "there")
    assert PLUGINS[name].supports(CUDA, BF16) is None
    assert PLUGINS[name].supports(CUDA, torch.float16) is None
    reason = PLUGINS[name].supports(CUDA, torch.float32)
    assert reason is None if name == "triton" else "float32" in reason


def test_auto_takes_all_that_work_in_core_order_and_torch_last(monkeypatch):
    registry, config = Registry.scan(), Settings()
    assert pick_ops(config, registry, CPU, torch.float32) == ["torch"]
    assert pick_sampler(config, registry, CPU) == "torch"
    have = {"triton", "flashinfer"}
    for module in ("ops.needs", "sampler.fused"):
        monkeypatch.setattr(f"minisgl_plugins.{module}.find_spec", lambda name: name if name in have else None)
    assert pick_ops(config, registry, CUDA, BF16) == ["triton", "flashinfer", "torch"]
    assert pick_ops(config, registry, CUDA, torch.float32) == ["triton", "torch"]
    assert pick_sampler(config, registry, CUDA) == "fused"
    have.clear()
    assert pick_ops(config, registry, CUDA, BF16) == ["torch"]
    assert pick_sampler(config, registry, CUDA) == "torch"


def test_asking_whether_they_fit_imports_no_kernel_library():
    code = (
        "import sys, torch\n"
        "from minisgl_plugins.ops import flashinfer, sgl, triton\n"
        "from minisgl_plugins.sampler import fused\n"
        "for c in (flashinfer.FlashInferOps, sgl.SglOps, triton.TritonOps):\n"
        "    c.supports(torch.device('cuda'), torch.bfloat16)\n"
        "fused.FusedSampler.supports(torch.device('cuda'))\n"
        "print(sorted({'triton', 'flashinfer', 'sgl_kernel'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"


def test_shapes_that_flashinfer_has_no_kernel_for_go_through_torch():
    """Neither of these calls needs the package."""
    reference = TorchOps(OpsContext(TorchOps.Settings(), CPU, torch.float32)).table()
    x = torch.randn(3, 2 * 12)
    assert torch.allclose(silu_mul(x), reference["silu_mul"](x), atol=1e-6)
    q, k, pos, cos_sin = torch.randn(4, 3, 80), torch.randn(4, 1, 80), torch.arange(4), torch.randn(9, 80)
    for got, want in zip(rope(q, k, pos, cos_sin), reference["rope"](q, k, pos, cos_sin)):
        assert torch.allclose(got, want, atol=1e-5)


@kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (5, 5, 20), (9, 3, 8)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_qk_norm_rope_store_is_norm_rope_and_store(heads, kv_heads, head_dim, with_norm):
    reference = TorchOps(OpsContext(TorchOps.Settings(), CPU, torch.float32)).table()
    n, page_size, pages = 5, 4, 6
    qkv = torch.randn(n, heads + 2 * kv_heads, head_dim)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    weights = (torch.randn(head_dim), torch.randn(head_dim)) if with_norm else (None, None)
    pos, loc, cos_sin = torch.tensor([3, 0, 7, 7, 1]), torch.tensor([1, 9, 18, 23, 0]), torch.randn(8, head_dim)
    pair = [reference["rms_norm"](x, w, 1e-6) if with_norm else x.clone() for x, w in zip((q, k), weights)]
    want_q, want_k = reference["rope"](*pair, pos, cos_sin)
    pool, want = (torch.full((2, pages, page_size, kv_heads, head_dim), 7.0) for _ in range(2))
    reference["store_kv"](want_k, v, want, loc)
    out = triton.qk_norm_rope_store(q, k, v, *weights, 1e-6, pos, cos_sin, pool, loc)
    assert torch.allclose(out, want_q, atol=1e-5)
    assert torch.allclose(k, want_k, atol=1e-5)  # backends of prefill may read it rather than the pool
    assert torch.allclose(pool, want, atol=1e-5)


@kernels
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (3, 20), (9, 128)])
def test_store_kv(kv_heads, head_dim):
    reference = TorchOps(OpsContext(TorchOps.Settings(), CPU, torch.float32)).table()
    k, v = torch.split(torch.randn(3, 2 * kv_heads, head_dim), kv_heads, 1)
    pool, want = (torch.zeros(2, 5, 4, kv_heads, head_dim) for _ in range(2))
    loc = torch.tensor([19, 0, 7])
    triton.store_kv(k, v, pool, loc)
    reference["store_kv"](k, v, want, loc)
    assert torch.equal(pool, want)


@kernels
@pytest.mark.parametrize("live", [0, 3, 5])
def test_decode_rows(live):
    """K2: rows after the live ones are padding."""
    n = torch.tensor([live])
    order, kv_len = torch.tensor([4, 1, 5, 0, 2, 3]), torch.tensor([3, 9, 2, 8, 11, 0, 0])
    next_token, table = torch.arange(7) * 10, torch.arange(35, dtype=torch.int32).view(7, 5)
    got, want = ([torch.full((5,), -1) for _ in range(5)] for _ in range(2))
    triton.decode_rows(n, order, kv_len, next_token, table, 4, *got)
    decode_rows(n, order, kv_len, next_token, table, 4, *want)
    for name, a, b in zip(("slot", "kv", "pos", "loc", "tokens"), got, want):
        assert torch.equal(a, b), name


def ordered(ids, experts, rows):
    """``Order`` as sgl_kernel makes it: pairs by expert, each expert's filled up to whole blocks, the rest garbage."""
    size = most_padded(ids.numel(), experts, rows)
    pairs, of_block = [], []
    for expert in range(experts):
        mine = (ids.view(-1) == expert).nonzero()[:, 0].tolist()
        blocks = -(-len(mine) // rows)
        pairs += mine + [ids.numel()] * (blocks * rows - len(mine))
        of_block += [expert] * blocks
    assert len(pairs) <= size
    used, blocks = len(pairs), size // rows
    pairs, of_block = pairs + [ids.numel()] * (size - used), of_block + [10**6] * (blocks - len(of_block))
    return Order(*(torch.tensor(x, dtype=torch.int32) for x in (pairs, of_block, [used])))


@kernels
@pytest.mark.parametrize(
    ("n", "experts", "top_k", "hidden", "width"), [(1, 4, 2, 24, 20), (7, 8, 3, 40, 36), (20, 2, 2, 16, 16)]
)
def test_products_of_experts(n, experts, top_k, hidden, width):
    """Against one expert after the other in float64, with sizes that fill no tile."""
    x, logits = torch.randn(n, hidden), torch.randn(n, experts)
    gate_up, down = torch.randn(experts, 2 * width, hidden) / 5, torch.randn(experts, hidden, width) / 5
    weights, ids = torch.softmax(logits, -1).topk(top_k, -1)
    tiles = Tiles(16, 16, 16, 4, 2)
    out = products(x, weights.contiguous(), gate_up, down, ordered(ids, experts, tiles.rows), tiles)
    for token in range(n):
        for choice, expert in enumerate(ids[token].tolist()):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            want = weights[token, choice] * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
            assert torch.allclose(out[token, choice].double(), want, atol=1e-4)


@pytest.mark.parametrize("experts", [8, 128])
@pytest.mark.parametrize("num_pairs", [8, 56, 2048, 65536])
def test_room_for_padded_pairs_is_enough_for_any_choice(experts, num_pairs):
    """K1: it depends on the number of pairs alone, so that a graph serves every choice of the router."""
    rows = tiles_for(num_pairs, experts).rows
    size = most_padded(num_pairs, experts, rows)
    assert size % rows == 0
    one_each = [num_pairs - experts + 1] + [1] * (experts - 1) if num_pairs >= experts else [1] * num_pairs
    remainders = [num_pairs // experts // rows * rows + 1] * (experts - 1)
    for counts in (one_each, [num_pairs], [*remainders, max(num_pairs - sum(remainders), 0)]):
        if sum(counts) == num_pairs:
            assert sum(-(-c // rows) * rows for c in counts) <= size
