"""LangChain's ChatOpenAI and OpenAI."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel
from servers import Real, Scripted

langchain_openai = pytest.importorskip("langchain_openai", reason="the client 'langchain-openai' is not installed")

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def made(model: str, url: str, key: str, **more: Any) -> Any:
    return langchain_openai.ChatOpenAI(model=model, base_url=url, api_key=key, max_retries=0, stream_usage=True, **more)


@pytest.fixture
def chat(scripted: Scripted) -> Any:
    return made(scripted.model, scripted.v1, scripted.key)


@pytest.fixture
def real_chat(real: Real) -> Any:
    return made(real.model, real.v1, "none", temperature=0)


@pytest.fixture
def responses(scripted: Scripted) -> Any:
    return made(scripted.model, scripted.v1, scripted.key, use_responses_api=True)


def added(chunks: Any) -> Any:
    """Chunks of a stream as one message, in LangChain's own way."""
    first, *rest = chunks
    for chunk in rest:
        first = first + chunk
    return first


def test_whole_and_streamed_answers_and_their_usage_agree(real_chat: Any) -> None:
    whole = real_chat.invoke(QUESTION)
    final = added(real_chat.stream(QUESTION))
    assert whole.content == final.content == ANSWER
    assert whole.usage_metadata["output_tokens"] == final.usage_metadata["output_tokens"] > 0
    assert whole.usage_metadata["input_tokens"] == final.usage_metadata["input_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_tools_go_round_by_chat_completions_and_by_responses(
    scripted: Scripted, request: pytest.FixtureRequest, api: str, streamed: bool
) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    scripted.replies("Let me see." + scripted.call("Weather", city="Paris", days=2))
    bound = request.getfixturevalue(api).bind_tools([Weather])
    message = added(bound.stream(QUESTION)) if streamed else bound.invoke(QUESTION)
    (call,) = message.tool_calls
    assert message.text == "Let me see."
    assert (call["name"], call["args"]) == ("Weather", {"city": "Paris", "days": 2})
    turns = [HumanMessage(QUESTION), message, ToolMessage("sunny, 21 degrees", tool_call_id=call["id"])]
    assert "tool: sunny, 21 degrees" in bound.invoke(turns).text  # a prompt is its own answer


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_by_schema_and_by_a_forced_call(real_chat: Any, method: str) -> None:
    assert isinstance(real_chat.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def test_structured_output_by_json_mode(real_chat: Any) -> None:
    got = (
        real_chat.bind(max_tokens=60)
        .with_structured_output(None, method="json_mode", include_raw=True)
        .invoke("Answer in JSON: what is the capital of France?")
    )
    assert got["raw"].content.lstrip().startswith("{")


def test_several_prompts_at_once(chat: Any) -> None:
    answers = chat.batch([f"number {i}" for i in range(8)])
    assert [f"user: number {i}\n" in a.content for i, a in enumerate(answers)] == [True] * 8


def test_completions(scripted: Scripted) -> None:
    model = langchain_openai.OpenAI(model=scripted.model, base_url=scripted.v1, api_key=scripted.key, max_retries=0)
    assert model.invoke("héllo 世界") == "".join(model.stream("héllo 世界")) == "héllo 世界"


def test_log_probabilities(real_chat: Any) -> None:
    message = real_chat.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke(QUESTION)
    told = message.response_metadata["logprobs"]["content"]
    assert [len(t["top_logprobs"]) for t in told] == [2, 2, 2]


def test_errors_show_what_the_server_said(chat: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.bind(temperature=3).invoke(QUESTION)
    with pytest.raises(openai.NotFoundError, match="'other'"):
        chat.bind(model="other").invoke(QUESTION)
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        chat.invoke("x" * 200_001)


def test_reasoning_goes_round_with_responses(scripted: Scripted, responses: Any) -> None:
    from langchain_core.messages import HumanMessage

    scripted.replies("<think>\nWhy not?\n</think>\n\nIt is Paris.")
    message = responses.invoke(QUESTION)
    assert message.text == "It is Paris."
    again = responses.invoke([HumanMessage(QUESTION), message, HumanMessage("And?")])  # a prompt is its own answer
    assert "assistant: thinks Why not? It is Paris." in again.text
