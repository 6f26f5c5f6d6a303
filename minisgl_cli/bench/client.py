"""A client of ``/v1/completions`` that costs little: plain asyncio sockets, one connection for each streamed answer."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from minisgl.base.errors import ConfigError

READ = 1 << 16  # bytes at a time
HEAD_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. ``head``: of every request, but for its length. ``tls``: None for http."""

    host: str
    port: int
    head: bytes
    tls: ssl.SSLContext | None


@dataclass(slots=True)
class Answer:
    """One request. Times in seconds of ``time.perf_counter``; NaN until it happens. ``head_s``: the status line came.
    ``seen``: when text came, and how many tokens the answer then had. ``error``: why it failed, "" if it did not."""

    due_s: float
    sent_s: float = float("nan")
    head_s: float = float("nan")
    end_s: float = float("nan")
    status: int = 0
    seen: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    error: str = ""

    def times(self) -> tuple[float, list[float]]:
        """Seconds to the first token, and between each two tokens. Tokens that came together share their time evenly. An answer
        without text until its end, as of a model without a tokenizer, began with its status line."""
        begun, counted = self.seen[0] if self.seen else (self.end_s, self.tokens)
        if counted >= self.tokens > 1:
            return self.head_s - self.sent_s, [(self.end_s - self.head_s) / (self.tokens - 1)] * (self.tokens - 1)
        gaps: list[float] = []
        last = begun
        for at, tokens in self.seen[1:]:
            if (new := tokens - counted) > 0:
                gaps += [(at - last) / new] * new
                last, counted = at, tokens
        return begun - self.sent_s, gaps


def target(base_url: str, key: str) -> Target:
    """Raises: ConfigError for what is no http or https URL."""
    parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--base-url {base_url!r} is no URL such as http://127.0.0.1:30000")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json", "Connection: close"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return Target(host, port or (443 if tls else 80), "\r\n".join(lines).encode() + b"\r\nContent-Length: ", tls)


def completion(model: str, ids: Sequence[int], max_tokens: int, temperature: float) -> bytes:
    """The body of a request; every chunk of its answer is to say how many tokens there are."""
    return orjson.dumps(
        {
            "model": model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )


async def ask(to: Target, body: bytes, answer: Answer, timeout_s: float) -> None:
    """Send one request and note what comes; a failure is noted too."""
    answer.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(to, body, answer)
    except TimeoutError:
        answer.error = f"no complete answer within {timeout_s:g} s"
    except (OSError, EOFError, ValueError) as exc:
        answer.error = f"{type(exc).__name__}: {exc}"
    answer.end_s = time.perf_counter()


async def _exchange(to: Target, body: bytes, answer: Answer) -> None:
    reader, writer = await asyncio.open_connection(to.host, to.port, ssl=to.tls, limit=HEAD_LIMIT)
    try:
        writer.write(to.head + str(len(body)).encode() + b"\r\n\r\n" + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        answer.head_s = time.perf_counter()
        answer.status = int(head.split(b" ", 2)[1])
        pieces = _chunks(reader) if b"transfer-encoding: chunked" in head else _rest(reader)
        if answer.status == 200:
            await _events(pieces, answer)
        else:
            text = b"".join([piece async for piece in pieces]).decode(errors="replace")
            answer.error = f"status {answer.status}: {_message(text)}"
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(READ):
        yield piece


async def _events(pieces: AsyncIterator[bytes], answer: Answer) -> None:
    """Raises: EOFError if the stream ends before it is complete."""
    buffer = b""
    async for piece in pieces:
        now = time.perf_counter()
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                return
            _event(orjson.loads(data), now, answer)
            if answer.error:
                return
    raise EOFError("the stream ended before [DONE]")


def _event(event: Any, now: float, answer: Answer) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    usage = event.get("usage")
    said = any(choice.get("text") for choice in event.get("choices", ()))
    if usage:
        answer.tokens = int(usage["completion_tokens"])
    elif said:  # a server that counts at the end only: a chunk is a token, as far as can be known
        answer.tokens += 1
    if said:
        answer.seen.append((now, answer.tokens))


def _message(text: str) -> str:
    """Of an error answer in the API's form; else its beginning."""
    try:
        return str(orjson.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
