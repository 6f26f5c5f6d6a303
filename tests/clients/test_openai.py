"""The official Python client."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from servers import Real, Scripted

openai = pytest.importorskip("openai", reason="the client 'openai' is not installed")

USER: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


TOOL = openai.pydantic_function_tool(Weather, name="weather")


@pytest.fixture
def sdk(scripted: Scripted) -> Any:
    with openai.OpenAI(base_url=scripted.v1, api_key=scripted.key, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def real_sdk(real: Real) -> Any:
    with openai.OpenAI(base_url=real.v1, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_whole_and_streamed_answers_and_their_usage_agree(real: Real, real_sdk: Any) -> None:
    ask = {"model": real.model, "messages": USER, "temperature": 0}
    whole = real_sdk.chat.completions.create(**ask)
    with real_sdk.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert whole.choices[0].message.content == final.choices[0].message.content == ANSWER
    assert whole.usage.completion_tokens == final.usage.completion_tokens
    assert whole.usage.prompt_tokens == final.usage.prompt_tokens
    assert whole._request_id


def test_structured_output_is_parsed(real: Real, real_sdk: Any) -> None:
    got = real_sdk.chat.completions.parse(model=real.model, messages=USER, response_format=Weather, temperature=0)
    assert isinstance(got.choices[0].message.parsed, Weather)


def test_a_forced_tool_call_of_a_real_model_has_valid_arguments(real: Real, real_sdk: Any) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    got = real_sdk.chat.completions.parse(model=real.model, messages=USER, tools=[TOOL], tool_choice=choice)
    (call,) = got.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(call.function.parsed_arguments, Weather)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_go_round(scripted: Scripted, sdk: Any, streamed: bool) -> None:
    scripted.replies("Let me see." + scripted.call("weather", city="Paris", days=2))
    ask = {"model": scripted.model, "messages": USER, "tools": [TOOL]}
    if streamed:
        with sdk.chat.completions.stream(**ask) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = sdk.chat.completions.create(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris", "days": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    asked = sdk.chat.completions.create(
        **{**ask, "messages": [*USER, choice.message, result]}
    )  # a prompt is its own answer
    assert "sunny, 21 degrees" in asked.choices[0].message.content


def test_errors_are_exceptions_of_their_kind_with_message_code_and_param(scripted: Scripted, sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'other'") as unknown:
        sdk.chat.completions.create(model="other", messages=USER)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        sdk.chat.completions.create(model=scripted.model, messages=USER, temperature=3)
    assert (refused.value.code, refused.value.param) == ("decimal_above_max_value", "temperature")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 200000 tokens") as long:
        sdk.completions.create(model=scripted.model, prompt="x" * 200_001)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError) as key:
        sdk.with_options(api_key="wrong").models.list()
    assert key.value.code == "invalid_api_key"


def test_completions_give_log_probabilities(real: Real, real_sdk: Any) -> None:
    got = real_sdk.completions.create(
        model=real.model, prompt="The capital of France is", max_tokens=4, logprobs=2, echo=True, temperature=0
    )
    told = got.choices[0].logprobs
    assert got.choices[0].text == "".join(told.tokens)
    assert len(told.token_logprobs) == len(told.tokens) == got.usage.total_tokens
    assert told.token_logprobs[0] is None
    chat = real_sdk.chat.completions.create(
        model=real.model, messages=USER, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    for token in chat.choices[0].logprobs.content:
        assert max(t.logprob for t in token.top_logprobs) == token.logprob


def test_responses_whole_and_streamed_agree(real: Real, real_sdk: Any) -> None:
    ask = {"model": real.model, "input": USER, "temperature": 0}
    whole = real_sdk.responses.create(**ask)
    with real_sdk.responses.stream(**ask) as stream:
        final = stream.get_final_response()
    assert whole.output_text == final.output_text == ANSWER
    assert (whole.status, final.status) == ("completed", "completed")
    assert whole.usage.output_tokens == final.usage.output_tokens > 0
    assert whole.usage.input_tokens == final.usage.input_tokens


def test_responses_are_parsed(real: Real, real_sdk: Any) -> None:
    got = real_sdk.responses.parse(model=real.model, input=USER, text_format=Weather)
    assert isinstance(got.output_parsed, Weather)


def responded(sdk: Any, ask: dict[str, Any], streamed: bool) -> Any:
    """The response, whole or put together of a stream."""
    if not streamed:
        return sdk.responses.create(**ask)
    with sdk.responses.stream(**ask) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_go_round_with_responses(scripted: Scripted, sdk: Any, streamed: bool) -> None:
    scripted.replies("Let me see." + scripted.call("weather", city="Paris", days=2))
    tool = {"type": "function", **TOOL["function"]}
    ask = {"model": scripted.model, "input": USER, "tools": [tool]}
    got = responded(sdk, ask, streamed)
    message, call = got.output
    assert message.content[0].text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris", "days": 2})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    asked = sdk.responses.create(**{**ask, "input": [*USER, *got.output, result]})  # a prompt is its own answer
    assert "tool: sunny, 21 degrees" in asked.output_text


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_goes_round_with_responses(scripted: Scripted, sdk: Any, streamed: bool) -> None:
    scripted.replies("<think>\nWhy not?\n</think>\n\n" + scripted.call("weather", city="Paris", days=2))
    ask = {"model": scripted.model, "input": USER, "tools": [{"type": "function", **TOOL["function"]}]}
    got = responded(sdk, ask, streamed)
    reasoning, call = got.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Why not?")
    assert 0 < got.usage.output_tokens_details.reasoning_tokens < got.usage.output_tokens
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked = sdk.responses.create(**{**ask, "input": [*USER, *got.output, result]})  # a prompt is its own answer
    assert "assistant: thinks Why not? " in asked.output_text
    assert "tool: sunny" in asked.output_text


def test_models_are_listed(real: Real, real_sdk: Any) -> None:
    assert [m.id for m in real_sdk.models.list()] == [real.model]
    assert real_sdk.models.retrieve(real.model).id == real.model


def test_streams_of_the_async_client_side_by_side(scripted: Scripted) -> None:
    async def tell(client: Any, text: str) -> str:
        stream = await client.completions.create(model=scripted.model, prompt=text, max_tokens=100, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=scripted.v1, api_key=scripted.key, max_retries=0) as client:
            return await asyncio.gather(*(tell(client, text) for text in texts))

    texts = [f"number {i}: héllo 世界" for i in range(16)]  # a prompt is its own answer
    assert asyncio.run(go()) == texts
