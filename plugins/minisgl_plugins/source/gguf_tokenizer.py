"""The tokenizer inside a GGUF file as tokenizer.json: byte-level BPE (``tokenizer.ggml.model = gpt2``) and SentencePiece BPE
(``llama``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from minisgl.api import ModelError

from .gguf_words import words_of
from .spm import TokenType, build_spm


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Raises: ModelError for a kind of tokenizer that is not known here."""
    kind = meta.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelError(
            f"tokenizer.ggml.model = {kind!r} is not supported; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece). "
            "Take the model's safetensors files instead"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"the vocabulary has {len(tokens) - len(set(tokens))} tokens twice")
    tokenizer = _BUILDERS[kind](tokens, meta)
    tokenizer.add_tokens(_added(tokens, meta.get("tokenizer.ggml.token_type", ())))
    _add_bos(tokenizer, tokens, meta)
    return tokenizer


def _byte_level(tokens: list[str], meta: Mapping[str, Any]) -> Tokenizer:
    words = words_of(meta)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=words.whole))
    tokenizer.pre_tokenizer = words.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if words.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(tokens: list[str], meta: Mapping[str, Any]) -> Tokenizer:
    for key in ("scores", "token_type"):
        if len(meta.get(f"tokenizer.ggml.{key}", ())) != len(tokens):
            raise ModelError(
                f"tokenizer.ggml.{key} is missing, or not of as many tokens as the vocabulary, {len(tokens)}"
            )
    scores, types = meta["tokenizer.ggml.scores"], meta["tokenizer.ggml.token_type"]
    unknown = int(meta["tokenizer.ggml.unknown_token_id"])
    return build_spm(tokens, scores, types, unknown, bool(meta.get("tokenizer.ggml.add_space_prefix", True)))


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
SPM_IDS = {  # llama.cpp's, of files that do not say
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def _added(tokens: list[str], types: Any) -> list[AddedToken]:
    """Tokens that are found in text before it is cut into words; control tokens are special."""
    wanted = {TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN}
    return [
        AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in wanted
    ]


def _add_bos(tokenizer: Tokenizer, tokens: list[str], meta: Mapping[str, Any]) -> None:
    """A post-processor that puts BOS first, if the file says so."""
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if adds_bos(meta) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], int(bos))]
        )


def adds_bos(meta: Mapping[str, Any]) -> bool:
    """``tokenizer.ggml.add_bos_token``; without it llama.cpp's rule: Llama's two kinds and tekken have it.

    ``add_eos_token`` is for training and embeddings: a prompt that is to be continued does not end with EOS.
    """
    said = meta.get("tokenizer.ggml.add_bos_token")
    return bool(said) if said is not None else meta["tokenizer.ggml.model"] == "llama" or words_of(meta).bos


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta.get(f"{meta.get('general.architecture')}.context_length"),
        "add_bos_token": adds_bos(meta),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config


def write_tokenizer(meta: Mapping[str, Any], target: Path) -> None:
    build_tokenizer(meta).save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(meta), indent=1))
