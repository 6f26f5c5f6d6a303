"""The OpenAI API: chat completions, completions, models, and the tokenize routes that evaluation tools use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import cache
from typing import TYPE_CHECKING, Any

from minisgl.api import (
    EngineInfo,
    EventStream,
    Exchange,
    route,
)

from . import openai_about as about
from .generating import GeneratingFrontend, Outputs
from .openai_chunks import Answer, Chunks, Tally
from .openai_fields import OpenAISettings, model_not_found
from .openai_reply import Reply
from .openai_request import Call, read_chat, read_completion
from .openai_tokenize import read_detokenize, read_tokenize

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

Read = Callable[[dict[str, Any], EngineInfo, OpenAISettings], Call]


class OpenAIFrontend(GeneratingFrontend):
    def routes(self) -> list[BaseRoute]:
        return [
            route("POST", "/v1/chat/completions", self.chat, about.chat(self.settings)),
            route("POST", "/v1/completions", self.completions, about.completions(self.settings)),
            route("GET", "/v1/models", self.models, about.MODELS),
            route("GET", "/v1/models/{id:path}", self.model, about.MODEL),
            *(route("POST", f"{root}/tokenize", self.tokenize, about.TOKENIZE) for root in ("", "/v1")),
            *(route("POST", f"{root}/detokenize", self.detokenize, about.DETOKENIZE) for root in ("", "/v1")),
        ]

    # -------------------------------------------------------------------------------------------------------- generation

    async def chat(self, x: Exchange) -> None:
        await self._answer(x, read_chat)

    async def completions(self, x: Exchange) -> None:
        await self._answer(x, read_completion)

    async def _answer(self, x: Exchange, read: Read) -> None:
        call = await x.read(lambda body: read(body, self._info(), self.settings))
        call = call.counted_for(x.header(b"authorization"))
        if call.common.request_id is not None:
            x.request_id = call.common.request_id
        answer = Answer(call, x.request_id, self.fingerprint)
        tally = Tally(len(call.prompts), call.n)
        echoes = await self._echoes(call)
        outputs = self._outputs(call, self._info(), tally)
        if call.common.stream:
            await self._stream(x, Chunks(answer, echoes, tally), call, echoes, outputs)
        else:
            await x.respond_json(await x.attached(self._collect(answer, tally, echoes, outputs)))

    async def _collect(self, answer: Answer, tally: Tally, echoes: list[str], outputs: Outputs) -> dict[str, Any]:
        """The whole response object."""
        call = answer.call
        replies = [Reply(echo, call.reasoning_names, call.forced_name) for echo in echoes]
        choices: list[dict[str, Any]] = []
        async with aclosing(outputs):
            async for index, delta in outputs:
                replies[index].add(delta)
                if delta.finish is not None:
                    choices.append(answer.choice(index, replies[index], delta, tally))
        choices.sort(key=lambda c: int(c["index"]))
        return answer.response(choices, tally)

    async def _stream(self, x: Exchange, chunks: Chunks, call: Call, echoes: list[str], outputs: Outputs) -> None:
        @cache  # made when the first output is, or when the head has to go out before it
        def prologue() -> bytes:
            roles = [chunks.role(i) for i in range(len(echoes))] if call.chat else []
            if call.scores_echo:  # each goes out when its log probabilities are there
                return b""
            return b"".join(roles + [chunks.text(i, echo) for i, echo in enumerate(echoes) if echo])

        async def produce(events: EventStream) -> None:
            async with aclosing(outputs):
                async for index, delta in outputs:
                    prologue()
                    frames = chunks.delta(index, delta) if delta.finish is None else chunks.last(index, delta)
                    # An output whose text is held back sends the head: the status is certain all the same.
                    if frames or not events.started:
                        await events.send(frames)
            await events.finish(chunks.usage() if call.common.include_usage else b"")

        await x.stream(produce, prologue)

    async def _echoes(self, call: Call) -> list[str]:
        """What goes before the text of each choice."""
        if not call.echo_ids:
            return [text or "" for text in call.echo for _ in range(call.n)]
        decode = [r.ids for r in call.prompts if r.ids is not None]
        decoded = iter(await asyncio.gather(*(self.client.detokenize(ids) for ids in decode)))
        texts = [next(decoded) if text is None else text for text in call.echo]
        return [text for text in texts for _ in range(call.n)]

    # ------------------------------------------------------------------------------------------------------------ models

    async def models(self, x: Exchange) -> None:
        info = self._info()
        await x.respond_json({"object": "list", "data": [_model(name, info) for name in info.served_names]})

    async def model(self, x: Exchange) -> None:
        info, name = self._info(), str(x.path_params["id"])
        if name not in info.served_names:
            raise model_not_found(name, info)
        await x.respond_json(_model(name, info))

    # ---------------------------------------------------------------------------------------------------------- tokenize

    async def tokenize(self, x: Exchange) -> None:
        """``prompt`` or ``messages`` to token ids."""
        request, wants_text = await x.read(lambda body: read_tokenize(body, self._info()))
        ids = await self.client.tokenize(request)
        texts = [await self.client.detokenize([i]) for i in ids] if wants_text else None
        most = self._info().max_len
        await x.respond_json({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})

    async def detokenize(self, x: Exchange) -> None:
        ids = await x.read(lambda body: read_detokenize(body, self._info()))
        await x.respond_json({"prompt": await self.client.detokenize(ids)})


def _model(name: str, info: EngineInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "minisgl",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_len,
    }
