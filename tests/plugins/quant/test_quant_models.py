"""Quantized models: every bundled architecture small, the default model by its perplexity, and what is refused."""

import gc
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.api.device import OpsContext, QuantContext, QuantMethod
from minisgl.base.errors import ConfigError, UnknownPlugin
from minisgl.config.load import load_settings
from minisgl.config.schema import Settings
from minisgl.nn.packed import pack
from minisgl.nn.quant import make_quant
from minisgl.plugin.registry import Registry
from minisgl.testing.checkpoints import llama_checkpoint, llama_config, make_worker, random_checkpoint
from minisgl.testing.models import greedy_rows, random_prompt
from minisgl.testing.perplexity import perplexity
from minisgl.testing.plans import GREEDY, PlanDriver
from minisgl.testing.ranks import run_ranks
from minisgl.text.create import make_tokenizer
from minisgl_plugins.ops.torch import TorchOps
from minisgl_plugins.quant.int8 import Int8Quant

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

    experts = True

    @classmethod
    def detect(cls, config):
        return config.get("quant_method") == "plain"

    def linear(self, weight, head):
        kept = weight.clone()
        return lambda x, bias: torch.nn.functional.linear(x, kept, bias)


class Turned(Plain):
    """As ``Plain``, with hidden states and values in other bases."""

    def basis(self, size):
        g = torch.Generator().manual_seed(size)
        matrix = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))[0].float()
        return lambda x: x @ matrix

    def turned(self, weight, turn, head):
        return self.linear(turn(weight), head)


@pytest.fixture
def registry():
    found = Registry.scan(bundled_only=True)
    found.add("quant", "plain", Plain)
    found.add("quant", "turned", Turned)
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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_hidden_states_in_another_basis_give_the_same_logits(tied, biased, tmp_path, registry):
    import transformers

    config = transformers.LlamaConfig(**llama_config(tie_word_embeddings=tied, attention_bias=biased, mlp_bias=biased))
    local, prompt = random_checkpoint(tmp_path, config), random_prompt(config.vocab_size)
    plain, turned = (greedy_rows(local, prompt, 1, registry, settings=using(s))[0][0] for s in ("plain", "turned"))
    assert torch.allclose(turned, plain, rtol=1e-4, atol=1e-4)
    worker = make_worker(local, using("turned"), registry=registry)
    assert all((p == 1).all() for n, p in worker.model.named_parameters() if "norm" in n)
    plain = make_worker(local, using("plain"), registry=registry)
    before, after = (w.model.model.embed_tokens.weight for w in (plain, worker))
    assert torch.allclose(after.norm(dim=1), before.norm(dim=1), rtol=1e-4)
    assert not torch.allclose(after, before, rtol=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_basis_changes_no_architecture(family, tmp_path, registry):
    """Head norms, biases, windows; a mixture of experts keeps its basis."""
    local, prompt = checkpoint(family, tmp_path), random_prompt(199)
    plain, turned = (greedy_rows(local, prompt, 1, registry, settings=using(s))[0][0] for s in ("plain", "turned"))
    assert torch.allclose(turned, plain, rtol=1e-4, atol=1e-4)


def test_a_model_of_its_own_keeps_its_basis(tmp_path, registry):
    """Whoever does anything else with hidden states need not know of bases."""
    from minisgl_plugins.models.llama import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        def forward(self, b):
            return super().forward(b)

    registry.add("model", "OwnForCausalLM", Own)
    local = llama_checkpoint(tmp_path)
    local.config["architectures"] = ["OwnForCausalLM"]
    own = make_worker(local, using("turned"), registry=registry).model
    assert isinstance(own, Own)
    assert not all((p == 1).all() for n, p in own.named_parameters() if "norm" in n)


def test_the_float_weights_are_freed(tmp_path):
    local = llama_checkpoint(tmp_path)
    worker = make_worker(local, using("int8"))
    assert {n for n, _ in worker.model.named_parameters() if "norm" not in n} == {"model.embed_tokens.weight"}
    gc.collect()
    weights = {(48 + 32, 48), (48, 48), (160, 48), (48, 80)}  # qkv, o, gate_up, down
    alive = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_floating_point()]
    assert not [t.shape for t in alive if tuple(t.shape) in weights]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_experts_are_quantized_one_by_one_and_their_float_weights_freed(name, tmp_path):
    worker = make_worker(checkpoint("Qwen3Moe", tmp_path), using(name))
    left = {n for n, _ in worker.model.named_parameters() if "norm" not in n}
    routers = {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert left <= routers | {"model.embed_tokens.weight"}
    gc.collect()
    stacked = {(8, 48, 56), (8, 56, 24), (384, 56), (448, 24)}
    alive = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_floating_point()]
    assert not [t.shape for t in alive if tuple(t.shape) in stacked]


def test_a_method_that_leaves_experts_alone_gets_float_ones(tmp_path):
    class Floats(Plain):
        experts = False

    registry = Registry.scan(bundled_only=True)
    registry.add("quant", "floats", Floats)
    local, prompt = checkpoint("Qwen3Moe", tmp_path), random_prompt(199)
    worker = make_worker(local, using("floats"), registry=registry)
    assert worker.model.model.layers[0].mlp.experts.pack is pack  # as without a method
    same, plain = (greedy_rows(local, prompt, 1, registry, settings=s)[0][0] for s in (using("floats"), {}))
    assert torch.allclose(same, plain, rtol=1e-4, atol=1e-4)


def test_an_experts_rows_do_not_change_with_their_neighbours_in_int8(tmp_path):
    """P1: to the bit, as for other layers."""
    from minisgl.base.facts import MoEFacts
    from minisgl.nn.experts import PackedExperts
    from minisgl.runtime.comm import NoComm

    method = Int8Quant(QuantContext(Int8Quant.Settings(), torch.device("cpu"), torch.float32))
    g = torch.Generator().manual_seed(2)
    moe = MoEFacts.from_hf({**MOE, "num_hidden_layers": 2})
    layer = PackedExperts(56, moe, torch.float32, NoComm(), lambda w: method.linear(w, head=False))
    gate_up, down = torch.randn(8 * 48, 56, generator=g) / 8, torch.randn(8 * 56, 24, generator=g) / 8
    layer.gate_up, layer.down = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    layer.finish()
    ops = TorchOps(OpsContext(TorchOps.Settings(), torch.device("cpu"), torch.float32)).table()
    x, logits = torch.randn(20, 56, generator=g), torch.randn(20, 8, generator=g)
    b = SimpleNamespace(ops=ops)
    together = layer(x, logits, b)
    alone = torch.cat([layer(x[i : i + 1], logits[i : i + 1], b) for i in range(20)])
    assert torch.equal(together, alone)
    exact = ops["moe"](x, logits, gate_up.view(8, 48, 56), down.view(8, 56, 24), 2, True)
    assert (together - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_ranks_may_have_shares_that_groups_do_not_divide(name, family, tmp_path):
    """48 inputs of a layer, and 12 of an expert's: no multiples of 32 inputs, which have one scale in int4, nor of 64."""
    import transformers

    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = llama_config(**sizes, head_dim=24, sliding_window=None, **(MOE if family == "Qwen3Moe" else {}))
    local = random_checkpoint(tmp_path, getattr(transformers, f"{family}Config")(**config))

    def logits(comm, quant):
        worker = make_worker(local, using(quant) if quant else None, comm=comm)
        seen, whole = [], worker.model.logits
        worker.model.logits = lambda h, b: seen.append(whole(h, b)) or seen[-1]
        driver = PlanDriver(worker.run, worker.info.page_size)
        driver.start(0, random_prompt(199, 9), GREEDY, room=1)
        driver.generate([0], 1)
        return seen[0][0]

    exact = logits(None, None)
    for found in run_ranks(2, lambda comm: logits(comm, name)):
        assert torch.nn.functional.cosine_similarity(found, exact, dim=0) > (0.99 if name == "int8" else 0.85)


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
