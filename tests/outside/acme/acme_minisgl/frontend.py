"""``/acme``: a small door to the model."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from pydantic import Field

from minisgl.api import (
    Delta,
    Exchange,
    GenerateRequest,
    HttpFrontend,
    PluginSettings,
    RequestError,
    SamplingParams,
    route,
)


class AcmeFrontend(HttpFrontend):
    """GET says what is served; POST ``{"prompt": ...}`` answers with its greedy continuation as ``text``."""

    class Settings(PluginSettings):
        max_tokens: int = Field(16, ge=1, description="tokens of an answer")

    def routes(self) -> list[Any]:
        return [route("GET", "/acme", self._about), route("POST", "/acme", self._continue)]

    async def _about(self, x: Exchange) -> None:
        info = self.ctx.client.info
        await x.respond_json(
            {"acme": "0.3", "model": info.model if info else None, "picks": dict(info.picks) if info else {}}
        )

    async def _continue(self, x: Exchange) -> None:
        prompt = (await x.json()).get("prompt")
        if not isinstance(prompt, str):
            raise RequestError("prompt must be a string", code="invalid_type", param="prompt")
        sampling = SamplingParams(temperature=0.0, max_tokens=self.ctx.settings.max_tokens)
        text = await x.attached(self._text(GenerateRequest(text=prompt, sampling=sampling)))
        await x.respond_json({"text": text})

    async def _text(self, request: GenerateRequest) -> str:
        """The whole output; ends at once when the client leaves."""
        parts = []
        async with aclosing(self.ctx.client.generate(request)) as items:
            async for item in items:
                if isinstance(item, Delta):
                    if item.finish in ("error", "abort"):
                        raise RequestError(item.error or "the request was ended", status=500, code="internal_error")
                    parts.append(item.text)
        return "".join(parts)
