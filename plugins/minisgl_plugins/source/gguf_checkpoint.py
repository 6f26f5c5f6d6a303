"""A GGUF file as a Hugging Face checkpoint: configuration, weights, tokenizer. Runs in the converter process.

Weights in float16 and bfloat16 stay as they are. Quantized and float32 ones become float32, which is exact, or a half precision
that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize

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


def unpermute(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of a q or k projection back in Hugging Face's order.

    llama.cpp interleaves the two halves of each head, because its rope turns neighbours: (head, pair, half) -> (head, half,
    pair). Args: weight: [heads * head_dim, hidden].
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)


def weights_of(reader: GGUFReader) -> list[ReaderTensor]:
    return [t for t in reader.tensors if t.name != ROPE_FREQS]


@dataclass(frozen=True, slots=True)
class Weight:
    """``data``: in torch's order of dimensions; of bfloat16, which numpy lacks, the bits as uint16. ``dtype``: torch's name."""

    data: npt.NDArray[Any]
    dtype: str


STORED = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
HALVES = tuple(STORED.values())


def hf_tensors(
    reader: GGUFReader, whose: Family, config: Mapping[str, Any], dtype: str
) -> Iterator[tuple[str, Weight]]:
    """(name, weight) in the file's order. Args: dtype: of those that are not in half precision in the file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if whose.permuted else {}
    for tensor in weights_of(reader):
        name, stem = hf_name(tensor.name, whose), tensor.name.split(".")[-2]
        weight = read_weight(tensor, dtype)
        yield name, replace(weight, data=unpermute(weight.data, heads[stem])) if stem in heads else weight


def dtype_of(tensor: ReaderTensor, dtype: str) -> str:
    """What it is written in."""
    return STORED.get(tensor.tensor_type, dtype)


def read_weight(tensor: ReaderTensor, dtype: str) -> Weight:
    """Raises: ModelError for a type that the gguf package cannot dequantize."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type
    if kind in STORED:
        bits = np.ascontiguousarray(tensor.data).view(np.float16 if kind == GGMLQuantizationType.F16 else np.uint16)
        return Weight(bits.reshape(shape), STORED[kind])
    try:
        found: F32 = dequantize(tensor.data, kind).reshape(shape).astype(np.float32, copy=False)
    except NotImplementedError as e:
        raise ModelError(f"tensor {tensor.name!r} has type {kind.name}, which is not supported: {e}") from e
    return Weight(_IN[dtype](found), dtype)


def bfloat16(weight: F32) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, of two as near the even one."""
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


_IN: dict[str, Callable[[F32], npt.NDArray[Any]]] = {
    "float32": lambda w: w,
    "float16": lambda w: w.astype(np.float16),
    "bfloat16": bfloat16,
}


def write_weights(
    reader: GGUFReader,
    whose: Family,
    config: Mapping[str, Any],
    target: Path,
    report: Callable[[int, int], None],
    dtype: str = "float32",
) -> None:
    """model.safetensors, or shards with an index: at most ``SHARD_BYTES`` and one tensor are in memory."""
    sizes = [int(np.prod(t.shape)) * (2 if dtype_of(t, dtype) in HALVES else 4) for t in weights_of(reader)]
    total, done = sum(sizes), 0
    shards: list[list[str]] = []
    held: dict[str, Weight] = {}

    def flush() -> None:
        write_safetensors(target / f"shard-{len(shards)}.safetensors", held)
        shards.append(list(held))
        held.clear()

    for (name, weight), size in zip(hf_tensors(reader, whose, config, dtype), sizes, strict=True):
        if held and sum(w.data.nbytes for w in held.values()) + size > SHARD_BYTES:
            flush()
        held[name] = weight
        done += size
        report(done, total)
    flush()
    _name_shards(target, shards, total)


SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_safetensors(file: Path, weights: Mapping[str, Weight]) -> None:
    """As safetensors itself writes it (its README has the format), which would copy all weights, and has no bfloat16 of numpy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, w in weights.items():
        place = [at, at + w.data.nbytes]
        header[name] = {"dtype": SAFETENSORS[w.dtype], "shape": w.data.shape, "data_offsets": place}
        at = place[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for w in weights.values():
            np.ascontiguousarray(w.data).tofile(out)


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


def write_checkpoint(source: Path, target: Path, report: Callable[[int, int], None], dtype: str = "float32") -> None:
    """Make the folder ``target`` from the file ``source``. ``dtype``: see ``hf_tensors``. Raises: ModelError."""
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
    config["torch_dtype"] = dtype_of(embedding, dtype)
    target.mkdir()
    write_tokenizer(meta, target)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    (target / "generation_config.json").write_text(json.dumps(generation, indent=1))
    write_weights(reader, family(meta), config, target, report, dtype)
