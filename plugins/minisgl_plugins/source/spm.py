"""SentencePiece BPE as the tokenizers library has it: pieces with scores become a vocabulary with merges.

SentencePiece joins, again and again, the two neighbours whose union has the best score (sentencepiece's bpe_model.cc). The
library joins by a list of merges, best first: every way of making a piece of two others, ordered by the piece's score, is
such a list. What no piece stands for is spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

SPACE = "\u2581"  # how a piece writes a space


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type`` of llama.h, which are those of sentencepiece_model.proto."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_spm(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: int, prefix: bool
) -> Tokenizer:
    """A tokenizer without its added tokens, which the caller knows.

    Args: pieces: by id; no two are alike. unknown: id of what stands for text without pieces and bytes. prefix: a space is put
    before a text, and before what follows an added token, as llama.cpp does and Llama's own tokenizer.json.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = BPE(
        vocab=vocab,
        merges=merges_of(pieces, scores, types),
        unk_token=pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape] if prefix else [escape])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_of(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of normal pieces that make a normal piece, the best piece first; of equal ones the one with the lower id."""
    normal = {p: (-s, i) for i, (p, s, t) in enumerate(zip(pieces, scores, types)) if t == TokenType.NORMAL}
    found = [
        (rank, normal[left], piece[:cut], piece[cut:])
        for piece, rank in normal.items()
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in normal and piece[cut:] in normal
    ]
    found.sort(key=lambda m: m[:2])
    return [(left, right) for _, _, left, right in found]
