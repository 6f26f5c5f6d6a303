"""SmolLM3 against transformers: the logits and the greedy tokens of small random checkpoints."""

import pytest
from minisgl_smollm3 import SmolLM3ForCausalLM
from transformers import SmolLM3Config

from minisgl.api import ModelError
from minisgl.testing.checkpoints import random_checkpoint
from minisgl.testing.models import check_model

VARIANTS = {
    "as published": {},
    "other layers without rope": {"no_rope_layers": [0, 1, 1, 0, 1]},
    "another interval": {"no_rope_layer_interval": 2},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}


def config(**changes):
    return SmolLM3Config(
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_smollm3_equals_transformers(variant, tmp_path):
    check_model(random_checkpoint(tmp_path, config(**VARIANTS[variant])), SmolLM3ForCausalLM)


def test_keys_that_are_missing_mean_what_they_mean_to_transformers(tmp_path):
    local = random_checkpoint(tmp_path, config())
    absent = ("no_rope_layers", "layer_types", "tie_word_embeddings", "rope_parameters", "use_sliding_window")
    facts = SmolLM3ForCausalLM.facts({k: v for k, v in local.config.items() if k not in absent}, {})
    assert facts.tied
    assert facts.rope.theta == SmolLM3Config().rope_parameters["rope_theta"]


def test_too_few_flags_are_refused():
    with pytest.raises(ModelError, match="no_rope_layers has 3 entries for num_hidden_layers=5"):
        SmolLM3ForCausalLM.facts(config().to_dict() | {"architectures": ["x"], "no_rope_layers": [1, 1, 0]}, {})
