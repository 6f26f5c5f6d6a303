"""Quantized models: every bundled architecture small, the default model by its perplexity, and what is refused."""

import gc
import math
from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.api.device import QuantMethod
from minisgl.base.errors import ConfigError, UnknownPlugin
from minisgl.config.load import load_settings
from minisgl.config.schema import Settings
from minisgl.nn.quant import make_quant
from minisgl.plugin.registry import Registry
from minisgl.testing.checkpoints import llama_checkpoint, llama_config, make_worker, random_checkpoint
from minisgl.testing.models import greedy_rows, random_prompt
from minisgl.testing.perplexity import perplexity
from minisgl.text.create import make_tokenizer

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
PROSE = Path(__file__).parents[2] / "data" / "prose.txt"


def using(name):
    return {"kinds": {"quant": {"use": name}}}


def checkpoint(family, path):
    """Sizes that are no multiples of 32: hidden 56, intermediate 90, vocabulary 199."""
    import transformers

    given = llama_config(hidden_size=56, num_attention_heads=7, num_key_value_heads=1, head_dim=8, intermediate_size=90)
    given |= {"sliding_window": None, "tie_word_embeddings": family != "Mistral"} | (
        MOE if family == "Qwen3Moe" else {}
    )
    if family == "Qwen2":
        given.pop("head_dim")
    return random_checkpoint(path, getattr(transformers, f"{family}Config")(**given))


class Plain(QuantMethod):
    """Keeps all bits, so that only the wiring is seen. Detected by its name."""

    @classmethod
    def detect(cls, config):
        return config.get("quant_method") == "plain"

    def linear(self, weight, head):
        kept = weight.clone()
        return lambda x, bias: torch.nn.functional.linear(x, kept, bias)


@pytest.fixture
def registry():
    found = Registry.scan(bundled_only=True)
    found.add("quant", "plain", Plain)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_bundled_model_runs_quantized(family, tmp_path, registry):
    """Random weights amplify errors, so the directions of the logits are compared: without relation they are orthogonal."""
    local, prompt = checkpoint(family, tmp_path), random_prompt(199)
    plain, same, int8, int4 = (
        greedy_rows(local, prompt, 1, registry, settings=s)[0][0]
        for s in ({}, using("plain"), using("int8"), using("int4"))
    )
    assert torch.allclose(same, plain, rtol=1e-4, atol=1e-4)
    assert 0.99 < torch.nn.functional.cosine_similarity(int8, plain).item() < 1 - 1e-6
    assert 0.85 < torch.nn.functional.cosine_similarity(int4, plain).item() < 0.999


def test_the_float_weights_are_freed(tmp_path):
    local = llama_checkpoint(tmp_path)
    worker = make_worker(local, using("int8"))
    assert {n for n, _ in worker.model.named_parameters() if "norm" not in n} == {"model.embed_tokens.weight"}
    gc.collect()
    weights = {(48 + 32, 48), (48, 48), (160, 48), (48, 80)}  # qkv, o, gate_up, down
    alive = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_floating_point()]
    assert not [t.shape for t in alive if tuple(t.shape) in weights]


def test_the_engine_says_what_it_uses(tmp_path):
    local = llama_checkpoint(tmp_path)
    assert make_worker(local, using("int4")).info.picks["quant"] == "int4"
    assert "quant" not in make_worker(local).info.picks


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_cuda_is_refused_before_weights_are_read(name):
    settings = Settings.model_validate(using(name))
    with pytest.raises(
        ConfigError, match=rf"quant='{name}' cannot be used on cuda in float16: .*CPUs only; use --device cpu"
    ):
        make_quant(settings, Registry.scan(bundled_only=True), {}, torch.device("cuda"), torch.float16)


def test_half_precision_is_refused(tmp_path):
    local = llama_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="float32 activations; use --dtype float32"):
        make_worker(local, using("int8") | {"model": {"device": "cpu", "dtype": "bfloat16"}})


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UnknownPlugin, match=r"no quant plugin is named 'int9'. Did you mean 'int8'\?"):
        load_settings(overrides={"quant": "int9"})


def test_wrong_options_are_refused(tmp_path):
    wrong = {"kinds": {"quant": {"use": "int4", "options": {"int4": {"max_tokens": 0}}}}}
    with pytest.raises(ConfigError, match="max_tokens"):
        make_worker(llama_checkpoint(tmp_path), wrong)


def test_auto_asks_each_method_whether_the_checkpoint_is_its_own(registry):
    device = torch.device("cpu")
    asked = {"quantization_config": {"quant_method": "plain"}}
    name, method = make_quant(Settings(), registry, asked, device, torch.float32)
    assert (name, type(method)) == ("plain", Plain)
    assert make_quant(Settings(), registry, {}, device, torch.float32) == ("none", None)
    with pytest.raises(ConfigError, match="'awq', which no quant plugin detects; registered: 'int4', 'int8', 'plain'"):
        make_quant(Settings(), registry, {"quantization_config": {"quant_method": "awq"}}, device, torch.float32)


# ---------------------------------------------------------------------------------------------------- the default model
@pytest.fixture(scope="module")
def text(smollm2):
    settings = Settings()
    return [int(i) for i in make_tokenizer(settings, Registry.scan(), smollm2).encode(PROSE.read_text(), True)]


@pytest.fixture(scope="module")
def plain(smollm2, text):
    return perplexity(make_worker(smollm2), text[:600])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_perplexity_is_within_2_percent_of_float32(name, smollm2, text, plain):
    found = perplexity(make_worker(smollm2, using(name)), text[:600])
    assert found == pytest.approx(plain, rel=0.02)


def test_perplexity_is_that_of_transformers(tmp_path):
    """The measure itself."""
    from transformers import LlamaForCausalLM

    local, ids = llama_checkpoint(tmp_path), random_prompt(199, 60)
    with torch.no_grad():
        loss = LlamaForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    for chunk in (60, 7, 1):
        assert perplexity(make_worker(local), ids, chunk) == pytest.approx(math.exp(float(loss)), rel=1e-4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_greedy_continuation_is_paris_alone_and_in_a_batch(name):
    with LLM(quant=name, show_progress=False) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=3)
        (alone,) = llm.generate("The capital of France is", greedy)
        many = llm.generate(["The capital of France is"] * 6, greedy)
    assert alone.text.startswith(" Paris")
    assert all(out.text.startswith(" Paris") for out in many)
