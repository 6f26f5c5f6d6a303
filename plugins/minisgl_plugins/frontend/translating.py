"""Frontends of other APIs than chat completions: their bodies become those of chat completions, and the outputs of these become
an object of their API, or the typed events that build it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import orjson
from pydantic import Field

from minisgl.api import Delta, EventStream, Exchange, FrontendContext, PluginSettings, RequestError, bounds

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


@contextmanager
def renaming(names: Mapping[str, str], words: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields of this API's body instead of those of the chat body that were made of them.

    Args: names: paths of the chat body -> what stands there in this one, the longest first. words: fields that messages may quote.
    """
    try:
        yield
    except RequestError as e:
        param, message = e.param, e.message
        for theirs, ours in names.items():
            if param is not None and (param == theirs or param.startswith((f"{theirs}.", f"{theirs}["))):
                param = ours + param.removeprefix(theirs)
                message = message.replace(f"'{e.param}'", f"'{param}'")
                break  # what it is now may be a name of theirs for something else
        for theirs, ours in words.items():
            message = message.replace(f"'{theirs}'", f"'{ours}'")
        raise RequestError(message, status=e.status, code=e.code, param=param, retry_after=e.retry_after) from e


async def renamed(outputs: Outputs, names: Mapping[str, str], words: Mapping[str, str]) -> AsyncGenerator[Any, None]:
    """The outputs; errors of them are those of ``renaming``."""
    with renaming(names, words):
        async with aclosing(outputs):
            async for item in outputs:
                yield item


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
