"""Stop strings: find them across token boundaries and hold back what may become one (faults A1, A2)."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.text.hold import Words


class StopHolder:
    """Cuts one output's text at the first stop string.

    The stop string that completes first in the text wins, and of those that complete at the same character the first in
    ``stops``: so the result does not depend on how the text was cut into pieces. Between pieces only the longest end of the
    text that is a proper prefix of some stop string is held back. ``include``: keep the stop string in the text.

    ``matched``: the stop string that ended the text, None so far. While it is ``asleep`` text passes; a stop string that begins
    then is none.
    """

    __slots__ = ("_held", "_include", "_stops", "_words", "asleep", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._words = Words(self._stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        self.asleep = False

    def push(self, text: str) -> str:
        """Text that is certain now. After a match this is all of it, and later calls give ""."""
        if self.matched is not None:
            return ""
        if self.asleep:
            return text
        text = self._held + text
        found = [(at + len(stop), i, at) for i, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            end, i, start = min(found)
            self.matched, self._held = self._stops[i], ""
            return text[: end if self._include else start]
        hold = self._words.partial(text)
        self._held = text[hold:]
        return text[:hold]

    def flush(self) -> str:
        """What is still held, when the text ends for another reason."""
        held, self._held = self._held, ""
        return held
