"""A folder in the layout of a Hugging Face checkpoint, as a LocalModel."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

from minisgl.api import LocalModel, ModelError

from .artifacts import Progress, build_once, convert

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
TOKENIZER_FILES = (  # what a conversion is made of
    "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_checkpoint(path: Path, ref: str, name: str, weights: bool, **more: Any) -> LocalModel:
    """``more``: further fields of LocalModel; ``tokenizer_dir`` is the folder itself unless it is given.

    Raises: ModelError naming the file that is missing or wrong.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model folder: it has no config.json.{_instead(path)}")
    if "tokenizer_dir" not in more:
        more["tokenizer_dir"] = path if (path / "tokenizer.json").is_file() else None
    return LocalModel(
        ref=ref,
        name=name,
        path=path,
        config=read_json(path / "config.json"),
        generation=read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {},
        weights=weight_files(path) if weights else (),
        **more,
    )


def _instead(path: Path) -> str:
    """What else is in the folder that may have been meant."""
    files = sorted(path.glob("*.gguf"))
    if files:
        return f" For its GGUF file give gguf:{files[0]}"
    nested = sorted(p.parent for p in path.glob("*/config.json"))
    return f" There is one in {nested[0]}" if nested else ""


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, expected an object")
    return found


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of one copy of the weights, never of two (fault M18: sharded and consolidated side by side).

    Raises: ModelError for files that are missing (an interrupted download), and for pickles, which run code when read.
    """
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / "model.safetensors").is_file():
        return (path / "model.safetensors",)
    found = sorted(f for f in path.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if len(found) == 1 and not _SHARD.fullmatch(found[0].name):
        return (found[0],)
    if found:
        return _numbered(path, found)
    raise ModelError(_no_weights(path))


def _indexed(path: Path) -> tuple[Path, ...]:
    names = read_json(path / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{path / INDEX} has no weight_map")
    files = sorted({str(n) for n in names.values()})
    if missing := [f for f in files if Path(f).name != f or not (path / f).is_file()]:
        tensor = next(t for t, f in names.items() if str(f) == missing[0])
        raise ModelError(
            f"{path} lacks {len(missing)} of {len(files)} weight files, the first is {missing[0]} (with tensor {tensor!r}): "
            "is the download complete?"
        )
    return tuple(path / f for f in files)


def _numbered(path: Path, found: list[Path]) -> tuple[Path, ...]:
    """Shards without an index: all of one set."""
    matches = [_SHARD.fullmatch(f.name) for f in found]
    sets = {(m[1], m[3]) if m else (f.name, "") for m, f in zip(matches, found, strict=True)}
    stem, total = min(sets)
    if len(sets) > 1 or not total:
        raise ModelError(
            f"{path} has several sets of weights and no {INDEX}: {', '.join(f.name for f in found[:5])}. Keep one of them"
        )
    if len(found) != int(total):
        raise ModelError(
            f"{path} has {len(found)} of {int(total)} files {stem}-*.safetensors: is the download complete?"
        )
    return tuple(found)


def _no_weights(path: Path) -> str:
    if list(path.glob("consolidated*.safetensors")):
        return f"{path} has only consolidated weights (Mistral's own names); take the files model*.safetensors of the model"
    pickles = [f.name for pattern in PICKLES for f in sorted(path.glob(pattern))]
    if pickles:
        return (
            f"{path} has no safetensors, only {pickles[0]}. Pickle files are refused because reading one runs code. Convert: "
            f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{path}')"
            f'.save_pretrained(NEW_FOLDER)"'
        )
    return f"{path} has a config.json but no *.safetensors: is the download complete?"


def tokenizer_folder(path: Path, cache: Path, progress: Progress) -> Path | None:
    """Where tokenizer.json is: the folder itself, or a conversion of its SentencePiece or BPE files, made once. None if the
    model has no tokenizer."""
    if (path / "tokenizer.json").is_file():
        return path
    files = [f for f in TOKENIZER_FILES if (path / f).is_file()]
    if "tokenizer.model" not in files and not {"vocab.json", "merges.txt"} <= set(files):
        return None
    digest = sha256()
    for file in files:
        digest.update(file.encode() + b"\0" + sha256((path / file).read_bytes()).digest())
    target = cache / "tokenizers" / digest.hexdigest()[:32]
    what = f"converting the tokenizer of {path.name}"
    return build_once(target, lambda new: convert("tokenizer", path, new, what, progress))
