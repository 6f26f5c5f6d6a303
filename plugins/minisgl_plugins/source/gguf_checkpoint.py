"""A GGUF file as a Hugging Face checkpoint: configuration, weights in float32, tokenizer. Runs in the converter process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file

from minisgl.api import ModelError

from .gguf_tokenizer import write_tokenizer

F32 = npt.NDArray[np.float32]
SHARD_BYTES = 4 << 30
ROPE_FREQS = "rope_freqs.weight"

# llama.cpp's names, by what stands between "blk.N." and ".weight".
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """All key-value pairs, and ``tensors``: names of the tensors."""
    found: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    return found | {"tensors": frozenset(t.name for t in reader.tensors)}


def hf_config(meta: Mapping[str, Any], embedding_rows: int) -> dict[str, Any]:
    """config.json of a llama architecture. Raises: ModelError for what it cannot say."""
    arch = meta.get("general.architecture")
    if arch != "llama":
        raise ModelError(f"GGUF architecture {arch!r} is not supported; supported: 'llama'")
    if meta.get("llama.expert_count", 0):
        raise ModelError(
            "GGUF architecture 'llama' with experts (Mixtral) is not supported; supported: 'llama' without"
        )

    def need(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise ModelError(f"the file lacks the key llama.{key}")
        return meta[f"llama.{key}"]

    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    head_dim = int(meta.get("llama.attention.key_length", hidden // heads))
    if (rotary := meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(f"llama.rope.dimension_count = {rotary} of {head_dim}: partly rotated heads are not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(meta.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": embedding_rows,
        "tie_word_embeddings": "output.weight" not in meta["tensors"],
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    if (scaling := _rope_scaling(meta)) is not None:
        config["rope_scaling"] = scaling
    return config | special_ids(meta)


def _short(value: float) -> float:
    """A float32 as its author wrote it: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = meta.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(meta["llama.rope.scaling.factor"])}
    raise ModelError(f"llama.rope.scaling.type = {kind!r} is not supported; supported: none, linear")


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


def special_ids(meta: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad ids as config.json has them; eos is a list if a turn or message ends with another token."""
    ids: dict[str, Any] = {k: meta.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding", "eot", "eom")}
    ends = sorted({int(ids[k]) for k in ("eos", "eot", "eom") if ids[k] is not None})
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids["padding"],
    }
    return {k: v if isinstance(v, list) else int(v) for k, v in found.items() if v is not None and v != []}


def hf_name(name: str) -> str:
    """llama.cpp's tensor name in Hugging Face's words. Raises: ModelError for one that has none here."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in TOP:
        return f"{TOP[stem]}.weight"
    parts = stem.split(".")
    if kind == "weight" and len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    raise ModelError(f"tensor {name!r} has no place in a llama model here; the file may need a newer minisgl")


def unpermute(weight: F32, heads: int) -> F32:
    """Rows of a q or k projection back in Hugging Face's order.

    llama.cpp interleaves the two halves of each head, because its rope turns neighbours: (head, pair, half) -> (head, half,
    pair). Args: weight: [heads * head_dim, hidden].
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)


def weights_of(reader: GGUFReader) -> list[ReaderTensor]:
    return [t for t in reader.tensors if t.name != ROPE_FREQS]


def hf_tensors(reader: GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    """(name, float32 weight), dequantized exactly, in the file's order."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in weights_of(reader):
        shape = tuple(int(n) for n in reversed(tensor.shape))
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32, copy=False)
        stem = tensor.name.split(".")[-2]
        yield hf_name(tensor.name), unpermute(weight, heads[stem]) if stem in heads else weight


def write_weights(
    reader: GGUFReader, config: Mapping[str, Any], target: Path, report: Callable[[int, int], None]
) -> None:
    """model.safetensors, or shards with an index: at most ``SHARD_BYTES`` and one tensor are in memory."""
    sizes = [int(np.prod(t.shape)) * 4 for t in weights_of(reader)]
    total, done = sum(sizes), 0
    shards: list[list[str]] = []
    held: dict[str, F32] = {}

    def flush() -> None:
        save_file(held, target / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for (name, weight), size in zip(hf_tensors(reader, config), sizes, strict=True):
        if held and sum(w.nbytes for w in held.values()) + size > SHARD_BYTES:
            flush()
        held[name] = weight
        done += size
        report(done, total)
    flush()
    _name_shards(target, shards, total)


def _name_shards(target: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (target / "shard-0.safetensors").rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"shard-{i}.safetensors").rename(target / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_checkpoint(source: Path, target: Path, report: Callable[[int, int], None]) -> None:
    """Make the folder ``target`` from the file ``source``. Raises: ModelError."""
    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError) as e:
        raise ModelError(f"it is not a readable GGUF file; is the download complete? ({e})") from e
    meta = read_metadata(reader)
    embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelError("it has no tensor token_embd.weight, so it is not a language model")
    config = hf_config(meta, int(embedding.shape[1]))
    for tensor in reader.tensors:
        if tensor.name == ROPE_FREQS:
            config["rope_scaling"] = llama3_scaling(np.asarray(tensor.data, np.float32), config["rope_theta"])
    target.mkdir()
    write_tokenizer(meta, target)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    (target / "generation_config.json").write_text(json.dumps(generation, indent=1))
    write_weights(reader, config, target, report)
