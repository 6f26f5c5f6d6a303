"""Every bundled architecture against transformers: logits and greedy tokens of small random checkpoints of many shapes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.base.errors import ModelError, UnknownPlugin
from minisgl.testing.checkpoints import llama_config, local_model, make_worker, random_checkpoint
from minisgl.testing.models import check_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SHAPES = {  # over llama_config: 6 heads of size 8, 2 of keys and values, hidden size 48
    "1-head-per-kv-head": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
    "2-heads-per-kv-head": {"num_attention_heads": 4, "tie_word_embeddings": False, "head_dim": 32},
    "3-heads-per-kv-head": {"attention_bias": True, "rope_parameters": LLAMA3},
    "6-heads-per-kv-head": {"num_key_value_heads": 1, "rope_parameters": YARN},
    "7-heads-per-kv-head": {"num_attention_heads": 14, "hidden_size": 56, "attention_bias": True, "tie_word_embeddings": False},
    "7-heads-one-kv-head": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 84, "head_dim": 16,
                            "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "dynamic-rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn-mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16, "truncate": False}},
    "yarn-attention-factor": {"rope_parameters": YARN | {"attention_factor": 1.4, "rope_theta": 500000.0}},
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def config(family, **changes):
    import transformers

    given = llama_config(**(MOE if family == "Qwen3Moe" else {}) | {"sliding_window": None} | changes)
    if family == "Qwen2":  # has biases always, and takes the size of a head from hidden_size
        given.pop("attention_bias", None)
        given["hidden_size"] = given["num_attention_heads"] * given.pop("head_dim")
    if family == "Mistral":
        given.pop("attention_bias", None)
    return getattr(transformers, f"{family}Config")(**given)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_logits_and_greedy_tokens_equal_transformers(family, shape, tmp_path):
    check_model(random_checkpoint(tmp_path, config(family, **SHAPES[shape]), seed=4))


def test_biases_in_the_mlp_of_llama(tmp_path):
    check_model(random_checkpoint(tmp_path, config("Llama", attention_bias=True, mlp_bias=True), seed=4))


def test_qwen2_with_a_head_size_of_its_own(tmp_path):
    """Its config has no such key, but transformers takes one that is there."""
    given = config("Qwen2")
    given.head_dim = 16  # hidden size 48 has 6 heads
    local = random_checkpoint(tmp_path, given, seed=4)
    assert local.config["head_dim"] == 16
    check_model(local)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8)])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s.startswith(("7", "yarn-m"))])
def test_many_experts_in_models_of_other_shapes(shape, experts, top_k, tmp_path):
    changes = SHAPES[shape] | {"num_experts": experts, "num_experts_per_tok": top_k, "initializer_range": 0.3}
    check_model(random_checkpoint(tmp_path, config("Qwen3Moe", **changes), seed=4))


# ------------------------------------------------------------------------------------------------------------------ windows
WINDOWS = {
    "mistral": ("Mistral", {"sliding_window": 20}),
    "qwen2-from-a-layer-on": ("Qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-by-layer-types": ("Qwen3", {"sliding_window": 33, "use_sliding_window": True,
                                       "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3-moe-in-all-layers": ("Qwen3Moe", {"sliding_window": 7, "use_sliding_window": True}),
    "qwen2-that-is-off": ("Qwen2", {"sliding_window": 20, "use_sliding_window": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows_give_transformers_logits(name, tmp_path):
    family, changes = WINDOWS[name]
    check_model(random_checkpoint(tmp_path, config(family, num_key_value_heads=3, **changes), seed=4))


def test_windows_of_published_configs_m18(tmp_path):
    """Qwen2.5's config has a window, that is off, and no layer types; Mistral 0.3's has null."""
    for family, keys in (
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 21}),
        ("Mistral", {"sliding_window": None}),
    ):
        local = random_checkpoint(tmp_path / family, config(family), seed=4)
        without = {k: v for k, v in local.config.items() if k not in ("layer_types", "use_sliding_window")}
        make_worker(local_model(local.path, without | keys))


def test_a_window_that_the_architecture_does_not_honour_is_refused(tmp_path):
    local = random_checkpoint(tmp_path, config("Llama"))
    with pytest.raises(ModelError, match="sliding_window=20 is not supported by LlamaForCausalLM"):
        make_worker(local_model(tmp_path, local.config | {"sliding_window": 20}))


# ------------------------------------------------------------------------------------------------------------------ experts
@pytest.mark.parametrize("experts", [8, 128])
@pytest.mark.parametrize("top_k", [2, 8])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_give_transformers_logits(experts, top_k, renormalize, tmp_path):
    changes = {"num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": renormalize}
    changes["initializer_range"] = 0.3  # with small weights few of many experts change little
    check_model(random_checkpoint(tmp_path, config("Qwen3Moe", **changes), seed=4))


@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}], ids=str)
def test_some_layers_have_one_mlp_in_place_of_experts(changes, tmp_path):
    local = random_checkpoint(tmp_path, config("Qwen3Moe", num_hidden_layers=3, **changes), seed=4)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert any(".mlp.experts." in n for n in names)
    assert any(n.endswith(".mlp.down_proj.weight") for n in names)
    check_model(local)


def test_stacked_experts_are_read_as_well(tmp_path):
    """As transformers 5 has them in memory; it saves them one by one."""
    local = random_checkpoint(tmp_path, config("Qwen3Moe"), seed=4, save_original_format=False)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in n for n in names)
    check_model(local)


def test_the_number_of_experts_under_the_key_of_published_configs_m18(tmp_path):
    """``num_experts`` in the configs of the Qwen 3 checkpoints, ``num_local_experts`` in those that transformers 5 saves."""
    local = random_checkpoint(tmp_path, config("Qwen3Moe"), seed=4)
    count = local.config["num_local_experts"]
    rest = {k: v for k, v in local.config.items() if k != "num_local_experts"}
    make_worker(local_model(tmp_path, rest | {"num_experts": count}))
    with pytest.raises(ModelError, match="num_local_experts is missing"):
        make_worker(local_model(tmp_path, rest))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_local_experts=8"),
     ({"mlp_only_layers": "1"}, "mlp_only_layers='1'"), ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
     ({"decoder_sparse_step": 0}, "decoder_sparse_step=0")],
)  # fmt: skip
def test_wrong_numbers_of_experts_are_refused(changes, named, tmp_path):
    local = random_checkpoint(tmp_path, config("Qwen3Moe"))
    with pytest.raises(ModelError) as refused:
        make_worker(local_model(tmp_path, local.config | changes))
    assert named in str(refused.value)


# ------------------------------------------------------------------------------------------------------- broken checkpoints
def moe_refusal(tmp_path, edit, **saving):
    """What is said of a checkpoint with experts whose tensors ``edit`` has changed in place."""
    random_checkpoint(tmp_path, config("Qwen3Moe"), **saving)
    file = tmp_path / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError) as refused:
        make_worker(local_model(tmp_path))
    return str(refused.value)


def test_an_expert_that_is_missing_is_named_w2(tmp_path):
    message = moe_refusal(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"))
    assert f"tensor 'model.layers.1.mlp.experts.5.up_proj.weight' is missing from {tmp_path}" in message


def test_an_expert_too_many_is_refused_w2(tmp_path):
    def edit(tensors):
        tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.ones(24, 48)

    message = moe_refusal(tmp_path, edit)
    assert "tensor 'model.layers.1.mlp.experts.8.up_proj.weight' is in" in message
    assert "model.safetensors but not used by this model" in message


def test_an_expert_of_a_wrong_shape_is_refused_with_both_shapes(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.mlp.experts.3.down_proj.weight"] = torch.ones(48, 23)

    message = moe_refusal(tmp_path, edit)
    assert "'model.layers.0.mlp.experts.3.down_proj.weight' has shape [48, 23], the config asks for [48, 24]" in message


def test_stacked_experts_of_a_wrong_number_are_refused_with_both_shapes(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(7, 48, 48)

    message = moe_refusal(tmp_path, edit, save_original_format=False)
    assert "'model.layers.0.mlp.experts.gate_up_proj' has shape [7, 48, 48], the config asks for [8, 48, 48]" in message


def test_experts_both_stacked_and_one_by_one_are_refused(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.ones(8, 48, 24)

    assert "8 tensors (model.layers.0.mlp.experts.0.down_proj.weight" in moe_refusal(tmp_path, edit)


def test_norms_of_heads_are_demanded_w2(tmp_path):
    message = moe_refusal(tmp_path, lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"))
    assert "tensor 'model.layers.0.self_attn.q_norm.weight' is missing" in message


def test_biases_that_the_architecture_does_not_have_are_refused_w2(tmp_path):
    """A Qwen 2 checkpoint under the name of Llama would run without its biases."""
    local = random_checkpoint(tmp_path, config("Qwen2"))
    with pytest.raises(ModelError) as refused:
        make_worker(local_model(tmp_path, local.config | {"architectures": ["LlamaForCausalLM"]}))
    assert "6 tensors (model.layers.0.self_attn.k_proj.bias" in str(refused.value)
    assert "not used by this model" in str(refused.value)


def test_an_unknown_architecture_lists_what_is_registered_and_how_to_get_more(tmp_path):
    local = random_checkpoint(tmp_path, config("Qwen2"))
    with pytest.raises(UnknownPlugin) as refused:
        make_worker(local_model(tmp_path, local.config | {"architectures": ["BloomForCausalLM"]}))
    for part in ("'BloomForCausalLM'", "Qwen3MoeForCausalLM", "MistralForCausalLM", "minisgl.v1.model", "pip install"):
        assert part in str(refused.value)
