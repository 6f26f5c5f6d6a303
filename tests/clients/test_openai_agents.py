"""OpenAI's Agents SDK, by chat completions and by responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from servers import Real, Scripted

agents = pytest.importorskip("agents", reason="the client 'openai-agents' is not installed")
openai = pytest.importorskip("openai", reason="the client 'openai' is not installed")

QUESTION = "What is the weather in Rome?"
APIS = ("chat_completions", "responses")


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(autouse=True)
def no_traces() -> None:
    agents.set_tracing_disabled(True)  # they would go to OpenAI


def model(api: str, name: str, url: str, key: str) -> Any:
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api == "chat_completions" else agents.OpenAIResponsesModel
    return kind(model=name, openai_client=client)


@pytest.fixture(params=APIS)
def scripted_model(request: pytest.FixtureRequest, scripted: Scripted) -> Any:
    return model(request.param, scripted.model, scripted.v1, scripted.key)


@pytest.fixture(params=APIS)
def real_model(request: pytest.FixtureRequest, real: Real) -> Any:
    return model(request.param, real.model, real.v1, "none")


def run(agent: Any, streamed: bool = False) -> Any:
    async def go() -> Any:
        if not streamed:
            return await agents.Runner.run(agent, QUESTION)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.run(go())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_runs_its_tool_and_answers(scripted: Scripted, scripted_model: Any, streamed: bool) -> None:
    asked: list[str] = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny, 21 degrees"

    counted = agents.ModelSettings(include_usage=True)
    agent = agents.Agent(
        name="A", instructions="Be brief.", tools=[weather], model=scripted_model, model_settings=counted
    )
    scripted.replies("Let me see." + scripted.call("weather", city="Rome"))
    result = run(agent, streamed)  # without replies left, a prompt is its own answer
    assert asked == ["Rome"]
    assert "system: Be brief." in result.final_output
    assert "tool: sunny, 21 degrees" in result.final_output
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_that_reasons_runs_its_tool(scripted: Scripted, scripted_model: Any, streamed: bool) -> None:
    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    scripted.replies("<think>\nWhy not?\n</think>\n\n" + scripted.call("weather", city="Rome"))
    result = run(agents.Agent(name="A", tools=[weather], model=scripted_model), streamed)
    assert "tool: rain in Rome" in result.final_output  # a prompt is its own answer
    reasoning = [item for item in result.new_items if item.type == "reasoning_item"]
    assert len(reasoning) == 1


def test_two_calls_in_one_answer(scripted: Scripted, scripted_model: Any) -> None:
    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    scripted.replies(scripted.call("weather", city="Rome") + scripted.call("weather", city="Paris"))
    agent = agents.Agent(name="A", tools=[weather], model=scripted_model)
    assert "tool: rain in Rome\ntool: rain in Paris" in run(agent).final_output


def test_work_is_handed_to_another_agent(scripted: Scripted, scripted_model: Any) -> None:
    expert = agents.Agent(name="expert", instructions="You know it all.", model=scripted_model)
    agent = agents.Agent(name="A", handoffs=[expert], model=scripted_model)
    scripted.replies(scripted.call("transfer_to_expert"), "It is sunny.")
    result = run(agent)
    assert (result.last_agent.name, result.final_output) == ("expert", "It is sunny.")


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_output_of_a_real_model(real_model: Any, streamed: bool) -> None:
    agent = agents.Agent(name="A", output_type=Weather, model=real_model)
    assert isinstance(run(agent, streamed).final_output, Weather)


def test_errors_are_those_of_the_client(scripted: Scripted) -> None:
    for api in APIS:
        agent = agents.Agent(name="A", model=model(api, "other", scripted.v1, scripted.key))
        with pytest.raises(openai.NotFoundError, match="'other'"):
            run(agent)
