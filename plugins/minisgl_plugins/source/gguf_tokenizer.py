"""The tokenizer inside a GGUF file as tokenizer.json. Byte-level BPE (``tokenizer.ggml.model = gpt2``) only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from minisgl.api import ModelError


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``; llama.h."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _split(pattern: str) -> Any:
    """Words by a pattern of the model's own, then bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _words(digits: str) -> str:
    """The pattern that GPT-4, Llama 3 and Qwen share but for how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    """GPT-2's words, after every digit was split off alone."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# How text is cut into words before merging, by ``tokenizer.ggml.pre``. A wrong one gives wrong ids without an error, so an
# unknown one is refused.
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_words(r"\p{N}{1,3}")),
    "qwen2": lambda: _split(_words(r"\p{N}")),
}
WHOLE_WORDS = {"llama-bpe"}  # a word that is in the vocabulary is taken whole, whatever the merges say
NFC = {"qwen2"}


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Raises: ModelError for a kind of tokenizer that is not known here."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(f"tokenizer.ggml.model = {kind!r} is not supported; supported: 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"tokenizer.ggml.pre = {pre!r} is not known; known: {', '.join(map(repr, PRE_TOKENIZERS))}")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError(f"the vocabulary has {len(tokens) - len(vocab)} tokens twice")
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre in NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(_added(tokens, meta.get("tokenizer.ggml.token_type", ())))
    _add_bos(tokenizer, tokens, meta)
    return tokenizer


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
    """``tokenizer.ggml.add_bos_token``; without it llama.cpp adds BOS for Llama 3 alone, of the kinds known here."""
    return bool(meta.get("tokenizer.ggml.add_bos_token", meta.get("tokenizer.ggml.pre") == "llama-bpe"))


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
