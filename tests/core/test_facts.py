"""Model facts from the config variants people have on disk."""

import json
from pathlib import Path

import pytest

from minisgl.base.errors import ModelError
from minisgl.base.facts import ModelFacts, MoEFacts, WindowFacts

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def facts(generation=None, without=(), **changes):
    config = {k: v for k, v in (BASE | changes).items() if k not in without}
    return ModelFacts.from_hf(config, generation or {})


def test_plain_config_is_read():
    f = facts(dtype="bfloat16", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_theta=5e5)
    assert (f.arch, f.layers, f.hidden, f.intermediate, f.vocab, f.max_len) == (
        "LlamaForCausalLM",
        3,
        64,
        128,
        100,
        2048,
    )
    assert (f.heads, f.kv_heads, f.head_dim, f.norm_eps, f.dtype) == (8, 2, 8, 1e-5, "bfloat16")
    assert f.tied
    assert f.attention_bias
    assert f.mlp_bias
    assert f.rope.theta == 5e5
    assert f.rope.kind == "default"


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": None}])
def test_absent_or_null_head_dim_is_derived_m18(head_dim):
    assert facts(**head_dim).head_dim == 8
    assert facts(head_dim=32).head_dim == 32


def test_absent_kv_heads_means_as_many_as_heads_m18():
    assert facts(without=["num_key_value_heads"]).kv_heads == 8


@pytest.mark.parametrize(
    "where",
    [{"rope_theta": 500000.0}, {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
     {"rope_scaling": {"rope_theta": 500000.0, "rope_type": "default"}}],
)  # fmt: skip
def test_rope_theta_beside_or_inside_the_rope_parameters_m18(where):
    assert facts(**where).rope.theta == 500000.0


@pytest.mark.parametrize(
    ("given", "dtype"),
    [({}, "float32"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
     ({"torch_dtype": "torch.bfloat16"}, "bfloat16")],
)  # fmt: skip
def test_dtype_of_transformers_4_and_5_m18(given, dtype):
    assert facts(**given).dtype == dtype


def test_absent_tie_word_embeddings_means_untied_m18():
    assert facts().tied is False
    assert facts(tie_word_embeddings=None).tied is False


def test_eos_is_the_union_of_config_and_generation_config_a15():
    assert facts({"eos_token_id": [128001, 128009]}, eos_token_id=128001).eos == {128001, 128009}
    assert facts({"eos_token_id": 7}, eos_token_id=[2, 3]).eos == {2, 3, 7}
    assert facts({}, eos_token_id=None).eos == frozenset()


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_yarn_extends_the_context_to_factor_times_original_w3(key, table):
    """Qwen2.5's long-context settings: factor 4 over 32768 positions, max_position_embeddings left at 32768."""
    f = facts(
        max_position_embeddings=32768,
        **{table: {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    )
    assert f.rope.kind == "yarn"
    assert f.max_len == 131072


def test_yarn_without_original_length_scales_the_config_length_w3():
    assert facts(rope_scaling={"rope_type": "yarn", "factor": 2.0}).max_len == 4096


def test_rope_scaling_that_contradicts_the_newer_table_is_refused_w3():
    """What Qwen2.5's README tells to add, added to a config that transformers 5 saved."""
    new = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ModelError, match=r"rope_scaling=.*'yarn'.* and rope_parameters=.* contradict"):
        facts(rope_parameters=new, rope_scaling={"type": "yarn", "factor": 4.0})
    both = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    assert facts(rope_parameters=both, rope_scaling={"type": "yarn", "factor": 4.0}).rope.kind == "yarn"
    assert facts(rope_parameters=new, rope_scaling={"type": "default"}).rope.theta == 1e6


def test_linear_scaling_extends_the_context():
    """Vicuna 1.5 16k: 4096 positions, factor 4."""
    f = facts(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0})
    assert (f.rope.kind, f.max_len) == ("linear", 16384)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("llama-3.1-8b", (32, 32, 8, 128, 128256, 131072, False, "llama3")),
     ("llama-3.2-1b", (16, 32, 8, 64, 128256, 131072, True, "llama3"))],
)  # fmt: skip
def test_published_llama_3_configs(folder, expected):
    published = {
        "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                         "head_dim": 64, "tie_word_embeddings": True},
    }[folder]  # fmt: skip
    scaling = {"factor": 8.0 if folder == "llama-3.1-8b" else 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
    f = facts(**published, num_key_value_heads=8, max_position_embeddings=131072, vocab_size=128256, rope_theta=500000.0,
              rope_scaling=scaling, eos_token_id=[128001, 128008, 128009])  # fmt: skip
    assert (f.layers, f.heads, f.kv_heads, f.head_dim, f.vocab, f.max_len, f.tied, f.rope.kind) == expected
    assert f.eos == {128001, 128008, 128009}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, "alpha=1000.0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "contradict"),
        ({"rope_scaling": {"factor": 2.0}}, "does not take factor=2.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mystery": 1}}, "mystery=1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "not one flat table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 1024}, "sliding_window=1024"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"]}, "1 entries for num_hidden_layers=3"),
        ({"sliding_window": "64"}, "sliding_window='64'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"num_attention_heads": 7}, "num_key_value_heads=2"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"architectures": []}, "architectures=[]"),
    ],
)  # fmt: skip
def test_what_would_change_the_output_is_refused_not_ignored(changes, named):
    with pytest.raises(ModelError) as refused:
        facts(**changes)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "intermediate_size"]
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelError, match=key):
        facts(without=[key])


def test_a_sliding_window_that_is_off_or_covers_the_context_is_accepted():
    assert facts(sliding_window=131072, use_sliding_window=False).max_len == 2048
    assert facts(sliding_window=1024, use_sliding_window=False).max_len == 2048
    assert facts(sliding_window=2048).max_len == 2048


def test_the_config_of_a_saved_transformers_model_is_read(tmp_path: Path):
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    f = ModelFacts.from_hf(json.loads((tmp_path / "config.json").read_text()), {})
    assert (f.head_dim, f.rope.theta, f.rope.kind) == (16, 10000.0, "default")


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({}, {0, 1, 2}), ({"max_window_layers": 2}, {2}), ({"max_window_layers": 2, "layer_types": LAYER_TYPES}, {0, 2})],
)  # fmt: skip
def test_layers_with_a_window(changes, layers):
    """layer_types of transformers 5, max_window_layers of Qwen before, else all layers."""
    f = ModelFacts.from_hf(BASE | {"sliding_window": 64} | changes, {}, windows=True)
    assert f.window == WindowFacts(64, frozenset(layers))


def test_a_window_in_no_layer_is_none():
    """Qwen2's max_window_layers counts the layers that see everything."""
    assert facts(sliding_window=64, max_window_layers=3).window is None


def test_dynamic_scaling_serves_the_length_up_to_which_it_changes_nothing():
    """Beyond it, transformers' rotation of a token depends on the length of the request when its key was computed."""
    f = facts(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (f.rope.kind, f.max_len) == ("dynamic", 2048)


def test_experts_of_a_published_config():
    """Qwen3-30B-A3B."""
    published = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
                 "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48}  # fmt: skip
    assert MoEFacts.from_hf(published) == MoEFacts(128, 8, 768, True, frozenset(range(48)))
    some = MoEFacts.from_hf(published | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert some.layers == {1, 5}
