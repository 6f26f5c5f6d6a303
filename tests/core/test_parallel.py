"""Which numbers of ranks fit a model. The rules are those of Megatron-LM's split by heads and columns."""

import pytest

from minisgl.base.errors import ConfigError
from minisgl.base.facts import ModelFacts, MoEFacts
from minisgl.base.parallel import check_tp, kv_copies, local_heads, vocab_rows

QWEN2_7B = {  # its config.json, shortened
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip


def facts(**changes):
    return ModelFacts.from_hf(QWEN2_7B | changes, {})


def refusal(size, f):
    with pytest.raises(ConfigError) as refused:
        check_tp(f, size)
    return str(refused.value)


def test_the_refusal_says_what_can_be_shared_what_cannot_and_what_fits_m14():
    assert refusal(8, facts()) == (
        "parallel.tp = 8 does not fit this model: 4 KV heads can be shared by 1, 2, 4, 8 or 16 ranks; "
        "28 query heads cannot be split by 8; what fits: 1, 2 or 4"
    )


def test_fewer_kv_heads_than_ranks_fit_when_ranks_are_a_multiple_m14():
    """Qwen3-30B-A3B: 32 query heads, 4 of KV."""
    f = facts(num_attention_heads=32, intermediate_size=6144)
    for size, kv, copies in ((1, 4, 1), (2, 2, 1), (4, 1, 1), (8, 1, 2), (16, 1, 4), (32, 1, 8)):
        check_tp(f, size)
        assert local_heads(f, size) == (32 // size, kv)
        assert kv_copies(f, size) == copies
    assert "4 KV heads can be shared by" in refusal(6, facts(num_attention_heads=36, intermediate_size=6 * 1024))


def test_widths_of_mlps_and_experts_must_split_evenly():
    assert "102 columns of the MLP cannot be split by 4" in refusal(4, facts(intermediate_size=102))
    moe = MoEFacts(experts=8, top_k=2, intermediate=30, renormalize=True, layers=frozenset(range(28)))
    object.__setattr__(f := facts(intermediate_size=102), "moe", moe)
    message = refusal(4, f)  # no layer has the MLP
    assert "30 columns of an expert cannot be split by 4" in message
    assert "MLP" not in message
    assert message.endswith("what fits: 1 or 2")


def test_one_size_always_fits():
    assert refusal(2, facts(num_attention_heads=3, num_key_value_heads=1)).endswith("what fits: 1")


def test_a_vocabulary_is_padded_w4():
    assert [vocab_rows(v, 4) for v in (8, 9, 12, 13)] == [2, 3, 3, 4]
