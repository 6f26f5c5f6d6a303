"""A GGUF file as a Hugging Face checkpoint: configuration, weights in float32, tokenizer. Runs in the converter process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file

from minisgl.api import ModelError

from .gguf_config import F32, ROPE_FREQS, Family, family, hf_config, hf_name, llama3_scaling
from .gguf_tokenizer import SPM_IDS, write_tokenizer

SHARD_BYTES = 4 << 30


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """All key-value pairs, and ``tensors``: names of the tensors."""
    found: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    if found.get("tokenizer.ggml.model") == "llama":
        found = SPM_IDS | found
    return found | {"tensors": frozenset(t.name for t in reader.tensors)}


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


def hf_tensors(reader: GGUFReader, whose: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, F32]]:
    """(name, float32 weight), dequantized exactly, in the file's order."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if whose.permuted else {}
    for tensor in weights_of(reader):
        name, stem = hf_name(tensor.name, whose), tensor.name.split(".")[-2]
        weight = float32(tensor)
        yield name, unpermute(weight, heads[stem]) if stem in heads else weight


def float32(tensor: ReaderTensor) -> F32:
    """The tensor in torch's order of dimensions. Raises: ModelError for a type that the gguf package cannot dequantize."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    try:
        found: F32 = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32, copy=False)
    except NotImplementedError as e:
        raise ModelError(
            f"tensor {tensor.name!r} has type {tensor.tensor_type.name}, which is not supported: {e}"
        ) from e
    return found


def write_weights(
    reader: GGUFReader, whose: Family, config: Mapping[str, Any], target: Path, report: Callable[[int, int], None]
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

    for (name, weight), size in zip(hf_tensors(reader, whose, config), sizes, strict=True):
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
    write_weights(reader, family(meta), config, target, report)
