"""The backends of FlashInfer and FlashAttention over stand-ins for their libraries: what is planned, gathered, cut and passed.
The stand-ins take the arguments that the libraries take, compute in float64, and read only what the libraries read."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.api import PluginError
from minisgl.api.device import AttnFacts
from minisgl.runtime.phase import PhaseSplit
from minisgl.testing.attention import AttentionBench, GraphBench, attend, build
from minisgl_plugins.attention.fa import FlashAttention
from minisgl_plugins.attention.flashinfer import FlashInferAttention, workspace_bytes
from minisgl_plugins.attention.pages import fill_pages

HOPPER = AttnFacts(16, 8, 128, "bfloat16", 16, "cuda", 90)


# -------------------------------------------------------------------------------------------------------- stand-ins
class Wrapper:
    """What both of FlashInfer's wrappers have."""

    def __init__(self, workspace: Any, layout: str, backend: str, calls: list[str]) -> None:
        assert layout == "NHD"
        self._backend, self._calls = backend, calls
        self._int_workspace_buffer = torch.empty(8, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(8, dtype=torch.uint8)

    def note(self, name: str, lengths: list[int], window_left: int) -> None:
        self._calls.append(name)
        pinned = self._pin_memory_int_workspace_buffer
        assert pinned.numel() == self._int_workspace_buffer.numel() >= 1 << 20
        self.pinned_at, self.lengths, self.left = pinned.data_ptr(), lengths, window_left

    def attend(self, q: Any, pool: Any, starts: list[int], indptr: Any, indices: Any, last: Any) -> Any:
        outs = []
        for i, kv in enumerate(self.lengths):
            pages = indices[int(indptr[i]) : int(indptr[i + 1])].long()
            page_size = pool[0].shape[1]
            assert (len(pages) - 1) * page_size + int(last[i]) == kv, "the plan and the device disagree"
            k, v = (side[pages].flatten(0, 1)[:kv] for side in pool)
            outs.append(attend(q[starts[i] : starts[i + 1]], k, v, self.left + 1 if self.left >= 0 else None))
        return torch.cat(outs).to(q.dtype)


def lengths_of(indptr: Any, last: Any, page_size: int) -> list[int]:
    return ((indptr[1:] - indptr[:-1] - 1) * page_size + last).tolist()


class Decode(Wrapper):
    def __init__(
        self, workspace: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False, use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None, paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert use_cuda_graph
        assert use_tensor_cores, "K1"
        super().__init__(workspace, kv_layout, backend, Decode.calls)
        self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    calls: list[str] = []

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: Any = None, q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert len(indices) == int(indptr[-1])
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(last_page_len) == len(self.buffers[2]), "a graph's wrapper is for one number of rows"
        assert num_qo_heads % num_kv_heads == 0
        self.note("plan", lengths_of(indptr, last_page_len, page_size), window_left)

    def run(self, q: Any, pool: Any, out: Any = None) -> Any:
        indptr, indices, last = self.buffers
        assert q.shape[0] == len(last)
        got = self.attend(q, pool, list(range(len(last) + 1)), indptr, indices, last)
        return got if out is None else out.copy_(got)


def fast_decode_plan(
    wrapper: Any, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
    page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: Any = None,
    q_data_type: Any = None, kv_data_type: Any = None, global_override_indptr_cpu: Any = None,
) -> None:  # fmt: skip
    assert len(indices) <= len(wrapper.buffers[1])
    assert last_page_len.device.type == "cpu"
    wrapper.note("fast", lengths_of(global_override_indptr_cpu, last_page_len, page_size), window_left)


class Prefill(Wrapper):
    calls: list[str] = []

    def __init__(self, workspace: Any, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        super().__init__(workspace, kv_layout, backend, Prefill.calls)

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False, window_left: int = -1,
        q_data_type: Any = "float16", kv_data_type: Any = None, max_token_per_sequence: Any = None,
    ) -> None:  # fmt: skip
        assert causal
        assert max_token_per_sequence == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        self.starts = qo_indptr.tolist()
        self.buffers = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.note("plan", lengths_of(paged_kv_indptr, paged_kv_last_page_len, page_size), window_left)

    def run(self, q: Any, pool: Any, out: Any = None) -> Any:
        assert q.shape[0] == self.starts[-1]
        got = self.attend(q, pool, self.starts, *self.buffers)
        return got if out is None else out.copy_(got)


@dataclass
class Flash:
    """``flash_attn_with_kvcache`` and what it was called with."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    schedules: int = 0

    def attend(
        self, q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any = None,
        max_seqlen_q: Any = None, causal: bool = False, window_size: Any = (-1, -1), scheduler_metadata: Any = None,
        num_splits: int = 0, pack_gqa: Any = None,
    ) -> Any:  # fmt: skip
        assert causal
        assert cache_seqlens.dtype == page_table.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        assert page_table.stride(-1) == 1
        assert num_splits > 0, "left open, the number of splits is fixed at capture for other lengths"
        self.calls.append({"splits": num_splits, "schedule": scheduler_metadata, "columns": page_table.shape[1]})
        flat = q if cu_seqlens_q is not None else q.flatten(0, 1)
        starts = list(range(len(q) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
        if cu_seqlens_q is not None:
            assert cu_seqlens_q.dtype == torch.int32
            assert max_seqlen_q == max(b - a for a, b in pairwise(starts))
        outs = []
        for i, kv in enumerate(cache_seqlens.tolist()):
            pages = page_table[i, : -(-kv // k_cache.shape[1])].long()
            k, v = (side[pages].flatten(0, 1)[:kv] for side in (k_cache, v_cache))
            outs.append(
                attend(flat[starts[i] : starts[i + 1]], k, v, window_size[0] + 1 if window_size[0] >= 0 else None)
            )
        return torch.cat(outs).to(q.dtype).view(q.shape)

    def schedule(
        self, batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
        cache_seqlens: Any, qkv_dtype: Any, page_size: int, causal: bool, window_size: Any, num_splits: int, pack_gqa: Any,
    ) -> Any:  # fmt: skip
        assert len(cache_seqlens) == batch_size
        self.schedules += 1
        return torch.tensor([self.schedules])


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    stand_in = Flash()
    module = ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache, module.get_scheduler_metadata = stand_in.attend, stand_in.schedule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    return stand_in


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    Decode.calls.clear()
    Prefill.calls.clear()
    module, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    decode.fast_decode_plan = fast_decode_plan  # type: ignore[attr-defined]
    module.decode = decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return module


MAKERS = {
    "flashinfer": build(FlashInferAttention),
    "fa": build(FlashAttention),
    "fa,flashinfer": lambda ctx: PhaseSplit(build(FlashAttention)(ctx), build(FlashInferAttention)(ctx)),
}


def bench(name: str, **options: Any) -> AttentionBench:
    return AttentionBench(MAKERS[name], **({"heads": 6, "slots": 8, "pages": 320} | options))


# --------------------------------------------------------------------------------------------------- what is computed
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_step(name: str, page_size: int, layer: int, flash: Flash, flashinfer: ModuleType) -> None:
    b = bench(name, page_size=page_size, window=7, columns=64 // page_size + 1)
    b.rows([1, 15, 16, 17, 30, 0, 9, 0], room=20)
    b.check([0, 1, 2, 3], layer=layer)
    b.check(spans={5: 13, 6: 4}, layer=layer)
    b.check([4, 0, 5], {7: 6, 6: 1}, layer=layer)
    b.check([2], layer=layer)
    b.check([3, 1], {7: 5}, layer=layer)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_graphs_of_every_size_and_padding(name: str, layer: int, flash: Flash, flashinfer: ModuleType) -> None:
    """K2: real rows fewer than captured, in any order, before and after plain steps of other rows."""
    b = bench(name, window=7)
    b.rows([1, 15, 16, 17, 30, 3, 9, 22], room=20)
    graph = GraphBench(b, [1, 2, 4, 8], layer)
    rng = np.random.RandomState(0)
    for n in (8, 1, 3, 2, 5, 8):
        s = b.step(rng.permutation(8)[:n].tolist(), layer=layer)
        b.compare(s, graph.run(s))
        b.compare(s, b.run(s, layer))
        b.check([0, 1], {2: 1}, layer=layer)


@pytest.mark.parametrize("name", MAKERS)
def test_a_row_of_the_greatest_length(name: str, flash: Flash, flashinfer: ModuleType) -> None:
    """N5."""
    b = bench(name)
    b.rows([b.max_len - 1, 2, 0], room=b.max_len)
    graph = GraphBench(b, [2])
    s = b.step([0, 1])
    assert s.view.max_kv == b.max_len
    b.compare(s, graph.run(s))
    b.check([1], {2: b.max_len})


# ------------------------------------------------------------------------------------------------------------ flashinfer
def test_a_plan_is_whole_once_for_each_number_of_rows_and_then_fast(flashinfer: ModuleType) -> None:
    b = bench("flashinfer")
    b.rows([3, 9, 20], room=20)
    graph = GraphBench(b, [2, 4])
    assert Decode.calls == ["plan", "plan"]
    graph.run(b.step([0, 1, 2]))
    b.run(b.step([0, 1]))
    assert Decode.calls == ["plan", "plan", "fast", "fast"]
    b.run(b.step([0, 1, 2]))
    assert Decode.calls[4:] == ["plan"], "no graph has three rows"


def test_without_a_fast_plan_every_plan_is_whole(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may have it with other arguments, or not at all."""
    monkeypatch.setattr(flashinfer.decode, "fast_decode_plan", lambda wrapper, indptr: None)
    b = bench("flashinfer")
    b.rows([3, 9], room=20)
    for _ in range(3):
        b.check([0, 1])
    assert Decode.calls == ["plan"] * 3


def test_plans_in_flight_have_staging_of_their_own(flashinfer: ModuleType) -> None:
    """M3: with two steps in flight a third plan must not write where the first may still be read."""
    b = bench("flashinfer", depth=2)
    b.rows([3, 9, 0], room=40)
    seen: dict[type, list[int]] = {Decode: [], Prefill: []}
    backend: Any = b.backend
    for _ in range(6):
        meta = backend.plan(b.step([0, 1], {2: 2}).view)
        seen[Decode].append(meta.decode[0].pinned_at)
        seen[Prefill].append(meta.prefill[0].pinned_at)
    for at in seen.values():
        assert all(len(set(at[i : i + 3])) == 3 for i in range(4))
    assert not set(seen[Decode]) & set(seen[Prefill])


def test_wrappers_that_cannot_be_guarded_are_refused(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """M3: a version that keeps its staging elsewhere would be used unguarded."""
    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", lambda *a, **k: SimpleNamespace())
    with pytest.raises(PluginError, match="cannot guard the plans of this flashinfer-python"):
        bench("flashinfer")


def test_workspace_holds_the_split_parts_of_decode_and_prefill() -> None:
    """As computed by hand from scheduler.cuh: 2 tiles a multiprocessor and KV head, or what 256 rows make in a graph."""
    parts = (132 * 2 // 8, 256 * 2 // 16 + 255)  # prefill: 33 tiles of 128; decode: 287 tiles of 16
    assert workspace_bytes(16, 8, 128, 256, 132) >= 16 * max(parts[0] * 128, parts[1] * 16) * 129 * 4
    assert workspace_bytes(16, 8, 128, 256, 132) < 64 << 20
    assert workspace_bytes(64, 8, 128, 256, 132) > 128 << 20, "what FlashInfer recommends would not do"


# -------------------------------------------------------------------------------------------------------------------- fa
def test_graphs_and_plain_steps_of_one_size_split_alike(flash: Flash) -> None:
    """The number of splits is fixed when a graph is captured."""
    b = bench("fa")
    b.rows([3, 9, 20, 4], room=20)
    graph = GraphBench(b, [4])
    s = b.step([0, 1, 2, 3])
    flash.calls.clear()
    graph.run(s)
    b.run(s)
    assert [c["splits"] for c in flash.calls] == [16, 16]
    assert flash.calls[0]["columns"] == b.table.shape[1], "a graph has the columns of the longest row"
    assert flash.calls[1]["columns"] == -(-s.view.max_kv // b.page_size)


def test_a_schedule_is_made_once_a_step_and_kind_of_layer(flash: Flash) -> None:
    b = bench("fa", window=4)
    b.rows([3, 9], room=20)
    s = b.step([0, 1])
    meta = b.backend.plan(s.view)
    assert flash.schedules == 2
    for layer in (0, 1, 0):
        b.backend.forward(s.q, s.k, s.v, b.kv, layer, meta, s.view)
    assert [int(c["schedule"]) for c in flash.calls] == [1, 2, 1]


# ---------------------------------------------------------------------------------------------------------- what is served
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu", "sm": 0}, "it needs an NVIDIA GPU; the device is 'cpu'"),
        ({"sm": 75}, "no kernels for compute capability 7.5, only for 8.0"),
        ({"dtype": "float32"}, "dtype float32 is not float16 or bfloat16"),
        ({"head_dim": 80}, "head_dim 80 is not one of 64"),
        ({"heads": 9}, "9 query heads are no multiple of 8 KV heads"),
    ],
)
@pytest.mark.parametrize("cls", [FlashInferAttention, FlashAttention])
def test_what_cannot_be_served_is_said(cls: type[Any], change: dict[str, Any], reason: str) -> None:
    if cls is FlashAttention:
        reason = reason.replace("only for 8.0", "only for 9.0")
    found = cls.supports(replace(HOPPER, **change))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_flash_attention_is_for_hopper_alone(sm: int) -> None:
    """M17: architectures are compared exactly; newer ones do not run the kernels of older ones."""
    found = FlashAttention.supports(replace(HOPPER, sm=sm))
    assert found is not None
    assert "only for 9.0" in found


@pytest.mark.parametrize(
    ("cls", "package"), [(FlashInferAttention, "flashinfer-python"), (FlashAttention, "sglang-kernel")]
)
def test_a_missing_package_is_named_with_what_installs_it(
    cls: type[Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_plugins.attention.limits.find_spec", lambda name: None)
    assert cls.supports(HOPPER) == f"{package} is not installed: pip install 'minisgl[cuda]'"


def test_a_package_without_flash_attention_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have been packed without that part, which is by far the largest."""
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("minisgl_plugins.attention.limits.find_spec", lambda name: spec)
    (tmp_path / "flash_attn.py").touch()
    found = FlashAttention.supports(HOPPER)
    assert found is not None
    assert "without FlashAttention-3" in found
    (tmp_path / "flash_ops.abi3.so").touch()
    assert FlashAttention.supports(HOPPER) is None
    assert FlashInferAttention.supports(HOPPER) is None


def test_a_package_that_does_not_import_is_a_plugin_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(PluginError, match="'fa' needs package 'sglang-kernel', which cannot be imported"):
        bench("fa")


def test_page_lists() -> None:
    """Rows of 5, 4 and 1 tokens in pages of 4; the table's other entries are stale."""
    table = torch.tensor([[7, 8, 9], [1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    indptr, last, indices = (torch.full((n,), -1, dtype=torch.int32) for n in (4, 3, 9))
    fill_pages(torch.tensor([5, 4, 1]), torch.tensor([2, 0, 1]), table, 4, indptr, last, indices)
    assert indptr.tolist() == [0, 2, 3, 4]
    assert last.tolist() == [1, 4, 1]
    assert indices[:4].tolist() == [4, 5, 7, 1]
