"""One response: the object, and the events that build it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from minisgl.api import Delta, RequestError, TokenLogprob

from .openai_chunks import Tally
from .openai_logprobs import LogprobWriter
from .openai_reply import parts_of
from .responses_items import CallItem, Item, MessageItem, ReasoningItem
from .responses_request import Asked
from .translating import EventAnswer, event


class ResponseAnswer(EventAnswer):
    def __init__(self, asked: Asked, tally: Tally, request_id: str) -> None:
        self._asked, self._tally = asked, tally
        self._id = "resp_" + request_id.removeprefix("req_")
        self._created = int(time.time())
        self._writer = LogprobWriter(asked.call.common.names_as_ids)
        self._told: list[TokenLogprob] = []  # of tokens whose text is held back
        self._items: list[Item] = []  # of the response
        self._open: Item | None = None  # the last one, while it grows
        self._sequence = 2  # number of the next event; the first two are those of the start
        self._cut = False

    # ------------------------------------------------------------------------------------------------------------ events

    def start(self) -> bytes:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join(event(kind, sequence_number=i, response=response) for i, kind in enumerate(kinds))

    def events(self, delta: Delta) -> Iterator[bytes]:
        if delta.n_reasoning:  # what was held back was thought too
            self._told.clear()
        if delta.logprobs is not None:  # special tokens have no text
            self._told += [t for t in delta.logprobs[delta.n_reasoning :] if t.token.data is not None]
        for part in parts_of(delta):
            if part.kind == "content":
                yield from self._text(MessageItem, part.text)
            elif part.kind == "reasoning":
                yield from self._text(ReasoningItem, part.text)
            elif part.kind == "call":
                yield from self._begin(CallItem(part.text))
            elif part.kind == "arguments":
                yield from self._grow(part.text)
            elif part.kind == "end":
                self._told.clear()
                whole = isinstance(self._open, CallItem) and self._open.whole
                yield from self._close("completed" if whole else "incomplete")
        if delta.finish is not None:
            yield from self._last(delta.finish == "length")

    def end(self) -> bytes:
        response = self.whole()
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> bytes:
        """The last events of a stream that an error ends."""
        if self._open is not None:
            self._open.closed("incomplete")
        told = {"code": "server_error" if error.status >= 500 else error.code, "message": error.message[:1000]}
        code = error.code or told["code"]
        return self._event("error", **{**told, "code": code}, param=error.param) + self._event(
            "response.failed", response=self._response("failed", self._items, error=told)
        )

    def _text(self, kind: type[MessageItem | ReasoningItem], text: str) -> Iterator[bytes]:
        if not isinstance(self._open, kind):
            yield from self._begin(
                MessageItem() if kind is MessageItem else ReasoningItem(self._asked.carries_reasoning)
            )
        yield from self._grow(text)

    def _begin(self, item: Item) -> Iterator[bytes]:
        yield from self._close("completed")
        self._items.append(item)
        self._open = item
        for kind, members in item.opened():
            yield self._of_item(item, kind, members)

    def _grow(self, text: str) -> Iterator[bytes]:
        assert self._open is not None, text
        logprobs = self._logprobs() if isinstance(self._open, MessageItem) else []
        kind, members = self._open.grown(text, logprobs)
        yield self._of_item(self._open, kind, members)

    def _close(self, status: str) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is not None:
            for kind, members in item.closed(status):
                yield self._of_item(item, kind, members)

    def _last(self, cut: bool) -> Iterator[bytes]:
        self._cut = cut
        if not self._items and not cut:
            yield from self._begin(MessageItem())  # an empty answer is one all the same
        whole = not cut and not isinstance(self._open, CallItem)
        yield from self._close("completed" if whole else "incomplete")

    def _of_item(self, item: Item, kind: str, members: dict[str, Any]) -> bytes:
        if "item" not in members:
            members["item_id"] = item.body["id"]
        return self._event(kind, output_index=len(self._items) - 1, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        self._sequence += 1
        return event(kind, sequence_number=self._sequence - 1, **members)

    def _logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens of the text that comes now."""
        entries: list[dict[str, Any]] = self._writer.chat(self._told)["content"]
        self._told.clear()
        for entry in entries:
            for candidate in entry["top_logprobs"]:
                candidate["bytes"] = candidate["bytes"] or []  # special tokens; never null in this API
        return entries

    # ------------------------------------------------------------------------------------------------------------ object

    def whole(self) -> dict[str, Any]:
        return self._response("incomplete" if self._cut else "completed", self._items)

    def _response(self, status: str, items: list[Item], error: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._asked.shown,
            "output": [item.body for item in items],
            "usage": None if status in ("in_progress", "failed") else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._tally.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
