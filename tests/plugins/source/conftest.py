"""Small GGUF files, written with the gguf package, and model sources for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from minisgl.base.types import LocalModel
from minisgl.config.schema import ModelSettings, Settings
from minisgl.plugin.registry import Registry
from minisgl.text.resolve import resolve_model

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*BYTES, *(m.replace(" ", "") for m in MERGES), "<s>", "</s>", "<turn>", "<tool>"]
TYPES = [1] * (len(TOKENS) - 4) + [3, 3, 3, 4]


def permuted(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """What llama.cpp's converter does to q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def hf_weights(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of a small llama in Hugging Face's names and order."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(0, 0.05, shape).astype(np.float32)

    found = {
        "model.embed_tokens": draw(len(TOKENS), HIDDEN),
        "model.norm": draw(HIDDEN),
        "lm_head": draw(len(TOKENS), HIDDEN),
    }
    for i in range(LAYERS):
        found |= {
            f"model.layers.{i}.input_layernorm": draw(HIDDEN),
            f"model.layers.{i}.self_attn.q_proj": draw(HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj": draw(HIDDEN, HEADS * HEAD_DIM),
            f"model.layers.{i}.post_attention_layernorm": draw(HIDDEN),
            f"model.layers.{i}.mlp.gate_proj": draw(INNER, HIDDEN),
            f"model.layers.{i}.mlp.up_proj": draw(INNER, HIDDEN),
            f"model.layers.{i}.mlp.down_proj": draw(HIDDEN, INNER),
        }
    return {f"{k}.weight": v for k, v in found.items()}


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def write_gguf(path: Path, change: Mapping[str, Any] = {}, extra: tuple[str, ...] = (), seed: int = 0) -> Path:
    """A small llama. ``change``: keys to set, or to leave out with None. ``extra``: names of further tensors."""
    arch = change.get("general.architecture", "llama")
    writer = GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 500.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": TOKENS.index("<s>"),
        "tokenizer.ggml.eos_token_id": TOKENS.index("</s>"),
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    for key, value in (keys | {k: v for k, v in change.items() if k != "general.architecture"}).items():
        add(writer, key, value)
    for name, weight in hf_weights(seed).items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        writer.add_tensor(gguf_name(name), permuted(weight, heads) if heads else weight)
    for name in extra:
        writer.add_tensor(name, np.zeros((4,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``write_gguf`` into a file of this test."""
    return lambda name="tiny.gguf", **kw: write_gguf(tmp_path / name, **kw)


@pytest.fixture
def tiny_weights() -> dict[str, npt.NDArray[np.float32]]:
    """The weights in it, in Hugging Face's names and order."""
    return hf_weights()


@pytest.fixture
def tiny_tokens() -> list[str]:
    return TOKENS


@pytest.fixture
def resolve(tmp_path: Path) -> Callable[..., LocalModel]:
    """Resolve a reference with a cache of this test's own."""

    def run(ref: str, weights: bool = True, **model: Any) -> LocalModel:
        settings = Settings(model=ModelSettings(path=ref, **{"cache_dir": tmp_path / "cache", **model}))
        return resolve_model(settings, Registry.scan(), weights=weights)

    return run
