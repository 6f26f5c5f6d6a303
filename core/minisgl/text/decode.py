"""Incremental detokenization: complete characters only, and joined pieces equal to the whole (fault A3)."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence

from minisgl.text.tokenizer import Decoder


def gpt2_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE vocabularies write for each byte -> that byte.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on (GPT-2's encoder.py).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class ByteDecoder(Decoder):
    """For vocabularies where each id is a fixed run of bytes. Ids outside ``table`` add nothing.

    O(bytes), whatever they are: invalid UTF-8 becomes one U+FFFD per maximal subpart, as soon as it is known to be invalid.
    """

    __slots__ = ("_table", "_utf8")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        table, n = self._table, len(self._table)
        return self._utf8.decode(b"".join([table[i] for i in ids if 0 <= i < n]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder(Decoder):
    """For all other tokenizers: decodes the last few ids with and without the new ones and emits the difference.

    ``decode``: ids to text. A result that ends in U+FFFD is taken for a cut character and held until more ids come, for
    at most ``limit`` ids: a real U+FFFD is not held for ever, and the cost stays linear in the number of ids.
    """

    __slots__ = ("_decode", "_limit", "_shown", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], limit: int = 16) -> None:
        self._decode = decode
        self._limit = limit
        self._window: list[int] = []  # |-- shown: their text was emitted --|-- held --|
        self._shown = 0

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._one(i) for i in ids])

    def _one(self, token: int) -> str:
        self._window.append(token)
        before, now = self._decode(self._window[: self._shown]), self._decode(self._window)
        full = len(self._window) - self._shown >= self._limit
        if not full and (len(now) <= len(before) or now.endswith("\ufffd")):
            return ""
        if now == before:  # ids without text, such as skipped special ones
            del self._window[self._shown :]
            return ""
        # Keep what was held as the next context: some decoders treat the first id of a text differently.
        del self._window[: self._shown]
        self._shown = len(self._window)
        return now[len(before) :]

    def finish(self) -> str:
        before, now = self._decode(self._window[: self._shown]), self._decode(self._window)
        self._window, self._shown = [], 0
        return now[len(before) :]


class KeepingDecoder(Decoder):
    """Another decoder, and the text of some tokens that it leaves out: special tokens that a parser has to see."""

    __slots__ = ("_inner", "_keep")

    def __init__(self, inner: Decoder, keep: Mapping[int, str]) -> None:
        self._inner, self._keep = inner, keep

    def push(self, ids: Iterable[int]) -> str:
        text = ""
        for i in ids:
            kept = self._keep.get(i)
            text += self._inner.push((i,)) if kept is None else self._inner.finish() + kept
        return text

    def finish(self) -> str:
        return self._inner.finish()
