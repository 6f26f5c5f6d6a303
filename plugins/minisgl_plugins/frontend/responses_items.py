"""The items of a response's output, as they grow: the object of each, and the events that tell of it."""

from __future__ import annotations

import base64
import secrets
from abc import ABC, abstractmethod
from typing import Any

import orjson

from .openai_reply import call_id

Event = tuple[str, dict[str, Any]]  # its type, and its members beside those that the answer knows
CARRIED = "text:"  # begins what this server gives as encrypted_content: text in base64, as there is nothing to hide


def carried(text: str) -> str:
    """Reasoning for clients that send back ``encrypted_content`` alone."""
    return CARRIED + base64.b64encode(text.encode()).decode()


def uncarried(value: str) -> str:
    """The text again; "" for what another server has encrypted."""
    try:
        return (
            base64.b64decode(value.removeprefix(CARRIED), validate=True).decode() if value.startswith(CARRIED) else ""
        )
    except ValueError:
        return ""


class Item(ABC):
    def __init__(self, prefix: str, kind: str, **members: Any) -> None:
        self.body: dict[str, Any] = {
            "id": prefix + secrets.token_hex(12),
            "type": kind,
            "status": "in_progress",
            **members,
        }
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def opened(self) -> list[Event]:
        return [("response.output_item.added", {"item": self.body})]

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """``logprobs``: of the tokens that ``text`` came from, if they are asked for."""
        self._pieces.append(text)
        return self._delta(text, logprobs)

    def closed(self, status: str) -> list[Event]:
        """``status``: "completed", or "incomplete" if more would have come."""
        told = self._done()
        self.body["status"] = status
        return [*told, ("response.output_item.done", {"item": self.body})]

    @abstractmethod
    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event: ...

    @abstractmethod
    def _done(self) -> list[Event]:
        """Events of the whole text, which goes into the body."""


class MessageItem(Item):
    def __init__(self) -> None:
        super().__init__("msg_", "message", role="assistant", content=[])
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[Event]:
        return [*super().opened(), ("response.content_part.added", {"content_index": 0, "part": self._part()})]

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._logprobs += logprobs
        return "response.output_text.delta", {"content_index": 0, "delta": text, "logprobs": logprobs}

    def _done(self) -> list[Event]:
        part = self._part()
        self.body["content"] = [part]
        return [
            ("response.output_text.done", {"content_index": 0, "text": part["text"], "logprobs": self._logprobs}),
            ("response.content_part.done", {"content_index": 0, "part": part}),
        ]


class ReasoningItem(Item):
    """``carry``: its text is given as ``encrypted_content`` too."""

    def __init__(self, carry: bool) -> None:
        super().__init__("rs_", "reasoning", summary=[], content=[])
        self._carry = carry

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        return "response.reasoning_text.delta", {"content_index": 0, "delta": text}

    def _done(self) -> list[Event]:
        text = self.text
        self.body["content"] = [{"type": "reasoning_text", "text": text}]
        if self._carry:
            self.body["encrypted_content"] = carried(text)
        return [("response.reasoning_text.done", {"content_index": 0, "text": text})]


class CallItem(Item):
    def __init__(self, name: str) -> None:
        super().__init__("fc_", "function_call", call_id=call_id(), name=name, arguments="")

    @property
    def whole(self) -> bool:
        """Its arguments are JSON, not what a limit left of it."""
        try:
            orjson.loads(self.text)
        except orjson.JSONDecodeError:
            return False
        return True

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        return "response.function_call_arguments.delta", {"delta": text}

    def _done(self) -> list[Event]:
        name, arguments = self.body["name"], self.text
        self.body["arguments"] = arguments
        return [("response.function_call_arguments.done", {"name": name, "arguments": arguments})]
