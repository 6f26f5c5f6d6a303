"""The Anthropic API: messages and the count of their tokens, as a translation to and from chat completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import orjson

from minisgl.api import Delta, ErrorShape, Exchange, RequestError, route

from . import anthropic_about as about
from .anthropic_request import NAMES, as_chat, names
from .openai_chunks import Tally
from .openai_reply import parts_of
from .openai_request import Call, read_chat
from .openai_tokenize import read_tokenize
from .translating import EventAnswer, TranslatingFrontend, event, renamed, renaming

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
KINDS = {"content": ("text", "text", "text_delta"), "reasoning": ("thinking", "thinking", "thinking_delta")}
SIGNATURE = "unsigned"  # of thinking; clients drop from the next prompt what comes without one


def error_body(error: RequestError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message[:1000]
    if error.code == "context_length_exceeded":  # agents that shorten their history look for these words
        message = f"prompt is too long: {message}"
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


ERRORS = ErrorShape(error_body, lambda error: b"event: error\ndata: " + error_body(error) + b"\n\n", b"", about.ERROR)


class AnthropicFrontend(TranslatingFrontend):
    errors = ERRORS

    def routes(self) -> list[BaseRoute]:
        return [
            route("POST", "/v1/messages", self.messages, about.messages(self.settings)),
            route("POST", "/v1/messages/count_tokens", self.count_tokens, about.COUNT_TOKENS),
        ]

    async def messages(self, x: Exchange) -> None:
        call, paths = await x.read(self._read)
        call = call.counted_for(x.header(b"x-api-key"))
        tally = Tally(1, 1)
        outputs = renamed(self._outputs(call, self._info(), tally), paths, NAMES)
        await self._answer_events(x, Message(call, tally), outputs, call.common.stream)

    def _read(self, body: dict[str, Any]) -> tuple[Call, dict[str, str]]:
        chat, paths = as_chat(body), names(body)
        with renaming(paths, NAMES):
            return read_chat(chat, self._info(), self.settings), paths

    async def count_tokens(self, x: Exchange) -> None:
        request, _ = await x.read(lambda body: read_tokenize(as_chat(body, needs_max=False), self._info()))
        await x.respond_json({"input_tokens": len(await self.client.tokenize(request))})


class Message(EventAnswer):
    """One answer as content blocks: all of them, and as the events that build them."""

    def __init__(self, call: Call, tally: Tally) -> None:
        self._call, self._tally = call, tally
        self._id = "msg_" + secrets.token_hex(12)
        self._blocks: list[dict[str, Any]] = []
        self._open = ""  # kind of the last block while it grows
        self._pieces: list[str] = []  # what that one has so far
        self._inputs: dict[int, str] = {}  # JSON of tool inputs, by block
        self._stop: str | None = None
        self._sequence: str | None = None

    def start(self) -> bytes:
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return event("message_start", message={**message, "usage": {**self._usage(), "output_tokens": 0}})

    def events(self, delta: Delta) -> Iterator[bytes]:
        for part in parts_of(delta):
            if part.kind in KINDS:
                yield from self._text(part.kind, part.text)
            elif part.kind == "call":
                block = {"type": "tool_use", "id": "toolu_" + secrets.token_hex(12), "name": part.text, "input": {}}
                yield from self._begin("call", block)
            elif part.kind == "arguments":
                self._pieces.append(part.text)
                change = {"type": "input_json_delta", "partial_json": part.text}
                yield event("content_block_delta", index=len(self._blocks) - 1, delta=change)
        if delta.finish is not None:
            yield from self._close()
            self._end(delta)

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        name, field, change = KINDS[kind]
        if self._open != kind:
            signature = {"signature": ""} if kind == "reasoning" else {}  # it comes at the end
            yield from self._begin(kind, {"type": name, field: "", **signature})
        self._pieces.append(text)
        yield event("content_block_delta", index=len(self._blocks) - 1, delta={"type": change, field: text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._open = kind
        yield event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open:
            at, text = len(self._blocks) - 1, "".join(self._pieces)
            self._pieces.clear()
            if self._open == "call":
                self._inputs[at] = text
            else:
                self._blocks[at][KINDS[self._open][1]] = text
            if self._open == "reasoning":
                self._blocks[at]["signature"] = SIGNATURE
                yield event("content_block_delta", index=at, delta={"type": "signature_delta", "signature": SIGNATURE})
            self._open = ""
            yield event("content_block_stop", index=at)

    def _end(self, delta: Delta) -> None:
        self._stop = "max_tokens" if delta.finish == "length" else "tool_use" if self._inputs else "end_turn"
        if isinstance(delta.stop_reason, str):
            self._stop, self._sequence = "stop_sequence", delta.stop_reason

    def end(self) -> bytes:
        change = {"stop_reason": self._stop, "stop_sequence": self._sequence}
        return event("message_delta", delta=change, usage=self._usage()) + event("message_stop")

    def whole(self) -> dict[str, Any]:
        for at, text in self._inputs.items():
            try:
                self._blocks[at]["input"] = orjson.loads(text or "{}")
            except orjson.JSONDecodeError:  # cut by max_tokens
                self._blocks[at]["input"] = {}
        ends = {"stop_reason": self._stop, "stop_sequence": self._sequence}
        return {**self._head(), "content": self._blocks, **ends, "usage": self._usage()}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._call.model}

    def _usage(self) -> dict[str, Any]:
        usage = self._tally.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }
