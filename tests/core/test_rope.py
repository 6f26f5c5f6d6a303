"""Rotary frequencies: the very floats of transformers."""

import pytest
import torch

from minisgl.base.facts import ModelFacts
from minisgl.nn.rope import cos_sin_table, frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.3},
    "dynamic": {"rope_type": "dynamic", "factor": 2.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-one-mscale": YARN | {"mscale": 0.7},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 1.7},
    "yarn-of-the-whole-length": {"rope_type": "yarn", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize("theta", [10000.0, 5e5])
def test_frequencies_and_tables_are_those_of_transformers(kind, head_dim, theta):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=256,
        rope_parameters=KINDS[kind] | {"rope_theta": theta}, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    known = LlamaRotaryEmbedding(config)
    rope = ModelFacts.from_hf(config.to_dict(), {}).rope
    freq, scale = frequencies(rope, head_dim)
    assert torch.equal(freq, known.inv_freq)
    assert scale == known.attention_scaling
    cos, sin = known(torch.zeros(1), torch.arange(256)[None])  # each [1, 256, head_dim], both halves the same
    expected = torch.cat([t[0, :, : head_dim // 2] for t in (cos, sin)], 1)
    assert torch.equal(cos_sin_table(rope, head_dim, 256, torch.device("cpu")), expected)


def test_dynamic_scaling_of_transformers_changes_nothing_up_to_the_length_served():
    """What minisgl relies on, said by transformers: the table is the default one until a token lies beyond."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    dynamic, default = (
        LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=256, rope_parameters=p | {"rope_theta": 10000.0}))
        for p in (KINDS["dynamic"], KINDS["default"])
    )
    x = torch.zeros(1)
    for length, same in ((1, True), (100, True), (256, True), (257, False)):
        at = torch.arange(length)[None]
        assert torch.equal(dynamic(x, at)[0], default(x, at)[0]) is same
