"""Frontends of other APIs than chat completions: their bodies become those of chat completions, and the outputs of these become
an object of their API, or the typed events that build it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
from pydantic import Field

from minisgl.api import Delta, EventStream, Exchange, FrontendContext, PluginSettings, bounds

from .generating import GeneratingFrontend, Outputs
from .openai_fields import OpenAISettings


class TranslatingSettings(PluginSettings):
    """Those of chat completions that mean something in a translation."""

    max_stop: int = Field(bounds.MAX_STOPS, ge=1, le=bounds.MAX_STOPS, description="most stop strings")
    exclude_tools_when_none: bool = Field(
        False, description="do not show the model tools that tool_choice none forbids"
    )


def event(kind: str, **members: Any) -> bytes:
    """The frame of a named event, which says its name in its JSON too."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **members}))


class EventAnswer(ABC):
    """One answer that is the object which its events build; the same steps make either."""

    @abstractmethod
    def start(self) -> bytes:
        """The events before the first output. Called once, maybe after ``events``."""

    @abstractmethod
    def events(self, delta: Delta) -> Iterator[bytes]:
        """Those of what is new; to be taken to their end."""

    @abstractmethod
    def end(self) -> bytes:
        """Those after the last output."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The object, after the last output."""


class TranslatingFrontend(GeneratingFrontend):
    Settings = TranslatingSettings

    def __init__(self, ctx: FrontendContext) -> None:
        super().__init__(replace(ctx, settings=OpenAISettings(**ctx.settings.model_dump())))

    async def _answer_events(self, x: Exchange, answer: EventAnswer, outputs: Outputs, stream: bool) -> None:
        async def produce(events: EventStream) -> None:
            async with aclosing(outputs):
                async for _, delta in outputs:
                    frames = b"".join(answer.events(delta))
                    # An output whose text is held back sends the head: the status is certain all the same.
                    if frames or not events.started:
                        await events.send(frames)
            await events.finish(answer.end())

        async def collect() -> dict[str, Any]:
            async with aclosing(outputs):
                async for _, delta in outputs:
                    for _ in answer.events(delta):
                        pass
            return answer.whole()

        if stream:
            await x.stream(produce, answer.start)
        else:
            await x.respond_json(await x.attached(collect()))
