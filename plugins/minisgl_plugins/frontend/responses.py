"""The OpenAI API's responses, stateless: a translation to chat completions, and their outputs as items and typed events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from minisgl.api import ErrorShape, Exchange, FrontendContext, PluginSettings, bounds, route

from .generating import GeneratingFrontend
from .openai_chunks import Tally
from .openai_fields import OpenAISettings
from .responses_answer import ResponseAnswer
from .responses_request import read_response

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


class ResponsesSettings(PluginSettings):
    max_stop: int = Field(bounds.MAX_STOPS, ge=1, le=bounds.MAX_STOPS, description="most stop strings")
    strict: bool = Field(False, description="refuse unknown fields instead of ignoring them")
    exclude_tools_when_none: bool = Field(
        False, description="do not show the model tools that tool_choice none forbids"
    )


class ResponsesFrontend(GeneratingFrontend):
    Settings = ResponsesSettings  # those of chat completions that mean something here

    def __init__(self, ctx: FrontendContext) -> None:
        super().__init__(replace(ctx, settings=OpenAISettings(**ctx.settings.model_dump())))

    def routes(self) -> list[BaseRoute]:
        return [route("POST", "/v1/responses", self.responses)]

    async def responses(self, x: Exchange) -> None:
        body = await x.json()
        info = self._info()
        asked = read_response(body, info, self.settings)
        call = asked.call.counted_for(x.header(b"authorization"))
        if call.common.request_id is not None:
            x.request_id = call.common.request_id
        tally = Tally(1, 1)
        answer = ResponseAnswer(asked, tally, x.request_id)
        x.state.errors = ErrorShape(frame=answer.failed, done=b"")
        outputs = asked.renamed(self._outputs(call, info, tally))
        await self._answer_events(x, answer, outputs, call.common.stream)
