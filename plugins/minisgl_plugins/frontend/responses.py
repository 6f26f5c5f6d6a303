"""The OpenAI API's responses, stateless: a translation to chat completions, and their outputs as items and typed events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from minisgl.api import ErrorShape, Exchange, route

from .openai_chunks import Tally
from .responses_about import responses
from .responses_answer import ResponseAnswer
from .responses_request import NAMES, read_response
from .translating import TranslatingFrontend, TranslatingSettings, renamed

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


class ResponsesSettings(TranslatingSettings):
    strict: bool = Field(False, description="refuse unknown fields instead of ignoring them")


class ResponsesFrontend(TranslatingFrontend):
    Settings = ResponsesSettings

    def routes(self) -> list[BaseRoute]:
        return [route("POST", "/v1/responses", self.responses, responses(self.settings))]

    async def responses(self, x: Exchange) -> None:
        asked = await x.read(lambda body: read_response(body, self._info(), self.settings))
        call = asked.call.counted_for(x.header(b"authorization"))
        if call.common.request_id is not None:
            x.request_id = call.common.request_id
        tally = Tally(1, 1)
        answer = ResponseAnswer(asked, tally, x.request_id)
        x.state.errors = ErrorShape(frame=answer.failed, done=b"")
        outputs = renamed(self._outputs(call, self._info(), tally), asked.names, NAMES)
        await self._answer_events(x, answer, outputs, call.common.stream)
