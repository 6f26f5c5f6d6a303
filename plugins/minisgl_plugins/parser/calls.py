"""What the parsers of tool calls share: text, then calls, then text, whatever one call looks like."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from minisgl.api import OutputParser, ParserContext, Part, PluginSettings, Words

Status = Literal["more", "done", "bad"]


class CallSettings(PluginSettings):
    early: bool = Field(
        False,
        description="arguments go out as the model writes them, before their call is known to be complete; one that "
        "breaks then stays a call as far as it goes, instead of being text",
    )


class CallReader:
    """One call. ``raw``: all it has read; ``opened``: it has given its "call" part; ``status``: "bad" for text that is no call."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.opened = False
        self.status: Status = "more"

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self, text: str) -> None:
        """Remember text that belongs to the call."""
        self._raw.append(text)

    def push(self, text: str, out: list[Part]) -> str:
        """Read on and add what is certain to ``out``. Returns: the text that is not the call's, once the status says so."""
        raise NotImplementedError


class CallParser(OutputParser):
    """Finds where calls begin, gives each to a reader, and takes what stands between calls away.

    Whitespace alone before or between calls is dropped. Text that turns out not to be a call is content as it was: so a call is
    held back until it is complete, and streams say the same as whole answers. Where a grammar sees to it that what begins as a
    call becomes one, or ``early`` is set, its parts go out as they come. ``after``: texts that may follow a call and belong to it.

        text --opener--> call --complete--> after --> text
    """

    Settings = CallSettings
    stage = "calls"
    after: Sequence[str] = ()

    def __init__(self, ctx: ParserContext) -> None:
        self._names = {str(tool.get("name")) for tool in ctx.tools}
        self._tools = ctx.tools
        self._words = Words(self.openers)
        self._text = ""  # not yet decided about
        self._blank = ""  # whitespace that is content if content follows
        self._said = False  # content came since the last call
        self._called = False
        self._reader: CallReader | None = None
        self._early = ctx.sure or ctx.settings.early
        self._held: list[Part] = []  # of the call that is read now
        self._follows = False  # right after a call

    @abstractmethod
    def reader(self, opener: str) -> CallReader:
        """For the text that begins with ``opener``."""

    def push(self, delta: str, ids: Sequence[int]) -> list[Part]:
        self._text += delta
        out: list[Part] = []
        while self._text and self._step(out):
            pass
        return out

    def finish(self, why: str) -> list[Part]:
        out: list[Part] = []
        reader, self._reader = self._reader, None
        if reader is not None:
            self._give_up(reader, why, out)
        self._content(self._text, out)
        self._text = ""
        if self._blank and not self._called:
            out.append(Part("content", self._blank))
        self._blank = ""
        return out

    def _step(self, out: list[Part]) -> bool:
        """One transition. Returns: whether another may follow."""
        if self._reader is not None:
            return self._in_call(self._reader, out)
        if self._follows:
            return self._after_call()
        return self._in_text(out)

    def _in_text(self, out: list[Part]) -> bool:
        found = self.opening(self._text)
        if found is None:
            keep = self.undecided(self._text)
            self._content(self._text[:keep], out)
            self._text = self._text[keep:]
            return False
        at, opener = found
        self._content(self._text[:at], out)
        self._text = self._text[at:]
        self._reader = self.reader(opener)
        return True

    def opening(self, text: str) -> tuple[int, str] | None:
        """(start, opener) of the first call in ``text``; None if there is none, or none for certain."""
        return self._words.first(text)

    def undecided(self, text: str) -> int:
        """From where on ``text`` may become an opener."""
        return self._words.partial(text)

    def _in_call(self, reader: CallReader, out: list[Part]) -> bool:
        text, self._text = self._text, ""
        self._text = reader.push(text, self._held)
        if reader.opened and self._early:
            self._release(out)
        if reader.status == "more":
            return False
        self._reader = None
        if reader.status == "done":
            self._release(out)
            out.append(Part("end"))
            self._follows = True
        else:
            self._give_up(reader, "stop", out)
        return True

    def _release(self, out: list[Part]) -> None:
        """It is a call."""
        out += self._held
        self._held = []
        self._called, self._said, self._blank = True, False, ""

    def _give_up(self, reader: CallReader, why: str, out: list[Part]) -> None:
        if reader.opened and (self._early or why != "stop"):  # cut off: as far as it goes it is a call
            self._release(out)
            out.append(Part("end"))
        else:
            self._held = []
            self._content(reader.raw, out)

    def _after_call(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        for word in self.after:
            if text.startswith(word):
                self._text = text[len(word) :]
                return True
            if word.startswith(text):
                return False
        self._follows = False
        return True

    def _content(self, text: str, out: list[Part]) -> None:
        if not text:
            return
        if not self._said:
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank, self._said = self._blank, "", True
        out.append(Part("content", text))
