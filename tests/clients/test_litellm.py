"""LiteLLM, which many agents and gateways call servers through."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from servers import Real, Scripted

litellm = pytest.importorskip("litellm", reason="the client 'litellm' is not installed")

USER: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}}


@pytest.fixture
def base(scripted: Scripted) -> dict[str, Any]:
    model = f"hosted_vllm/{scripted.model}"
    return {"model": model, "api_base": scripted.v1, "api_key": scripted.key, "messages": USER, "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_whole_and_streamed_answers_and_their_usage_agree(real: Real, provider: str) -> None:
    ask = {
        "model": f"{provider}/{real.model}",
        "api_base": real.v1,
        "api_key": "none",
        "messages": USER,
        "temperature": 0,
    }
    whole = litellm.completion(**ask)
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    final = litellm.stream_chunk_builder(chunks, messages=USER)
    assert whole.choices[0].message.content == final.choices[0].message.content == ANSWER
    assert whole.usage.completion_tokens == final.usage.completion_tokens
    assert whole.usage.prompt_tokens == final.usage.prompt_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_go_round(scripted: Scripted, base: dict[str, Any], streamed: bool) -> None:
    scripted.replies(scripted.call("weather", city="Paris") + scripted.call("weather", city="Rome"))
    got = litellm.completion(**base, tools=[TOOL], stream=streamed)
    if streamed:
        got = litellm.stream_chunk_builder(list(got), messages=USER)
    message = got.choices[0].message
    assert got.choices[0].finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    results = [
        {"role": "tool", "tool_call_id": c.id, "content": f"result {i}"} for i, c in enumerate(message.tool_calls)
    ]
    again = litellm.completion(**{**base, "messages": [*USER, message, *results]}, tools=[TOOL])
    assert "tool: result 0\ntool: result 1" in again.choices[0].message.content  # a prompt is its own answer


def test_structured_output_has_its_schema(real: Real) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        capital: bool
        continent: Literal["Asia", "Europe"]

    got = litellm.completion(
        model=f"openai/{real.model}", api_base=real.v1, api_key="none", messages=USER, response_format=City
    )
    City.model_validate_json(got.choices[0].message.content)


def test_errors_are_exceptions_of_their_kind(scripted: Scripted, base: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is 200000 tokens"):
        litellm.completion(**{**base, "messages": [{"role": "user", "content": "x" * 200_001}]})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**base, temperature=3)
    with pytest.raises(litellm.NotFoundError, match="'other'"):
        litellm.completion(**{**base, "model": "hosted_vllm/other"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**base, "api_key": "wrong"})


def test_text_completions(scripted: Scripted, base: dict[str, Any]) -> None:
    base.pop("messages")
    got = litellm.text_completion(**{**base, "model": f"text-completion-openai/{scripted.model}"}, prompt="héllo 世界")
    assert got.choices[0].text == "héllo 世界"


def test_messages_of_anthropic_through_the_anthropic_provider(scripted: Scripted, base: dict[str, Any]) -> None:
    scripted.replies(scripted.call("weather", city="Paris"))
    got = litellm.completion(
        **{**base, "model": f"anthropic/{scripted.model}", "api_base": scripted.url}, tools=[TOOL], max_tokens=100
    )
    (call,) = got.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(scripted: Scripted, base: dict[str, Any], streamed: bool) -> None:
    scripted.replies("It is sunny.")
    base["input"] = base.pop("messages")
    got = litellm.responses(**{**base, "model": f"openai/{scripted.model}"}, stream=streamed)
    if streamed:
        (got,) = [event.response for event in got if event.type == "response.completed"]
    (message,) = got.output
    assert (got.status, message.content[0].text) == ("completed", "It is sunny.")


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_is_apart_from_the_answer_and_goes_round(
    scripted: Scripted, base: dict[str, Any], streamed: bool
) -> None:
    scripted.replies("<think>\nWhy not?\n</think>\n\nIt is Paris.")
    got = litellm.completion(**base, stream=streamed)
    if streamed:
        got = litellm.stream_chunk_builder(list(got), messages=USER)
    message = got.choices[0].message
    assert (message.reasoning_content, message.content) == ("Why not?", "It is Paris.")
    again = litellm.completion(**{**base, "messages": [*USER, message, *USER]})  # a prompt is its own answer
    assert "assistant: thinks Why not? It is Paris." in again.choices[0].message.content
