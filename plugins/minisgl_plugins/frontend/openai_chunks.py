"""What goes out: response objects with the API's exact keys, and stream chunks from byte templates.

A chunk is a prefix, the JSON of its text, and a suffix; the prefixes are made once per request (0.2 us a chunk instead of
5 us for building and dumping a dict).
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from minisgl.api import Accepted, Delta, TokenLogprob

from .openai_logprobs import LogprobWriter
from .openai_reply import Reply, ReplyDeltas, parts_of
from .openai_request import Call

FINISH_REASONS = ("stop", "length")


class Tally:
    """Counts the tokens of one HTTP request: each prompt once, the outputs of all choices. ``thinks``: outputs are looked through
    for reasoning. ``prompt_ids``: of each prompt, None where nobody asked."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self.n = n
        self.thinks = False
        self.prompt_ids: list[tuple[int, ...] | None] = [None] * num_prompts
        self.prompt = [0] * num_prompts
        self.cached = [0] * num_prompts
        self.completion = [0] * (num_prompts * n)
        self.reasoning = [0] * (num_prompts * n)
        self.prompt_told: list[tuple[TokenLogprob, ...] | None] = [None] * num_prompts

    def accepted(self, prompt: int, item: Accepted) -> None:
        self.prompt[prompt] = item.prompt_tokens
        self.prompt_ids[prompt] = item.ids
        self.thinks |= item.thinks

    def add(self, prompt: int, delta: Delta) -> None:
        index = prompt * self.n + delta.index
        self.completion[index] += len(delta.ids)
        if delta.prompt_logprobs is not None:
            self.prompt_told[prompt] = delta.prompt_logprobs
        if delta.usage is not None:
            self.prompt[prompt] = delta.usage.prompt_tokens
            self.completion[index] = delta.usage.completion_tokens
            self.reasoning[index] = delta.usage.reasoning_tokens
            if delta.index == 0:  # the later choices find the first one's prompt in the cache
                self.cached[prompt] = delta.usage.cached_tokens

    def running(self) -> dict[str, Any]:
        """Usage so far."""
        prompt, completion = sum(self.prompt), sum(self.completion)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def usage(self) -> dict[str, Any]:
        return {
            **self.running(),
            "prompt_tokens_details": {"cached_tokens": sum(self.cached)},
            "completion_tokens_details": {"reasoning_tokens": sum(self.reasoning)},
        }


class Answer:
    """Identity of one answer: the same in all its chunks. ``fingerprint``: of the server's build."""

    def __init__(self, call: Call, request_id: str, fingerprint: str) -> None:
        self.call = call
        self.chat = call.chat
        self.id = ("chatcmpl-" if call.chat else "cmpl-") + request_id.removeprefix("req_")
        self.model = call.model
        self.created = int(time.time())
        self.fingerprint = fingerprint
        self.writer = LogprobWriter(call.common.names_as_ids)

    def response(self, choices: list[dict[str, Any]], tally: Tally) -> dict[str, Any]:
        response: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": tally.usage(),
            "system_fingerprint": self.fingerprint,
        }
        if self.chat and self.call.return_ids:
            response["prompt_token_ids"] = tally.prompt_ids[0]
        if self.chat:
            response |= self._prompt_logprobs(tally.prompt_told[0])
        return response

    def choice(self, index: int, reply: Reply, last: Delta, tally: Tally) -> dict[str, Any]:
        what: dict[str, Any] = {"message": reply.message(tally.thinks)} if self.chat else {"text": reply.text}
        choice: dict[str, Any] = {
            "index": index,
            **what,
            "logprobs": self._logprobs(reply, last),
            "finish_reason": reply.finish(last.finish),
            "stop_reason": last.stop_reason,
        }
        if self.call.return_ids:
            choice["token_ids"] = reply.token_ids(last)
            if not self.chat:
                choice["prompt_token_ids"] = tally.prompt_ids[index // tally.n]
        if not self.chat:
            choice |= self._prompt_logprobs(tally.prompt_told[index // tally.n])
        return choice

    def _logprobs(self, reply: Reply, last: Delta) -> dict[str, Any] | None:
        if self.call.logprobs is None:
            return None
        told = reply.told(last)
        if self.chat:
            return self.writer.chat(told)
        return self.writer.completion(told, len(reply.echo), reply.prompt_told if self.call.scores_echo else ())

    def _prompt_logprobs(self, told: tuple[TokenLogprob, ...] | None) -> dict[str, Any]:
        most = self.call.common.sampling.prompt_logprobs
        return {} if most is None else {"prompt_logprobs": self.writer.prompt(told or (), most)}


class Chunks:
    """Frames of a stream. Without ``include_usage`` there is no usage key; ``continuous_usage``: every chunk has that so far."""

    def __init__(self, answer: Answer, echoes: list[str], tally: Tally) -> None:
        call, num_choices = answer.call, len(echoes)
        self._writer, self._echoes = answer.writer, echoes
        self._echo_due = set(range(num_choices)) if call.scores_echo else set()
        self._always = call.return_ids or call.logprobs is not None  # a chunk for each token, shown or not
        self._call = call
        self._chat = answer.chat
        self._tally = tally
        self._continuous = call.common.continuous_usage and call.common.include_usage
        self._replies = [ReplyDeltas(call.reasoning_names, call.forced_name) for _ in range(num_choices)]
        self._prompt_ids_sent = [not call.return_ids] * (1 if answer.chat else num_choices)
        name = "chat.completion.chunk" if answer.chat else "text_completion"
        head = {"id": answer.id, "object": name, "created": answer.created, "model": answer.model}
        self._ids_head = b"data: " + orjson.dumps(head)[:-1]
        self._head = self._ids_head + b',"choices":['
        field = b',"delta":{' if answer.chat else b',"text":'
        self._open = [self._head + b'{"index":' + str(i).encode() + field for i in range(num_choices)]
        self._reason = b',"finish_reason":null' + (b"" if answer.chat else b',"stop_reason":null')
        self._reasons = b',"logprobs":null' + self._reason
        self._tail = b',"usage":null}\n\n' if call.common.include_usage else b"}\n\n"

    def delta(self, index: int, delta: Delta) -> bytes:
        """The chunks of what is new; b"" if there is nothing to show."""
        return self._echoed(index, delta) + self._news(index, delta, always=self._always and bool(self._given(delta)))

    def last(self, index: int, delta: Delta) -> bytes:
        """The rest of a choice and why it ended: for chat, the reason has a chunk of its own."""
        why = b',"finish_reason":%s,"stop_reason":%s' % (
            orjson.dumps(self._replies[index].finish(delta.finish)),
            orjson.dumps(delta.stop_reason),
        )
        if not self._chat:
            extra = self._token_ids(delta)
            what = orjson.dumps(_text(delta))
            return self._echoed(index, delta) + self._frame(index, what, self._logprobs(index, delta) + why + extra)
        return self._news(index, delta, always=self._always and bool(self._given(delta))) + self._frame(
            index, b"}", b',"logprobs":null' + why
        )

    def role(self, index: int) -> bytes:
        """The first chunk of a chat choice."""
        return self._frame(index, b'"role":"assistant","content":""' + self._nulls() + b"}", self._reasons)

    def text(self, index: int, text: str) -> bytes:
        """Text that is not of the model: an echo."""
        shown = orjson.dumps(text)
        return self._frame(index, b'"content":' + shown + self._nulls() + b"}" if self._chat else shown, self._reasons)

    def usage(self) -> bytes:
        """The usage chunk: no choices, last before [DONE]."""
        return self._head + b'],"usage":' + orjson.dumps(self._tally.usage()) + b"}\n\n"

    def _news(self, index: int, delta: Delta, always: bool) -> bytes:
        if not self._chat:
            text = _text(delta)
            shown = text or always
            if not shown:
                return b""
            reasons = self._logprobs(index, delta) + self._reason
            return self._frame(index, orjson.dumps(text), reasons + self._token_ids(delta))
        bodies = list(self._replies[index].bodies(delta, self._nulls()))
        if not bodies and always:
            bodies = [b""]
        frames, extra = [], self._logprobs(index, delta) + self._reason + self._token_ids(delta)
        for body in bodies:
            frames.append(self._frame(index, body + b"}", extra))
            extra = self._reasons
        return b"".join(frames)

    def _logprobs(self, index: int, delta: Delta) -> bytes:
        """The member of the choice with those of the tokens that are new."""
        if self._call.logprobs is None or not delta.ids:
            return b',"logprobs":null'
        told = delta.logprobs or ()
        if not self._chat:
            return b',"logprobs":' + orjson.dumps(self._writer.completion(told, len(self._echoes[index])))
        told = told if self._call.reasoning_names else told[delta.n_reasoning :]
        return b',"logprobs":' + orjson.dumps(self._writer.chat(told))

    def _echoed(self, index: int, delta: Delta) -> bytes:
        """The prompt of a choice with its log probabilities, before the first of its output."""
        if index not in self._echo_due:
            return b""
        self._echo_due.discard(index)
        scored = orjson.dumps(self._writer.completion((), 0, delta.prompt_logprobs or ()))
        return self._frame(index, orjson.dumps(self._echoes[index]), b',"logprobs":' + scored + self._reason)

    def _frame(self, index: int, what: bytes, reasons: bytes) -> bytes:
        at = 0 if self._chat else index
        prompt = None if self._prompt_ids_sent[at] else self._tally.prompt_ids[at // self._tally.n]
        if prompt is None:
            return self._open[index] + what + reasons + b"}]" + self._end()
        self._prompt_ids_sent[at] = True
        ids = b',"prompt_token_ids":' + orjson.dumps(prompt)
        if self._chat:
            return (
                self._ids_head + ids + self._open[index][len(self._ids_head) :] + what + reasons + b"}]" + self._end()
            )
        return self._open[index] + what + reasons + ids + b"}]" + self._end()

    def _token_ids(self, delta: Delta) -> bytes:
        return b',"token_ids":' + orjson.dumps(self._given(delta)) if self._call.return_ids else b""

    def _given(self, delta: Delta) -> tuple[int, ...]:
        """The new tokens that are told of: not those of reasoning that is dropped."""
        return delta.ids if self._call.reasoning_names else delta.ids[delta.n_reasoning :]

    def _nulls(self) -> bytes:
        """Members of every delta without reasoning, so that clients may ask for them."""
        if not self._tally.thinks:
            return b""
        return b"".join(b',"%s":null' % name.encode() for name in self._call.reasoning_names)

    def _end(self) -> bytes:
        if self._continuous:
            return b',"usage":' + orjson.dumps(self._tally.running()) + b"}\n\n"
        return self._tail


def _text(delta: Delta) -> str:
    return "".join(part.text for part in parts_of(delta) if part.kind == "content")
