"""One choice of an answer: its parts as a chat message, or as the deltas of one."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator
from typing import Any

import orjson

from minisgl.api import Delta, Part, TokenLogprob

ALNUM = string.ascii_letters + string.digits


def call_id() -> str:
    return "call_" + "".join(secrets.choice(ALNUM) for _ in range(24))


def parts_of(delta: Delta) -> tuple[Part, ...]:
    """What is new of an output, whether it is parsed or plain text."""
    return (*delta.parts, Part("content", delta.text)) if delta.text else delta.parts


class Reply:
    """Collects one choice. ``reasoning_names``: under which the reasoning is given; () drops it. ``forced_name``: a call was
    asked for by name, which ends with "stop", as the OpenAI API has it."""

    def __init__(self, echo: str, reasoning_names: tuple[str, ...], forced_name: bool) -> None:
        self._content = [echo] if echo else []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._names = reasoning_names
        self._forced_name = forced_name
        self._ids: list[int] = []
        self._told: list[TokenLogprob] = []
        self.echo = echo
        self.prompt_told: tuple[TokenLogprob, ...] = ()

    def add(self, delta: Delta) -> None:
        self._ids += delta.ids
        self._told += delta.logprobs or ()
        self.prompt_told = delta.prompt_logprobs or self.prompt_told
        for part in parts_of(delta):
            self._part(part)

    def _part(self, part: Part) -> None:
        if part.kind == "content":
            self._content.append(part.text)
        elif part.kind == "reasoning":
            self._reasoning.append(part.text)
        elif part.kind == "call":
            self._calls.append((call_id(), part.text, []))
        elif part.kind == "arguments":
            self._calls[-1][2].append(part.text)

    @property
    def text(self) -> str:
        return "".join(self._content)

    def token_ids(self, last: Delta) -> list[int]:
        """Of what is given: not those of reasoning that is dropped."""
        return self._ids[self._dropped(last) :]

    def told(self, last: Delta) -> list[TokenLogprob]:
        """Log probabilities of the same tokens."""
        return self._told[self._dropped(last) :]

    def _dropped(self, last: Delta) -> int:
        return last.usage.reasoning_tokens if last.usage is not None and not self._names else 0

    def finish(self, why: str | None) -> str | None:
        return finish_reason(why, bool(self._calls), self._forced_name)

    def message(self, thinks: bool) -> dict[str, Any]:
        """``thinks``: the output was looked through for reasoning, so that it has the field."""
        nothing = self._calls or self._reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.text or (None if nothing else ""),
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = [
                {"id": call, "type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
                for call, name, pieces in self._calls
            ]
        if thinks:
            message |= dict.fromkeys(self._names, "".join(self._reasoning) or None)
        return message


class ReplyDeltas:
    """The same as the deltas of a stream."""

    def __init__(self, reasoning_names: tuple[str, ...], forced_name: bool) -> None:
        self._names = reasoning_names
        self._forced_name = forced_name
        self._calls = 0

    def bodies(self, delta: Delta, nulls: bytes) -> Iterator[bytes]:
        """The JSON members of each ``delta`` object. ``nulls``: members that every delta without reasoning has."""
        for part in parts_of(delta):
            if part.kind == "content":
                yield b'"content":' + orjson.dumps(part.text) + nulls
            elif part.kind == "reasoning":
                if self._names:
                    text = orjson.dumps(part.text)
                    yield b",".join(b'"%s":%s' % (name.encode(), text) for name in self._names)
            elif part.kind == "call":
                self._calls += 1
                function = {"name": part.text, "arguments": ""}
                yield self._call({"id": call_id(), "type": "function", "function": function}) + nulls
            elif part.kind == "arguments":
                yield self._call({"function": {"arguments": part.text}}) + nulls

    def _call(self, members: dict[str, Any]) -> bytes:
        return b'"tool_calls":' + orjson.dumps([{"index": self._calls - 1, **members}])

    def finish(self, why: str | None) -> str | None:
        return finish_reason(why, self._calls > 0, self._forced_name)


def finish_reason(why: str | None, called: bool, forced_name: bool) -> str | None:
    return "tool_calls" if why == "stop" and called and not forced_name else why
