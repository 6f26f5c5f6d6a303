"""What a worker is built from: device, dtype, kernels, sizes."""

import pytest
import torch

from minisgl.base.errors import BrokenPlugin, ConfigError, UnknownPlugin
from minisgl.config.schema import Settings
from minisgl.nn.assemble import pick_attention, resolve_device, resolve_dtype
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttentionBackend, AttnFacts
from minisgl.testing.checkpoints import llama_checkpoint, make_worker

FACTS = AttnFacts(4, 2, 8, "float32", 16, "cpu")


class Refusing(AttentionBackend):
    def __init__(self, ctx): ...
    @classmethod
    def supports(cls, f):
        return "page_size 16 is not 64"

    def plan(self, b): ...
    def forward(self, q, k, v, kv, layer, meta, b): ...


def registry():
    r = Registry.scan(bundled_only=True)
    r.add("attention", "refusing", Refusing)
    r.add("attention", "broken", "no_such_module_anywhere:Attention")
    return r


def settings(use="auto"):
    return Settings.model_validate({"kinds": {"attention": {"use": use}}})


def test_auto_attention_on_a_cpu_is_torch():
    assert pick_attention(settings(), registry(), FACTS)[0] == "torch"


def test_a_named_backend_that_cannot_serve_is_refused_with_its_reason_and_the_others():
    with pytest.raises(ConfigError, match=r"attention='refusing' .*page_size 16 is not 64.*'torch'"):
        pick_attention(settings("refusing"), registry(), FACTS)


def test_auto_reports_every_reason_when_none_serves(monkeypatch):
    monkeypatch.setattr("minisgl.nn.assemble.ATTENTION_ORDER", ("refusing", "broken"))
    with pytest.raises(ConfigError, match=r"refusing: page_size 16 is not 64; broken: (?s:.*)no_such_module_anywhere"):
        pick_attention(settings(), registry(), FACTS)


def test_a_named_backend_that_is_unknown_or_broken_is_never_replaced():
    with pytest.raises(UnknownPlugin, match="torhc"):
        pick_attention(settings("torhc"), registry(), FACTS)
    with pytest.raises(BrokenPlugin, match="no_such_module_anywhere"):
        pick_attention(settings("broken"), registry(), FACTS)


def test_dtype_auto():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", "bfloat16", cpu) == torch.float32
    assert resolve_dtype("auto", "bfloat16", gpu) == torch.bfloat16
    assert resolve_dtype("auto", "float16", gpu) == torch.float16
    assert resolve_dtype("auto", "float32", gpu) == torch.bfloat16
    assert resolve_dtype("float16", "float32", cpu) == torch.float16


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "tpu"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        resolve_device(name)


def test_sizes_come_from_the_settings_and_default_by_device(tmp_path):
    local = llama_checkpoint(tmp_path)
    info = make_worker(local).info
    assert (info.max_slots, info.batch_tokens, info.max_len, info.page_size) == (32, 256, 256, 16)
    sized = make_worker(
        local, {"limits": {"max_running": 3, "batch_tokens": 40, "max_len": 100}, "kv": {"num_pages": 5}}
    )
    assert (sized.info.max_slots, sized.info.batch_tokens, sized.info.num_pages, sized.info.max_len) == (3, 40, 5, 80)
    assert make_worker(local, {"limits": {"max_len": 10_000}}).info.max_len == 256  # never beyond the model's
    assert torch.get_num_threads() == 1
