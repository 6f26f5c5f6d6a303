"""GGUF files with a SentencePiece vocabulary, as most published Llama 2 and Mistral files have: ids are those of sentencepiece.

tests/data/sentencepiece.json has the pieces of a small model that sentencepiece trained, and the ids that it gave some texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.types import LocalModel
from minisgl.text.tokenizer import TokenizerContext
from minisgl_plugins.source.spm import merges_of
from minisgl_plugins.tokenizer.hf import HFTokenizer

MADE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "sentencepiece.json").read_text())
PIECES: list[str] = MADE["pieces"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"  # as Llama 2 and Mistral
Resolve = Callable[..., LocalModel]


@pytest.fixture
def spm_gguf(tiny_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """A file with this vocabulary, whose ids of special tokens are not said; ``change``: further keys."""
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": MADE["scores"],
        "tokenizer.ggml.token_type": MADE["types"],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.chat_template": TEMPLATE,
    }
    return lambda **change: tiny_gguf(change=keys | {f"tokenizer.ggml.{k}": v for k, v in change.items()})


def tokenizer_of(path: Path, resolve: Resolve) -> HFTokenizer:
    folder = resolve(str(path)).tokenizer_dir
    assert folder is not None
    return HFTokenizer(TokenizerContext(HFTokenizer.Settings(), folder))


def test_ids_are_those_of_sentencepiece_and_decode_to_the_text(spm_gguf: Callable[..., Path], resolve: Resolve) -> None:
    tokenizer = tokenizer_of(spm_gguf(), resolve)
    for text, ids in MADE["ids"].items():
        assert tokenizer.encode(text, False).tolist() == ids, text
        assert tokenizer.decode(ids, False) == text.replace(
            "\u2581", " "
        )  # that character is a space, for sentencepiece too
    assert (tokenizer.bos, tokenizer.eos) == (PIECES.index("<s>"), frozenset({PIECES.index("</s>")}))


def test_ids_are_those_of_transformers_reading_the_file(spm_gguf: Callable[..., Path], resolve: Resolve) -> None:
    from transformers import AutoTokenizer

    path = spm_gguf()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = tokenizer_of(path, resolve)
    for text in MADE["ids"]:
        if not text.startswith(
            (" ", "\u2581")
        ):  # transformers then puts no space before it, as Llama 2 and llama.cpp do
            assert ours.encode(text, False).tolist() == theirs(text, add_special_tokens=False)["input_ids"], text


def test_what_decodes_as_it_comes_keeps_spaces_and_joins_bytes(spm_gguf: Callable[..., Path], resolve: Resolve) -> None:
    """The first space belongs to a continuation of a prompt; a character in several byte tokens comes whole."""
    tokenizer = tokenizer_of(spm_gguf(), resolve)
    decoder = tokenizer.decoder(True)
    ids = [PIECES.index("\u2581the"), *(PIECES.index(f"<0x{b:02X}>") for b in "é".encode())]
    assert [decoder.push([i]) for i in ids] == [" the", "", "é"]


@pytest.mark.parametrize("said", [True, False, None])
def test_one_bos_before_a_prompt_and_in_a_chat_a14(
    said: bool | None, spm_gguf: Callable[..., Path], resolve: Resolve
) -> None:
    """Without the key llama.cpp adds it."""
    tokenizer = tokenizer_of(spm_gguf(add_bos_token=said), resolve)
    hello, bos = MADE["ids"]["Hello world"], PIECES.index("<s>")
    assert tokenizer.encode("Hello world", True).tolist() == ([] if said is False else [bos]) + hello
    text = tokenizer.render([{"role": "user", "content": "x"}])
    assert text == "<s>[INST] x [/INST]"
    assert tokenizer.encode(text, False).tolist().count(bos) == 1


def test_text_after_an_added_token_begins_with_a_space_too(spm_gguf: Callable[..., Path], resolve: Resolve) -> None:
    """As in llama.cpp (add_space_prefix after a special token) and in the tokenizer.json of Llama 2."""
    tokenizer, x = tokenizer_of(spm_gguf(), resolve), MADE["ids"]["x"]
    assert tokenizer.encode("x<turn>x<tool>x", False).tolist() == [
        *x,
        PIECES.index("<turn>"),
        *x,
        PIECES.index("<tool>"),
        *x,
    ]


def test_no_space_is_put_before_a_text_if_the_file_says_so(spm_gguf: Callable[..., Path], resolve: Resolve) -> None:
    tokenizer = tokenizer_of(spm_gguf(add_space_prefix=False), resolve)
    ids = MADE["ids"]["Hello world"]
    assert tokenizer.encode(" Hello world", False).tolist() == ids
    assert tokenizer.decode(ids, False) == " Hello world"
    assert tokenizer.encode("he", False).tolist() == [PIECES.index("he")]


def test_merges_are_ordered_by_score_and_pieces_that_are_not_normal_have_none() -> None:
    pieces, scores, types = ["a", "b", "ab", "abb", "ba", "c"], [-5.0, -6.0, -2.0, -1.0, -2.0, 0.0], [1, 1, 1, 1, 1, 3]
    assert merges_of(pieces, scores, types) == [("ab", "b"), ("a", "b"), ("b", "a")]
    assert merges_of(pieces, scores, [1, 1, 4, 1, 1, 3]) == [("b", "a")]
