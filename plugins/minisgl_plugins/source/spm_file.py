"""SentencePiece's own file, tokenizer.model, as tokenizer.json: for folders of Llama 2 and Mistral that have nothing newer.

The file is a protocol buffer (sentencepiece_model.proto); the few fields that matter are read here, so that neither sentencepiece
nor protobuf is needed.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from minisgl.api import ModelError

from .spm import SPACE, TokenType, build_spm

BPE = 2  # of TrainerSpec.model_type
BESIDE = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json")


@dataclass(slots=True)
class SpmModel:
    """``pieces``, ``scores``, ``types``: by id. ``kind``: TrainerSpec.model_type. ``charsmap``: whether text is normalized by a table.
    ``prefix``: add_dummy_prefix. ``squeeze``: remove_extra_whitespaces."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int = 1
    unknown: int = 0
    bos: int = 1
    eos: int = 2
    charsmap: bool = False
    prefix: bool = True
    squeeze: bool = True


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: bytes, integers, floats. Raises: ValueError if it is none."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("not a protocol buffer")
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5) or number == 0:
            raise ValueError("not a protocol buffer")
        size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        part, at = data[at : at + size], at + size
        if len(part) != size:
            raise ValueError("the file ends within a field")
        yield number, struct.unpack("<f", part)[0] if wire == 5 else part


def read_spm(data: bytes) -> SpmModel:
    """Raises: ValueError if ``data`` is not such a file."""
    model = SpmModel([], [], [])
    for number, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            piece = dict(fields(value))
            model.pieces.append(piece[1].decode())
            model.scores.append(float(piece.get(2, 0.0)))
            model.types.append(int(piece.get(3, TokenType.NORMAL)))
        elif number == 2:
            trainer = dict(fields(value))
            model.kind = trainer.get(3, 1)
            model.unknown, model.bos, model.eos = (trainer.get(n, d) for n, d in ((40, 0), (41, 1), (42, 2)))
        elif number == 3:
            normalizer = dict(fields(value))
            model.charsmap = bool(normalizer.get(2))
            model.prefix, model.squeeze = bool(normalizer.get(3, True)), bool(normalizer.get(4, True))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def convert_spm(model: SpmModel, source: Path, target: Path) -> None:
    """Write the folder ``target`` from the files of ``source``. Raises: ModelError for a model that is not BPE as Llama's is."""
    if model.kind != BPE or model.charsmap or model.squeeze:
        what = "unigram" if model.kind != BPE else "a normalization of its own"
        raise ModelError(f"tokenizer.model of this kind ({what}) is not supported; a tokenizer.json of the model is")
    config = _json(source / "tokenizer_config.json")
    added = _added(model, _json(source / "added_tokens.json"), config.get("added_tokens_decoder", {}))
    tokenizer = build_spm(model.pieces, model.scores, model.types, model.unknown, model.prefix)
    if model.prefix and config.get("legacy") is False:  # what follows an added token has no space put before
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    _add(tokenizer, added)
    names = {"bos_token": model.bos, "eos_token": model.eos, "unk_token": model.unknown}
    own = {k: model.pieces[i] for k, i in names.items() if 0 <= i < len(model.pieces)}
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({**own, "add_bos_token": True, **config}, indent=1))
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copy(source / name, target)


def _added(
    model: SpmModel, by_text: Mapping[str, int], by_id: Mapping[str, Mapping[str, Any]]
) -> dict[int, tuple[str, bool]]:
    """id -> (text, special) of what is found in text before all else; one that has a piece's id takes its place."""
    wanted = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    found = {
        i: (p, t != TokenType.USER_DEFINED)
        for i, (p, t) in enumerate(zip(model.pieces, model.types, strict=True))
        if t in wanted
    }
    found |= {int(i): (text, False) for text, i in by_text.items()}
    found |= {int(i): (str(t["content"]), bool(t.get("special"))) for i, t in by_id.items()}
    for i, (text, _) in found.items():
        if i < len(model.pieces):
            model.pieces[i] = text
    return found


def _add(tokenizer: Tokenizer, added: Mapping[int, tuple[str, bool]]) -> None:
    for i, (text, special) in sorted(added.items()):
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
        if tokenizer.token_to_id(text) != i:
            raise ModelError(f"the added token {text!r} has id {i}, which does not follow the ids before it")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON: {e}") from e
    return found if isinstance(found, dict) else {}
