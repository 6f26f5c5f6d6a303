"""How many ids a tokenizer has: the true vocabulary, where the embedding of a model is padded beyond it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def tokenizer_ids(folder: Path | None) -> int | None:
    """The largest id of tokenizer.json and tokenizer_config.json in ``folder``, plus one. None if that cannot be told: there is
    no tokenizer, or one of another format."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        ids = [*_tokenizer(folder / "tokenizer.json"), *_config(folder / "tokenizer_config.json")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # whoever uses the tokenizer reports it
    return max(ids) + 1 if ids else None


def _tokenizer(file: Path) -> Iterable[int]:
    found = json.loads(file.read_text(encoding="utf-8"))
    vocab: Any = found["model"]["vocab"]  # {token: id}, or of Unigram [[token, score], ...]
    yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    yield from (token["id"] for token in found.get("added_tokens") or ())


def _config(file: Path) -> Iterable[int]:
    if file.is_file():
        yield from map(int, json.loads(file.read_text(encoding="utf-8")).get("added_tokens_decoder") or ())
