"""LlamaForCausalLM against transformers, and what a checkpoint may and may not look like."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.base.errors import ModelError
from minisgl.testing.checkpoints import llama_checkpoint, local_model, make_worker
from minisgl.testing.models import Recorder
from minisgl.testing.plans import PlanDriver

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PROMPT = np.random.RandomState(0).randint(3, 199, 50).tolist()

VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-grouping": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama3-rope": {"rope_scaling": LLAMA3},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn-rope": {"rope_scaling": YARN},
    "yarn-mscale": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16, "truncate": False}},
    "rope-theta": {"rope_theta": 500000.0},
    "norm-eps": {"rms_norm_eps": 0.1},
}


def reference(path, ids):
    """Logits of transformers at every position: [len(ids), vocab]."""
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([ids])).logits[0]


def run(local, chunks, decode=8, **settings):
    """Logits at the end of the prompt and after each of ``decode`` tokens, and the tokens."""
    worker = make_worker(local, settings)
    worker.sampler = Recorder(worker.sampler, [])
    d = PlanDriver(worker.run, worker.info.page_size)
    d.start(0, PROMPT)
    for n in chunks:
        d.step(prefill={0: n})
    for _ in range(decode):
        d.step(decode=[0])
    return torch.cat(worker.sampler.seen), d.out[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_in_prefill_and_decode(variant, tmp_path):
    local = llama_checkpoint(tmp_path, **VARIANTS[variant])
    logits, tokens = run(local, [50])
    expected = reference(tmp_path, PROMPT + tokens[:-1])[49:]
    assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4), (logits - expected).abs().max()
    assert len(set(tokens)) > 2  # the comparison sees different contexts


@pytest.mark.parametrize("chunks", [[16, 34], [1, 49], [17, 16, 16, 1], [49, 1]])
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunked_prefill_equals_whole_prefill(chunks, page_size, tmp_path):
    local = llama_checkpoint(tmp_path)
    whole, whole_tokens = run(local, [50], kv={"page_size": page_size})
    cut, tokens = run(local, chunks, kv={"page_size": page_size})
    assert tokens == whole_tokens
    assert torch.allclose(cut, whole, atol=1e-4, rtol=1e-4)


def test_sharded_files_and_one_file_give_the_same(tmp_path):
    one = llama_checkpoint(tmp_path / "one")
    many = llama_checkpoint(tmp_path / "many", shard_size="20KB")
    assert len(many.weights) > 3
    assert torch.equal(run(one, [50])[0], run(many, [50])[0])


def test_a_consolidated_copy_beside_shards_is_not_read_m18(tmp_path):
    local = llama_checkpoint(tmp_path, shard_size="20KB")
    expected = run(local, [50])[0]
    save_file({"tok_embeddings.weight": torch.full((199, 48), 9.0)}, tmp_path / "consolidated.safetensors")
    save_file({"model.embed_tokens.weight": torch.full((199, 48), 9.0)}, tmp_path / "consolidated.00.safetensors")
    both = local_model(tmp_path)
    assert len(both.weights) == len(local.weights) + 2
    assert torch.equal(run(both, [50])[0], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_run_in_float32_on_a_cpu(dtype, tmp_path):
    local = llama_checkpoint(tmp_path, dtype=dtype)
    logits, tokens = run(local, [50])
    expected = reference(tmp_path, PROMPT + tokens[:-1])[49:]
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_bfloat16_model_is_near_the_float32_one(tmp_path):
    local = llama_checkpoint(tmp_path, dtype="bfloat16")
    logits, _ = run(local, [50], decode=0, model={"device": "cpu", "dtype": "bfloat16"})
    expected = reference(tmp_path, PROMPT)[49:]
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.999


@pytest.mark.parametrize("config", [{"type": "yarn"}, {"rope_type": "yarn"}])
def test_yarn_under_either_key_gives_transformers_logits_w3(config, tmp_path):
    local = llama_checkpoint(tmp_path, rope_scaling=YARN)
    params = {k: v for k, v in YARN.items() if k != "rope_type"} | config
    old_style = {k: v for k, v in local.config.items() if k != "rope_parameters"} | {
        "rope_scaling": params,
        "rope_theta": 10000.0,
    }
    logits, tokens = run(local_model(tmp_path, old_style), [50])
    expected = reference(tmp_path, PROMPT + tokens[:-1])[49:]
    assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------- broken checkpoints


def edited(tmp_path, edit, **changes):
    """A checkpoint whose tensors ``edit`` has changed in place."""
    llama_checkpoint(tmp_path, **changes)
    file = tmp_path / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)
    return local_model(tmp_path)


def refusal(local):
    with pytest.raises(ModelError) as refused:
        make_worker(local)
    return str(refused.value)


@pytest.mark.parametrize("head", ["absent", "present"])
def test_tied_model_loads_with_and_without_a_head_in_its_file_w1(head, tmp_path):
    def edit(tensors):
        assert "lm_head.weight" not in tensors
        if head == "present":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    local = edited(tmp_path, edit)
    logits, tokens = run(local, [50])
    assert torch.allclose(logits, reference(tmp_path, PROMPT + tokens[:-1])[49:], atol=1e-4, rtol=1e-4)


def test_untied_model_without_a_head_is_refused_w1(tmp_path):
    local = edited(tmp_path, lambda t: t.pop("lm_head.weight"), tie_word_embeddings=False)
    assert "tensor 'lm_head.weight' is missing" in refusal(local)


def test_a_missing_layer_is_refused_with_its_tensors_w2(tmp_path):
    """The config says one layer more than the file has."""
    local = llama_checkpoint(tmp_path)
    message = refusal(local_model(tmp_path, dict(local.config) | {"num_hidden_layers": 3}))
    assert "9 tensors" in message
    assert "model.layers.2.mlp.down_proj.weight" in message
    assert str(tmp_path / "model.safetensors") in message


def test_a_layer_too_many_is_refused_w2(tmp_path):
    local = llama_checkpoint(tmp_path)
    message = refusal(local_model(tmp_path, dict(local.config) | {"num_hidden_layers": 1}))
    assert "model.layers.1." in message
    assert "not used" in message


def test_an_unexpected_tensor_is_refused(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)

    assert "tensor 'model.layers.0.self_attn.q_norm.weight' is in" in refusal(edited(tmp_path, edit))


def test_inverse_frequencies_of_old_checkpoints_are_ignored(tmp_path):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    assert make_worker(edited(tmp_path, edit)).info.vocab == 199


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path):
    def edit(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(81, 48)

    message = refusal(edited(tmp_path, edit))
    assert "'model.layers.1.mlp.up_proj.weight' has shape [81, 48], the config asks for [80, 48]" in message


def test_integer_weights_are_refused(tmp_path):
    def edit(tensors):
        tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)

    assert "'model.norm.weight' has dtype I8" in refusal(edited(tmp_path, edit))


def test_no_weight_file_is_an_error_n6(tmp_path):
    local = llama_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no tensor was loaded" in refusal(local_model(tmp_path, local.config))


def test_weights_of_another_architecture_are_an_error_n6(tmp_path):
    local = llama_checkpoint(tmp_path)
    save_file({"transformer.wte.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    assert "no tensor of this model" in refusal(local_model(tmp_path, local.config))


def test_a_truncated_file_is_an_error_w2(tmp_path):
    llama_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max((t["data_offsets"][1], name) for name, t in header.items() if name != "__metadata__")[1]
    file.write_bytes(whole[:-100])
    message = refusal(local_model(tmp_path))
    assert f"{file} is not a readable safetensors file" in message
    assert f"it ends within tensor {last!r}; download it again" in message


@pytest.mark.parametrize("size", [0, 7, 50])
def test_a_file_that_is_cut_within_its_header_is_an_error_w2(size, tmp_path):
    llama_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    message = refusal(local_model(tmp_path))
    assert f"{file} is not a readable safetensors file" in message
    assert message.endswith("; download it again")


def test_an_index_that_names_an_absent_file_is_an_error_w2(tmp_path):
    local = llama_checkpoint(tmp_path, shard_size="20KB")
    local.weights[2].unlink()
    assert local.weights[2].name in refusal(local_model(tmp_path))


def index_edited(tmp_path, edit):
    """A sharded checkpoint, the map of its index changed in place by ``edit``, and the map as it was."""
    local = llama_checkpoint(tmp_path, shard_size="20KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    before = dict(index["weight_map"])
    edit(index["weight_map"])
    file.write_text(json.dumps(index))
    return local, before


def test_an_index_with_a_tensor_in_the_wrong_file_is_an_error_with_both_w2(tmp_path):
    up, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    local, before = index_edited(tmp_path, lambda m: m.update({up: m[norm], norm: m[up]}))
    assert before[up] != before[norm]
    message = refusal(local)
    for name, wrong in ((up, norm), (norm, up)):
        if f"says that {before[wrong]} holds tensor {name!r}, but {before[name]} does" in message:
            break
    else:
        pytest.fail(message)
    assert str(tmp_path / "model.safetensors.index.json") in message


def test_an_index_that_names_a_tensor_no_model_has_is_an_error_w2(tmp_path):
    local, before = index_edited(tmp_path, lambda m: m.update({"model.layers.2.x": m["model.norm.weight"]}))
    message = refusal(local)
    assert f"{before['model.norm.weight']} holds tensor 'model.layers.2.x', but none of its files does" in message


def test_an_index_that_leaves_a_tensor_out_is_harmless(tmp_path):
    """Files say themselves what they have."""

    def edit(weight_map):
        files = list(weight_map.values())
        weight_map.pop(next(n for n, f in weight_map.items() if files.count(f) > 1))

    local, _ = index_edited(tmp_path / "wrong", edit)
    right = llama_checkpoint(tmp_path / "right", shard_size="20KB")
    assert torch.equal(run(local, [50])[0], run(right, [50])[0])


def test_an_index_that_names_a_tensor_no_file_has_is_an_error_with_both_w2(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    local, where = index_edited(tmp_path, lambda m: None)
    file = tmp_path / where[name]
    save_file({k: v for k, v in load_file(file).items() if k != name} | {"rotary_emb.inv_freq": torch.ones(4)}, file)
    assert f"index.json says that {where[name]} holds tensor {name!r}, but none of its files does" in refusal(local)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": null}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_cannot_be_read_is_an_error_with_its_name_w2(text, tmp_path):
    local = llama_checkpoint(tmp_path, shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not an index" in refusal(local)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_under_the_name_of_safetensors_is_an_error_and_is_not_run(zipped, tmp_path):
    local = llama_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    torch.save({"model.norm.weight": torch.ones(48)}, file, _use_new_zipfile_serialization=zipped)
    message = refusal(local)
    assert f"{file} is not a readable safetensors file" in message
    assert "it looks like a pickle of torch.save" in message


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    llama_checkpoint(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    assert "other.safetensors" in refusal(local_model(tmp_path))


def test_another_activation_is_refused(tmp_path):
    from minisgl.base.errors import ConfigError

    local = llama_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        make_worker(local_model(tmp_path, dict(local.config) | {"hidden_act": "gelu"}))
