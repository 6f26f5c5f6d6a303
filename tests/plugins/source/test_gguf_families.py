"""Every architecture and quantization of GGUF: logits equal transformers on the weights as the gguf package dequantizes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors import safe_open

from minisgl.base.types import LocalModel
from minisgl.testing.checkpoints import llama_config, random_checkpoint
from minisgl.testing.models import check_model
from minisgl_plugins.source.gguf_checkpoint import bfloat16

F32 = npt.NDArray[np.float32]
Resolve = Callable[..., LocalModel]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
# family -> (what llama.cpp calls it, its q and k are permuted)
ARCH = {"Llama": ("llama", True), "Mistral": ("llama", True), "Qwen2": ("qwen2", False), "Qwen3": ("qwen3", False)}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """As gguf.TensorNameMap has it, by hand."""
    stem, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{BLOCK_NAMES[rest]}.{kind}"


def permute(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows as convert_hf_to_gguf.py (LlamaModel.permute) writes them; quantization works within a row."""
    return np.ascontiguousarray(
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    )


def k_quant(shape: tuple[int, ...], kind: Q, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Random blocks, since the gguf package reads K-quants and does not write them: any bytes are weights, once the
    float16 scales among them (ggml-common.h, block_q*_K) are small numbers."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // 256, size), np.uint8)
    scale = {Q.Q2_K: 0.02, Q.Q3_K: 0.005, Q.Q4_K: 0.0004, Q.Q5_K: 0.0002, Q.Q6_K: 0.0001}[kind]
    # Where the scale is, and where there is a second one, that of what is subtracted: it is to be zero on average.
    at, second, mean = {
        Q.Q2_K: (80, 82, 1.5), Q.Q3_K: (108, None, 0), Q.Q4_K: (0, 2, 7.5), Q.Q5_K: (0, 2, 15.5), Q.Q6_K: (208, None, 0)
    }[kind]  # fmt: skip
    d = rng.uniform(scale / 2, scale, len(blocks))
    for offset, value in ((at, d), (second, mean * d)):
        if offset is not None:
            blocks[:, offset : offset + 2] = value.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], shape[-1] // 256 * size)


def encoded(weight: F32, kind: Q, rng: np.random.Generator) -> tuple[npt.NDArray[Any], Q]:
    """A weight as it is stored; as llama.cpp does, what has one dimension stays float32."""
    if weight.ndim == 1 or kind == Q.F32:
        return weight, Q.F32
    if kind == Q.F16:
        return weight.astype(np.float16), kind
    return (k_quant(weight.shape, kind, rng) if kind.name.endswith("_K") else quantize(weight, kind)), kind


def write_pair(
    folder: Path, family: str, kind: Q, vocab: list[str], keys: dict[str, Any] | None = None, **changes: Any
) -> tuple[Path, Path]:
    """A random model as a GGUF file, and what it says as a checkpoint of transformers: (file, folder)."""
    import torch
    import transformers

    given = llama_config(vocab_size=len(vocab), **(SIZES | {"sliding_window": None} | changes))
    if family == "Qwen2":
        given["hidden_size"] = given["num_attention_heads"] * given.pop("head_dim")
    config = getattr(transformers, f"{family}Config")(**given)
    random_checkpoint(folder / "first", config, seed=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "first", dtype=torch.float32)
    arch, permuted = ARCH[family]
    writer = GGUFWriter(folder / f"{family}.gguf", arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family != "Qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family in ("Llama", "Mistral"):
        writer.add_rope_dimension_count(config.head_dim)
    for method, value in (keys or {}).items():
        getattr(writer, method)(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocab)
    writer.add_token_types([1] * len(vocab))
    writer.add_token_merges(["h e"])
    rng = np.random.default_rng(0)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data, stored = encoded(tensor.numpy(), kind, rng)
        exact = dequantize(data, stored).astype(np.float32).reshape(tensor.shape)
        tensor.copy_(torch.from_numpy(exact.copy()))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        writer.add_tensor(gguf_name(name), permute(data, heads) if permuted and heads else data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    model.save_pretrained(folder / "exact")
    return folder / f"{family}.gguf", folder / "exact"


def check(file: Path, exact: Path, resolve: Resolve) -> LocalModel:
    """minisgl on the converted file against transformers on the exact weights and the config it was made from."""
    found = resolve(str(file))
    check_model(replace(found, path=exact), new_tokens=24)
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ARCH)
def test_every_architecture_gives_transformers_logits(
    family: str, tied: bool, tmp_path: Path, resolve: Resolve, tiny_tokens: list[str]
) -> None:
    file, exact = write_pair(tmp_path, family, Q.F32, tiny_tokens, tie_word_embeddings=tied)
    found = check(file, exact, resolve)
    want = {"Mistral": "LlamaForCausalLM"}.get(family, f"{family}ForCausalLM")  # its file says no more than a Llama's
    assert found.config["architectures"] == [want]


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1], ids=lambda q: q.name)
def test_every_quantization_is_dequantized(kind: Q, tmp_path: Path, resolve: Resolve, tiny_tokens: list[str]) -> None:
    family = "Llama" if kind in (Q.BF16, Q.Q4_0) else "Qwen3"
    found = check(*write_pair(tmp_path, family, kind, tiny_tokens), resolve)
    half = {Q.F16: "float16", Q.BF16: "bfloat16"}.get(kind)
    assert found.config["torch_dtype"] == (half or "float32")
    assert dtypes(found) == {"F32"} | (
        {{"float16": "F16", "bfloat16": "BF16"}[half]} if half else set()
    )  # norms are F32


def dtypes(model: LocalModel) -> set[str]:
    with safe_open(model.weights[0], "pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  no mapping


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_is_asked_for_is_what_quantized_weights_become(
    dtype: str, tmp_path: Path, resolve: Resolve, tiny_tokens: list[str]
) -> None:
    """Half the disk; the bits are those that torch rounds to."""
    import torch

    file, _ = write_pair(tmp_path, "Llama", Q.Q8_0, tiny_tokens)
    whole, half = resolve(str(file)), resolve(str(file), dtype=dtype)
    assert half.path != whole.path
    assert half.config["torch_dtype"] == dtype
    assert len(dtypes(half)) == 1
    with safe_open(whole.weights[0], "pt") as a, safe_open(half.weights[0], "pt") as b:
        for name in a.keys():  # noqa: SIM118
            assert torch.equal(a.get_tensor(name).to(getattr(torch, dtype)), b.get_tensor(name)), name


def test_bfloat16_is_rounded_as_torch_does() -> None:
    import torch

    values = np.random.default_rng(0).normal(0, 1e3, 4096).astype(np.float32)
    values[:6] = [0.0, -0.0, np.inf, -np.inf, 1e-42, 3.3895e38]
    ties = (np.arange(64, dtype=np.uint32) << 16 | 0x8000).view(np.float32) * np.float32(1)  # halfway between two
    for x in (values, ties):
        expected = torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bfloat16(x), expected)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda q: q.name)
def test_k_quants_are_dequantized(kind: Q, tmp_path: Path, resolve: Resolve, tiny_tokens: list[str]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    check(*write_pair(tmp_path, "Mistral", kind, tiny_tokens, **sizes), resolve)


def test_a_window_makes_it_a_mistral(tmp_path: Path, resolve: Resolve, tiny_tokens: list[str]) -> None:
    keys = {"add_sliding_window": 20}
    found = check(*write_pair(tmp_path, "Mistral", Q.F32, tiny_tokens, keys, sliding_window=20), resolve)
    assert found.config["architectures"] == ["MistralForCausalLM"]


def test_yarn_of_qwen2_is_kept_w3(tmp_path: Path, resolve: Resolve, tiny_tokens: list[str]) -> None:
    """As llama.cpp writes Qwen2.5's rope_scaling of factor 4 and original length 64."""
    scaling = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    keys = {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 4.0,
        "add_rope_scaling_orig_ctx_len": 64,
    }
    check(*write_pair(tmp_path, "Qwen2", Q.F32, tiny_tokens, keys, rope_parameters=scaling), resolve)
