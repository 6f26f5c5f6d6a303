"""What a GGUF file's metadata says of a model, as config.json; and whose tensors the file has, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.api import ModelError

from .spm import TokenType

F32 = npt.NDArray[np.float32]
ROPE_FREQS = "rope_freqs.weight"

# llama.cpp's names, by what stands between "blk.N." and the kind.
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {f"attn_{p}.bias": f"self_attn.{p}_proj.bias" for p in "qkv"}
_QK_NORM = {f"attn_{p}_norm.weight": f"self_attn.{p}_norm.weight" for p in "qk"}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of llama.cpp. ``permuted``: its q and k are in the order of llama.cpp's first rope (``unpermute``).
    ``layer``: names of a layer's tensors, llama.cpp's to Hugging Face's. ``config``: what its config.json says besides."""

    architecture: str
    model_type: str
    permuted: bool
    layer: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


_PLAIN = {"attention_bias": False, "mlp_bias": False}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", True, _LAYER, _PLAIN),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", False, _LAYER | _QKV_BIAS, _NO_WINDOW),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", False, _LAYER | _QK_NORM, {"attention_bias": False, **_NO_WINDOW}),
}


def family(meta: Mapping[str, Any]) -> Family:
    """Raises: ModelError naming an architecture that is not known."""
    arch = meta.get("general.architecture")
    if arch not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise ModelError(
            f"GGUF architecture {arch!r} is not supported; supported: {known} ('llama' is also Mistral's). "
            "Take the model's safetensors files instead"
        )
    return FAMILIES[str(arch)]


def hf_name(name: str, family: Family) -> str:
    """llama.cpp's tensor name in Hugging Face's words. Raises: ModelError for one that has none here."""
    if name in TOP:
        return TOP[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if block == "blk" and layer.isdecimal() and rest in family.layer:
        return f"model.layers.{layer}.{family.layer[rest]}"
    raise ModelError(
        f"tensor {name!r} has no place in a {family.model_type} model here; the file may need a newer minisgl"
    )


def hf_config(meta: Mapping[str, Any], embedding_rows: int) -> dict[str, Any]:
    """config.json of a known architecture. Raises: ModelError for what it cannot say."""
    found, arch = family(meta), meta["general.architecture"]
    if (parts := int(meta.get("split.count", 1))) > 1:
        raise ModelError(f"it is one of {parts} parts of a model; join them with llama.cpp's: llama-gguf-split --merge")
    if meta.get(f"{arch}.expert_count", 0):
        raise ModelError(f"GGUF architecture {arch!r} with experts (Mixtral) is not supported")

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in meta:
            raise ModelError(f"the file lacks the key {arch}.{key}")
        return meta[f"{arch}.{key}"]

    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    config = {
        "architectures": [found.architecture],
        "model_type": found.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{arch}.attention.head_count_kv", heads)),
        "head_dim": _head_dim(meta, arch, hidden // heads),
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        "vocab_size": embedding_rows,
        "tie_word_embeddings": "output.weight" not in meta["tensors"],
    }
    if (scaling := _rope_scaling(meta, arch)) is not None:
        config["rope_scaling"] = scaling
    return config | dict(found.config) | _window(meta, arch) | special_ids(meta)


def _head_dim(meta: Mapping[str, Any], arch: str, usual: int) -> int:
    size = int(meta.get(f"{arch}.attention.key_length", usual))
    if (values := meta.get(f"{arch}.attention.value_length", size)) != size:
        raise ModelError(f"{arch}.attention.value_length = {values} is not key_length = {size}; that is not supported")
    if (rotary := meta.get(f"{arch}.rope.dimension_count", size)) != size:
        raise ModelError(f"{arch}.rope.dimension_count = {rotary} of {size}: partly rotated heads are not supported")
    return size


def _window(meta: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """A window is Mistral's, whose other facts are llama's; llama.cpp has none for the others here."""
    size = meta.get(f"{arch}.attention.sliding_window")
    if not size:
        return {}
    if arch != "llama":
        raise ModelError(f"{arch}.attention.sliding_window = {size} is not supported; only llama's is")
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": int(size)}


def _short(value: float) -> float:
    """A float32 as its author wrote it: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(meta: Mapping[str, Any], arch: str) -> dict[str, Any] | None:
    given = {k.rpartition(".")[2]: v for k, v in meta.items() if k.startswith(f"{arch}.rope.scaling.")}
    kind = given.pop("type", "none")
    given.pop("finetuned", None)  # says how the model was trained
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{arch}.rope.scaling.type = {kind!r} is not supported; supported: none, linear, yarn")
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    if kind == "yarn":
        names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    unknown = sorted(given.keys() - names)
    if unknown or "factor" not in given:
        raise ModelError(
            f"{arch}.rope.scaling of type {kind!r} "
            + (f"has {unknown[0]!r}, which is not supported" if unknown else "has no factor")
        )
    scaling: dict[str, Any] = {"rope_type": kind}
    return scaling | {names[k]: int(v) if isinstance(v, int) else _short(v) for k, v in given.items()}


def llama3_scaling(factors: F32, theta: float) -> dict[str, Any]:
    """rope_scaling of Llama 3.1 and later, of which GGUF files keep only what it does to each frequency.

    Args: factors: [head_dim / 2], what the wavelengths are multiplied by. Raises: ModelError if no factor explains them.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, _llama3_factors(scaling, theta, 2 * len(factors)), rtol=1e-4):
        raise ModelError(f"{ROPE_FREQS} is not the scaled rope of Llama 3.1 or 3.2; another one is not supported")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Long wavelengths times ``factor``, short ones as they are, and between them by how often one fits the old context."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))


# Control tokens that end a turn or a text whatever the file's keys say, which often name one alone; llama.cpp has them too.
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")


def special_ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids as config.json has them; eos is a list if a turn or message ends with another token (A15)."""
    ids: dict[str, Any] = {k: meta.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding", "eot", "eom")}
    kinds = zip(meta.get("tokenizer.ggml.tokens", ()), meta.get("tokenizer.ggml.token_type", ()), strict=False)
    named = {i for i, (token, kind) in enumerate(kinds) if kind == TokenType.CONTROL and token in ENDS}
    ends = sorted({int(ids[k]) for k in ("eos", "eot", "eom") if ids[k] is not None} | named)
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids["padding"],
    }
    return {k: v if isinstance(v, list) else int(v) for k, v in found.items() if v is not None and v != []}
