"""What the HTTP frontends of this package share: the outputs of a request's prompts as one stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import ClassVar

from minisgl.api import (
    Accepted,
    Delta,
    EngineInfo,
    FrontendContext,
    GenerateRequest,
    HttpFrontend,
    PluginSettings,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Usage,
    unavailable,
)

from .openai_chunks import FINISH_REASONS, Tally
from .openai_fields import OpenAISettings
from .openai_merge import merged
from .openai_request import Call

Generate = Callable[[GenerateRequest], AsyncGenerator[Accepted | Delta, None]]
Outputs = AsyncGenerator[tuple[int, Delta], None]


class GeneratingFrontend(HttpFrontend):
    Settings: ClassVar[type[PluginSettings]] = OpenAISettings

    def __init__(self, ctx: FrontendContext) -> None:
        super().__init__(ctx)
        self.client = ctx.client
        self.settings: OpenAISettings = ctx.settings
        self.fingerprint = f"minisgl-{version('minisgl')}"

    async def _outputs(self, call: Call, info: EngineInfo, tally: Tally) -> Outputs:
        """(choice index, delta) of all prompts as they come; counts them. Nothing comes before every prompt is accepted, so
        that one that is refused still decides the status. Raises: RequestError, also in the middle."""
        generate: Generate = self.client.generate
        if call.no_output:
            generate = self._scored_echo if call.prompts[0].sampling.prompt_logprobs is not None else self._echo_only
        waiting = len(call.prompts)
        early: list[tuple[int, Delta]] = []
        async with aclosing(merged([generate(r) for r in call.prompts])) as items:
            async for prompt, item in items:
                if isinstance(item, Accepted):
                    tally.accepted(prompt, item)
                    waiting -= 1
                elif item.finish is not None and item.finish not in FINISH_REASONS:
                    raise self._failed(item)
                else:
                    early.append((prompt, item))
                if waiting == 0:
                    for at, delta in early:
                        tally.add(at, delta)
                        yield at * call.n + delta.index, delta
                    early.clear()

    async def _echo_only(self, request: GenerateRequest) -> AsyncGenerator[Accepted | Delta, None]:
        """max_tokens 0: count the prompt, generate nothing (fault A10: the engine never sees it)."""
        prompt = replace(request, sampling=SamplingParams())
        count = len(await self.client.tokenize(prompt)) if request.ids is None else len(request.ids)
        limit = self._info().max_len
        if count > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested {count} tokens "
                f"({count} in the prompt, 0 in the completion).",
                code="context_length_exceeded",
                param="prompt",
            )
        yield Accepted(0, count)
        for index in range(request.n):
            yield Delta(0, index, finish="length", usage=Usage(count, 0))

    async def _scored_echo(self, request: GenerateRequest) -> AsyncGenerator[Accepted | Delta, None]:
        """max_tokens 0 with log probabilities of the prompt: it is computed, and the token that comes after it is dropped."""
        prompts: dict[int, tuple[TokenLogprob, ...] | None] = {}
        async with aclosing(self.client.generate(request)) as items:
            async for item in items:
                if isinstance(item, Accepted):
                    yield item
                    continue
                prompts.setdefault(item.index, item.prompt_logprobs)
                if item.finish in FINISH_REASONS and item.usage is not None:
                    usage = replace(item.usage, completion_tokens=0)
                    told = prompts[item.index]
                    yield Delta(item.uid, item.index, finish="length", usage=usage, prompt_logprobs=told)
                elif item.finish is not None:
                    yield item

    def _failed(self, item: Delta) -> RequestError:
        """An output that the engine ended by itself; its own words for that never reach the wire."""
        why = item.error or "The engine ended this request before it was complete."
        code = self.client.healthy()
        known = ("engine_dead", "server_draining")
        return RequestError(why, status=500, code=code if code in known else "internal_error")

    def _info(self) -> EngineInfo:
        """Raises: RequestError 503 while no request can be served."""
        code = self.client.healthy()
        info: EngineInfo | None = self.client.info
        if code is not None or info is None:
            raise unavailable(code or "model_loading")
        return info
