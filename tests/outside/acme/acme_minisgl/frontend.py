"""``/acme``: a small door to the model."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from pydantic import Field

from minisgl.api import (
    Delta,
    Exchange,
    Fields,
    GenerateRequest,
    HttpFrontend,
    Note,
    PluginSettings,
    RequestError,
    SamplingParams,
    route,
)
from minisgl.api.openapi import JSON, OBJECT, STRING, About, Body, record


def read_prompt(body: dict[str, Any], note: Note | None = None) -> str:
    """``note``: for the published description, which says of the body what is read here."""
    return Fields(body, note=note).need("prompt").string()


ABOUT = About("What is served.", {JSON: OBJECT})
CONTINUE = About(
    "Go on with a text.", {JSON: record({"text": STRING})}, Body("Acme", read_prompt, [{"prompt": "Once"}])
)


class AcmeFrontend(HttpFrontend):
    """GET says what is served; POST ``{"prompt": ...}`` answers with its greedy continuation as ``text``."""

    class Settings(PluginSettings):
        max_tokens: int = Field(16, ge=1, description="tokens of an answer")

    def routes(self) -> list[Any]:
        return [route("GET", "/acme", self._about, ABOUT), route("POST", "/acme", self._continue, CONTINUE)]

    async def _about(self, x: Exchange) -> None:
        info = self.ctx.client.info
        await x.respond_json(
            {"acme": "0.3", "model": info.model if info else None, "picks": dict(info.picks) if info else {}}
        )

    async def _continue(self, x: Exchange) -> None:
        prompt = await x.read(read_prompt)
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
