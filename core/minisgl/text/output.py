"""One output on its way out: its tokens become text, or parts, until a stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.base.types import Delta, Ended, Finish, Part, Usage
from minisgl.text.parse import Parsing
from minisgl.text.stops import StopHolder
from minisgl.text.tokenizer import Decoder
from minisgl.text.told import Told


class NoText(Decoder):
    """Of a model without a tokenizer: ids go out, text does not."""

    def push(self, ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(slots=True)
class Output:
    """One running output. ``min_tokens``: before so many no stop string is looked for. ``closed``: later tokens are dropped;
    ``muted``: nothing more is told to the client."""

    uid: int
    index: int
    prompt_tokens: int
    decoder: Decoder
    stops: StopHolder | None
    stop_ids: frozenset[int]
    eos: frozenset[int]
    show_stop: bool
    completion_tokens: int = 0
    parsing: Parsing | None = None
    told: Told | None = None
    min_tokens: int = 0
    reasoning_tokens: int = 0
    stop_token: int | None = None
    closed: bool = False
    muted: bool = False
    text: list[str] = field(default_factory=list)  # not yet sent
    ids: list[int] = field(default_factory=list)  # not yet sent
    parts: list[Part] = field(default_factory=list)  # not yet sent

    def take(self, token: int) -> bool:
        """Add one token. Returns: whether the text is complete with it, by a stop string or a last tool call."""
        self.completion_tokens += 1
        self.ids.append(token)
        shown = True
        if token in self.stop_ids:
            self.stop_token, self.closed = token, True
            shown = self.show_stop
        text = self.decoder.push((token,)) if shown else ""
        if self.told is not None:
            self.told.take(self.prompt_tokens + self.completion_tokens - 1, token, text)
        if self.stops is not None:
            self.stops.asleep = self.completion_tokens <= self.min_tokens
        if self.parsing is not None:
            return self._parse(self.parsing, text, token)
        return shown and self._add(text)

    def _parse(self, parsing: Parsing, text: str, token: int) -> bool:
        thought = parsing.thinking
        self.parts += parsing.push(text, (token,))
        if thought or parsing.thinking:
            self.reasoning_tokens = self.completion_tokens
        complete = parsing.full or parsing.matched is not None
        self.closed |= complete
        return complete

    def _add(self, text: str) -> bool:
        if self.stops is None:
            self.text.append(text)
            return False
        self.text.append(self.stops.push(text))
        self.closed |= self.stops.matched is not None
        return self.stops.matched is not None

    @property
    def waiting(self) -> bool:
        """What came has to wait for something that goes before it."""
        return self.told is not None and self.told.waiting

    def end(self, ended: Ended) -> Delta:
        """The last delta: what was held back, why it ended, and the counts."""
        rest = self.decoder.finish()
        if self.parsing is not None:
            self.parts += self.parsing.push(rest, ())
            self.parts += self.parsing.finish(self._why(ended.finish)[0])
        elif not self._add(rest) and self.stops is not None:
            self.text.append(self.stops.flush())
        finish, reason = self._why(ended.finish)
        return self.delta(
            finish=finish,
            stop_reason=reason,
            usage=Usage(self.prompt_tokens, self.completion_tokens, ended.cached_tokens, self.reasoning_tokens),
            error=ended.detail if finish == Finish.ERROR else "",
        )

    def _why(self, finish: Finish) -> tuple[str, str | int | None]:
        matcher = self.stops if self.parsing is None else self.parsing
        if matcher is not None and matcher.matched is not None:
            return Finish.STOP.value, matcher.matched
        if self.parsing is not None and self.parsing.full:
            return Finish.STOP.value, None
        if self.stop_token is not None:
            return Finish.STOP.value, None if self.stop_token in self.eos else self.stop_token
        return finish.value, None

    def delta(self, **end: Any) -> Delta:
        """What is new since the last one."""
        ids = tuple(self.ids)
        if self.told is not None:
            end |= {"logprobs": self.told.flush(), "prompt_logprobs": self.told.prompt()}
        if self.parsing is None:
            new = Delta(uid=self.uid, index=self.index, text="".join(self.text), ids=ids, **end)
        else:
            sent = self.completion_tokens - len(ids)
            thought = min(max(self.reasoning_tokens - sent, 0), len(ids))
            parts = joined(self.parts)
            new = Delta(uid=self.uid, index=self.index, ids=ids, parts=parts, n_reasoning=thought, **end)
        self.text, self.ids, self.parts = [], [], []
        return new


def joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours that go on with the same text as one."""
    out: list[Part] = []
    for part in parts:
        if out and out[-1].kind == part.kind and part.kind in ("content", "reasoning", "arguments"):
            out[-1] = Part(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return tuple(out)
