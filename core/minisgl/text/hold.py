"""What to hold back of a text that comes in pieces: an end that may become one of some words."""

from __future__ import annotations

from collections.abc import Sequence


class Words:
    """Words to look for in a text that comes in pieces."""

    __slots__ = ("_firsts", "_longest", "words")

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._longest = max(map(len, self.words), default=0)
        self._firsts = frozenset(word[0] for word in self.words)

    def first(self, text: str) -> tuple[int, str] | None:
        """(start, word) of the word that starts first in ``text``, of those the longest."""
        found = [(at, -len(word), word) for word in self.words if (at := text.find(word)) >= 0]
        if not found:
            return None
        at, _, word = min(found)
        return at, word

    def partial(self, text: str) -> int:
        """Where the longest end of ``text`` that some word properly begins with starts; the text's length if there is none."""
        first = max(0, len(text) - self._longest + 1)
        if self._firsts.isdisjoint(text[first:]):
            return len(text)
        for start in range(first, len(text)):
            if text[start] in self._firsts and any(word.startswith(text[start:]) for word in self.words):
                return start
        return len(text)
