"""What a worker is built from: device, dtype, kernels, sizes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.base.errors import BrokenPlugin, ConfigError, UnknownPlugin
from minisgl.base.types import SamplingSpec
from minisgl.base.vocabulary import tokenizer_ids
from minisgl.config.schema import Settings
from minisgl.nn.assemble import resolve_device, resolve_dtype
from minisgl.nn.choose import pick_attention
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttentionBackend, AttnFacts
from minisgl.testing.bytemodel import VOCAB, write_byte_model
from minisgl.testing.checkpoints import llama_checkpoint, llama_config, make_worker, random_checkpoint
from minisgl.testing.plans import PlanDriver

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
    monkeypatch.setattr("minisgl.nn.choose.ATTENTION_ORDER", ("refusing", "broken"))
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_pad_the_vocabulary_are_never_sampled_w4(temperature, tmp_path):
    """300 rows of embedding for 259 tokens, and the rows beyond have by far the largest logits."""
    from transformers import LlamaConfig

    changes = {"vocab_size": 300, "tie_word_embeddings": False}
    local = random_checkpoint(tmp_path / "model", LlamaConfig(**llama_config(**changes)))
    file = local.path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][VOCAB:] = 9 * tensors["lm_head.weight"][: 300 - VOCAB]
    save_file(tensors, file)

    def sampled(tokenizer_dir):
        driver = PlanDriver(make_worker(replace(local, tokenizer_dir=tokenizer_dir)).run, 16)
        for slot in range(8):
            driver.start(slot, [5, 6, slot], SamplingSpec(temperature=temperature, seed=slot, max_new=99))
        driver.generate(range(8), 20)
        return {token for tokens in driver.out.values() for token in tokens}

    assert max(sampled(None)) >= VOCAB
    assert max(sampled(write_byte_model(tmp_path / "tokenizer"))) < VOCAB


@pytest.mark.parametrize(
    ("tokenizer", "config", "expected"),
    [({"model": {"vocab": {"a": 0, "b": 7}}}, None, 8), ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, None, 2),
     ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 4, "content": "<s>"}]}, None, 5),
     ({"model": {"vocab": {"a": 0}}}, {"added_tokens_decoder": {"9": {"content": "<s>"}}}, 10),
     ({"model": {"vocab": {}}}, {}, None), ({"model": {}}, None, None), ([], None, None)],
)  # fmt: skip
def test_number_of_ids_of_a_tokenizer_w4(tokenizer, config, expected, tmp_path):
    assert tokenizer_ids(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_ids(tmp_path) == expected
