"""What each id stands for in bytes, for the tokenizers where that does not depend on its neighbours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.api import gpt2_alphabet

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space
_SHRINK = 4  # most characters that canonical composition (NFC) makes one


@dataclass(frozen=True, slots=True)
class ByteTable:
    """``every``: bytes by id. ``plain``: the same with special tokens empty. ``whole``: a whole text is these bytes joined;
    else (SentencePiece) its leading space is cut, which a continuation of a prompt must keep."""

    every: tuple[bytes, ...]
    plain: tuple[bytes, ...]
    whole: bool


def byte_table(spec: Mapping[str, Any], vocab: Mapping[str, int]) -> ByteTable | None:
    """Args: spec: tokenizer.json. vocab: token -> id, added tokens included.

    Returns: None if an id's text depends on its neighbours (WordPiece, ...) or the decoder is not known here.
    """
    kinds = _decoders(spec.get("decoder"))
    if kinds == ["ByteLevel"]:
        alphabet, fallback, whole = gpt2_alphabet(), False, True
    elif kinds and set(kinds) <= {"Space", "ByteFallback", "Fuse", "StripFirst"} and "Space" in kinds:
        alphabet, fallback, whole = None, "ByteFallback" in kinds, "StripFirst" not in kinds
    else:
        return None
    added = {t["content"]: t for t in spec.get("added_tokens", ())}
    every = [b""] * (max(vocab.values(), default=-1) + 1)
    plain = list(every)
    for token, i in vocab.items():
        data = token.encode() if token in added else _token_bytes(token, alphabet, fallback)
        every[i] = data
        plain[i] = b"" if added.get(token, {}).get("special") else data
    return ByteTable(tuple(every), tuple(plain), whole)


def _token_bytes(token: str, alphabet: dict[str, int] | None, fallback: bool) -> bytes:
    if alphabet is not None:
        try:
            return bytes([alphabet[c] for c in token])
        except KeyError:  # not written in the alphabet: it stands for itself
            return token.encode()
    if fallback and (match := _BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _decoders(decoder: Mapping[str, Any] | None) -> list[str]:
    """The decoder's steps by name; those that matter here renamed to what they do, unknown ones kept."""
    if decoder is None:
        return []
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [_step(s) for s in steps]


def _step(step: Mapping[str, Any]) -> str:
    kind = str(step["type"])
    if kind == "Replace" and step.get("pattern") == {"String": _SPACE} and step.get("content") == " ":
        return "Space"
    if kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0):
        return "StripFirst"
    return kind


def longest_chars(spec: Mapping[str, Any], table: ByteTable | None) -> int | None:
    """Most characters that one id can stand for, None where there is no bound. Characters whose bytes the vocabulary lacks
    count as well, though a tokenizer drops them."""
    if table is None or any(t.get("lstrip") or t.get("rstrip") for t in spec.get("added_tokens", ())):
        return None
    normalizer = spec.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    kinds = {str(s["type"]) for s in steps}
    if not kinds <= {"NFC", "Prepend", "Replace"} or any(
        s["type"] == "Replace" and s.get("pattern") != {"String": " "} for s in steps
    ):
        return None
    if spec.get("model", {}).get("type") != "BPE" or (not table.whole and not spec["model"].get("byte_fallback")):
        return None
    return max(map(len, table.every), default=1) * (_SHRINK if "NFC" in kinds else 1)
