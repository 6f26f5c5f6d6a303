"""Folders with SentencePiece's tokenizer.model and no tokenizer.json: ids are those that sentencepiece gave (tests/data)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.errors import ModelError
from minisgl.base.types import LocalModel
from minisgl.text.tokenizer import TokenizerContext
from minisgl_plugins.source.spm_file import convert_spm, read_spm
from minisgl_plugins.tokenizer.hf import HFTokenizer

DATA = Path(__file__).parents[2] / "data"
MADE: dict[str, Any] = json.loads((DATA / "sentencepiece.json").read_text())
Resolve = Callable[..., LocalModel]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(DATA / "sentencepiece.model", path / "tokenizer.model")
    return path


def load(folder: Path, resolve: Resolve) -> HFTokenizer:
    found = resolve(str(folder), weights=False).tokenizer_dir
    assert found is not None
    return HFTokenizer(TokenizerContext(HFTokenizer.Settings(), found))


def test_the_file_is_read_as_sentencepiece_reads_it() -> None:
    model = read_spm((DATA / "sentencepiece.model").read_bytes())
    assert (model.pieces, model.types) == (MADE["pieces"], MADE["types"])
    assert model.scores == MADE["scores"]
    assert (model.kind, model.unknown, model.bos, model.eos) == (2, 0, 1, 2)
    assert (model.charsmap, model.prefix, model.squeeze) == (False, True, False)


def test_ids_are_those_of_sentencepiece_with_one_bos_a14(folder: Path, resolve: Resolve) -> None:
    tokenizer = load(folder, resolve)
    for text, ids in MADE["ids"].items():
        assert tokenizer.encode(text, False).tolist() == ids, text
        assert tokenizer.encode(text, True).tolist() == [1, *ids]
    assert (tokenizer.bos, tokenizer.eos) == (1, frozenset({2}))


def test_added_tokens_chat_template_and_settings_are_those_of_the_folder(folder: Path, resolve: Resolve) -> None:
    n = len(MADE["pieces"])
    added = {
        str(n): {"content": "<|im_start|>", "special": True},
        str(n + 1): {"content": "<|im_end|>", "special": True},
    }
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "add_bos_token": False, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("<|im_start|>{{ messages[0].content }}<|im_end|>")
    tokenizer, x = load(folder, resolve), MADE["ids"]["x"]
    text = tokenizer.render([{"role": "user", "content": "Hello world"}])
    plain = tokenizer.encode(text, True).tolist()
    assert (plain[0], plain[-1]) == (n, n + 1)
    assert tokenizer.decode(plain, True) == "Hello world"
    assert tokenizer.eos == frozenset({n + 1})
    he = MADE["pieces"].index("he")  # not the piece with a space: legacy is off
    assert tokenizer.encode("x<|im_end|>he", False).tolist() == [*x, n + 1, he]


def test_added_tokens_whose_ids_leave_a_gap_are_refused(folder: Path, resolve: Resolve) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": len(MADE["pieces"]) + 5}))
    with pytest.raises(ModelError, match=r"added token '<pad>' has id 605"):
        load(folder, resolve)


@pytest.mark.parametrize("change", [{"kind": 1}, {"charsmap": True}, {"squeeze": True}])
def test_other_kinds_of_the_file_are_refused(change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    model = read_spm((folder / "tokenizer.model").read_bytes())
    for name, value in change.items():
        setattr(model, name, value)
    with pytest.raises(ModelError, match=r"tokenizer.model of this kind .* is not supported; a tokenizer.json"):
        convert_spm(model, folder, tmp_path / "new")


@pytest.mark.parametrize("data", [b"", b"\x00nonsense", b"IQ== 0\nIg== 1\n", b"\x0a\xff\x01short"])
def test_what_is_no_such_file_is_told_apart(data: bytes) -> None:
    """Among them the beginning of Llama 3's tokenizer.model, which is tiktoken's."""
    with pytest.raises(ValueError, match=r"protocol buffer|pieces|within a field"):
        read_spm(data)
