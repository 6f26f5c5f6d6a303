"""Anthropic's Python client, through /v1/messages."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from servers import Real, Scripted

anthropic = pytest.importorskip("anthropic", reason="the client 'anthropic' is not installed")

USER: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def sdk(scripted: Scripted) -> Any:
    with anthropic.Anthropic(base_url=scripted.url, api_key=scripted.key, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def real_sdk(real: Real) -> Any:
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def answered(sdk: Any, ask: dict[str, Any], streamed: bool) -> Any:
    """The message, whole or put together of a stream."""
    if not streamed:
        return sdk.messages.create(**ask)
    with sdk.messages.stream(**ask) as stream:
        return stream.get_final_message()


def test_whole_and_streamed_messages_and_their_usage_agree(real: Real, real_sdk: Any) -> None:
    ask = {"model": real.model, "messages": USER, "max_tokens": 40, "extra_body": {"temperature": 0}}
    whole = real_sdk.messages.create(**ask)
    with real_sdk.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert [b.text for b in whole.content] == [b.text for b in final.content] == [ANSWER]
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert whole.usage.output_tokens == final.usage.output_tokens


def test_tokens_are_counted_as_usage_says(real: Real, real_sdk: Any) -> None:
    ask = {"model": real.model, "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    count = real_sdk.messages.count_tokens(**ask).input_tokens
    usage = real_sdk.messages.create(**ask, max_tokens=1).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


def test_a_forced_tool_call_of_a_real_model_has_valid_input(real: Real, real_sdk: Any) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    got = real_sdk.messages.create(model=real.model, messages=USER, max_tokens=100, tools=[TOOL], tool_choice=choice)
    (block,) = [b for b in got.content if b.type == "tool_use"]
    assert block.name == "weather"
    assert block.input["city"] in ("Paris", "Rome")
    assert 1 <= block.input["days"] <= 9


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_go_round(scripted: Scripted, sdk: Any, streamed: bool) -> None:
    scripted.replies("Let me see." + scripted.call("weather", city="Paris", days=2))
    ask = {"model": scripted.model, "max_tokens": 500, "messages": USER, "tools": [TOOL]}
    message = answered(sdk, ask, streamed)
    text, call = message.content
    assert (text.text, message.stop_reason) == ("Let me see.", "tool_use")
    assert (call.name, call.input) == ("weather", {"city": "Paris", "days": 2})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny, 21 degrees"}]}
    turns = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    asked = sdk.messages.create(**{**ask, "messages": turns})  # a prompt is its own answer
    assert "sunny, 21 degrees" in asked.content[0].text


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_goes_round(scripted: Scripted, sdk: Any, streamed: bool) -> None:
    scripted.replies("<think>\nWhy not?\n</think>\n\n" + scripted.call("weather", city="Paris", days=2))
    ask = {"model": scripted.model, "max_tokens": 1000, "messages": USER, "tools": [TOOL]}
    ask["thinking"] = {"type": "adaptive"}
    message = answered(sdk, ask, streamed)
    thought, call = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Why not?")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    asked = sdk.messages.create(**{**ask, "messages": turns})  # a prompt is its own answer
    assert "assistant: thinks Why not? " in asked.content[0].text


def test_its_own_tool_loop_runs_a_function(scripted: Scripted, sdk: Any) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "sunny"

    scripted.replies(scripted.call("weather", city="Rome"), "It is sunny.")
    runner = sdk.beta.messages.tool_runner(model=scripted.model, max_tokens=100, tools=[weather], messages=USER)
    assert [b.text for b in runner.until_done().content] == ["It is sunny."]
    assert asked == ["Rome"]


def test_structured_output_is_parsed(real: Real, real_sdk: Any) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        capital: bool
        continent: Literal["Asia", "Europe"]

    got = real_sdk.messages.parse(model=real.model, messages=USER, max_tokens=100, output_format=City)
    assert isinstance(got.parsed_output, City)


def test_errors_are_exceptions_of_their_kind(scripted: Scripted, sdk: Any) -> None:
    ask = {"model": scripted.model, "max_tokens": 10, "messages": USER}
    with pytest.raises(anthropic.NotFoundError, match="'other'"):
        sdk.messages.create(**{**ask, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        sdk.messages.create(**ask, extra_body={"temperature": 3})
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* context length is 200000 tokens"):
        sdk.messages.create(**{**ask, "messages": [{"role": "user", "content": "x" * 200_001}]})
    with pytest.raises(anthropic.AuthenticationError):
        sdk.with_options(api_key="wrong").messages.create(**ask)


def test_models_are_listed(real: Real, real_sdk: Any) -> None:
    assert [m.id for m in real_sdk.models.list()] == [real.model]
