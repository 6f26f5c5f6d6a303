"""Pydantic AI, through each of the three APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from servers import Real, Scripted

pytest.importorskip("pydantic_ai", reason="the client 'pydantic-ai' is not installed")

from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the capital of France?"
APIS = ("chat", "responses", "messages")


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def model(api: str, server: Real | Scripted, name: str = "") -> Any:
    key = getattr(server, "key", "none")
    if api == "messages":
        return AnthropicModel(name or server.model, provider=AnthropicProvider(base_url=server.url, api_key=key))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(name or server.model, provider=OpenAIProvider(base_url=server.v1, api_key=key))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_that_reasons_runs_its_tool_and_answers(scripted: Scripted, api: str, streamed: bool) -> None:
    agent = Agent(model(api, scripted), instructions="Be brief.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    async def stream() -> tuple[str, Any]:
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output(), result.usage

    scripted.replies("<think>\nWhy not?\n</think>\n\n" + scripted.call("weather", city="Rome"), "It rains.")
    if streamed:
        output, usage = asyncio.run(stream())
    else:
        result = agent.run_sync(QUESTION)
        output, usage = result.output, result.usage
    assert output == "It rains."
    told = usage() if callable(usage) else usage
    assert (told.requests, told.tool_calls) == (2, 1)
    assert told.output_tokens > len("It rains.")


@pytest.mark.parametrize(
    ("api", "kind"),  # native output by messages is only for models that the client knows to have it
    [(api, kind) for api in APIS for kind in (ToolOutput, NativeOutput) if (api, kind) != ("messages", NativeOutput)],
)
def test_a_small_real_model_gives_a_valid_object_by_a_call_and_by_a_schema(real: Real, api: str, kind: Any) -> None:
    agent = Agent(model(api, real), output_type=kind(Weather), retries=0, model_settings={"max_tokens": 200})
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


@pytest.mark.parametrize("api", APIS)
def test_an_invalid_object_is_asked_for_again(scripted: Scripted, api: str) -> None:
    replies = [scripted.call("final_result", city="Paris", days=days) for days in (99, 3)]
    scripted.replies(*replies)
    agent = Agent(model(api, scripted), output_type=ToolOutput(Weather), retries=1)
    assert agent.run_sync(QUESTION).output.days == 3


@pytest.mark.parametrize("api", APIS)
def test_errors_show_what_the_server_said(scripted: Scripted, api: str) -> None:
    with pytest.raises(ModelHTTPError, match="'other'") as error:
        Agent(model(api, scripted, "other")).run_sync(QUESTION)
    assert error.value.status_code == 404
