"""Reasoning between think tags, as Qwen3, DeepSeek R1 and others write it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from minisgl.api import OutputParser, ParserContext, Part, PluginSettings, Words


class ReasoningSettings(PluginSettings):
    start: str = Field("<think>", min_length=1, description="tag that begins reasoning")
    end: str = Field("</think>", min_length=1, description="tag that ends it")


class ReasoningParser(OutputParser):
    """Reasoning is at the start of the output, or goes on from a prompt that ends within it.

    Whether it does is seen from the prompt itself: templates end it with an open tag (the model thinks), a closed pair of tags
    (it may not), or none (it writes the tag itself). One newline after the start tag, one before the end tag and two after it
    belong to the tags. A tool call within reasoning ends it.

        start --<think>--> open --</think>--> after --> done
    """

    Settings = ReasoningSettings
    stage = "reasoning"
    tags = ("<think>", "</think>")

    def __init__(self, ctx: ParserContext) -> None:
        s: ReasoningSettings = ctx.settings
        self._start, self._end = s.start, s.end
        self._ends = Words((s.end, *ctx.cuts))
        self._text = ""  # not yet decided about
        self._state = "start"
        self._trim = 0  # newlines that still belong to the last tag
        self._closed = ctx.prompt.rstrip().endswith(s.end)  # the model may not think
        self._begin(ctx)

    @classmethod
    def fits(cls, template: str) -> int:
        return 1 if "<think>" in template or "</think>" in template else 0

    def _begin(self, ctx: ParserContext) -> None:
        own = ctx.continued
        if own:
            opened = own.rfind(self._start) > own.rfind(self._end)
            self._state = "open" if opened else "done"
        elif ctx.prompt.rstrip().endswith(self._start):
            self._state = "open"
            self._trim = 1 if ctx.prompt.endswith(self._start) else 0

    def reasoning_tags(self) -> tuple[str, str] | None:
        if self._state == "done" or self._closed:
            return None
        return ("" if self._state == "open" else self._start, self._end)

    @property
    def thinking(self) -> bool:  # type: ignore[override]
        return self._state == "open"

    def push(self, delta: str, ids: Sequence[int]) -> list[Part]:
        if self._state == "done":
            return [Part("content", delta)] if delta else []
        self._text += delta
        out: list[Part] = []
        while self._step(out):
            pass
        return out

    def finish(self, why: str) -> list[Part]:
        text, self._text = self._text, ""
        if not text or self._state == "after":
            return []
        return [Part("reasoning" if self._state == "open" else "content", text)]

    def _step(self, out: list[Part]) -> bool:
        """One transition. Returns: whether another may follow."""
        if not self._text:
            return False
        if self._state == "start":
            return self._at_start()
        if self._state == "open":
            return self._in_reasoning(out)
        if self._state == "after":
            return self._trimmed("done")
        self._emit("content", self._text, out)
        self._text = ""
        return False

    def _at_start(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._start):
            self._state, self._trim = "open", 1
            self._text = text[len(self._start) :]
            return True
        if self._start.startswith(text):  # also of nothing but whitespace
            return False
        self._state = "done"
        return True

    def _in_reasoning(self, out: list[Part]) -> bool:
        if self._trim and not self._trimmed("open"):
            return False
        found = self._ends.first(self._text)
        if found is None:
            keep = self._ends.partial(self._text)
            keep -= self._text[:keep].endswith("\n")  # it may be the end tag's
            self._emit("reasoning", self._text[:keep], out)
            self._text = self._text[keep:]
            return False
        at, word = found
        self._emit("reasoning", self._text[:at].removesuffix("\n"), out)
        if word == self._end:
            self._state, self._trim, self._text = "after", 2, self._text[at + len(word) :]
        else:
            self._state, self._text = "done", self._text[at:]
        return True

    def _trimmed(self, then: str) -> bool:
        """Drop newlines of the last tag. Returns: whether something else follows; then the state is ``then``."""
        while self._trim and self._text.startswith("\n"):
            self._trim, self._text = self._trim - 1, self._text[1:]
        if self._trim and not self._text:
            return False
        self._trim, self._state = 0, then
        return True

    @staticmethod
    def _emit(kind: str, text: str, out: list[Part]) -> None:
        if text:
            out.append(Part("reasoning" if kind == "reasoning" else "content", text))
