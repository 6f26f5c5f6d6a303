"""The Anthropic API through its own SDK, with an engine that replays given tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from minisgl.testing.server import wait_until

anthropic = pytest.importorskip("anthropic", reason="the 'anthropic' SDK is not installed")

EOS = 1
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Any) -> Any:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def ask(client: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "org/name", "max_tokens": 50, "messages": USER, **fields}


def test_a_message(served: Any, client: Any, vocabulary: Any) -> None:
    served.replies([*vocabulary.ids("Hello"), EOS])
    m = client.messages.create(**ask(client, system="Be brief."))
    assert (m.type, m.role, m.model, m.stop_reason) == ("message", "assistant", "org/name", "end_turn")
    assert [(b.type, b.text) for b in m.content] == [("text", "Hello")]
    assert m.usage.output_tokens == 6
    prompt = served.tokenizer.decode(served.admitted[0].ids.tolist(), True)
    assert prompt == "system\nBe brief.\nuser\nhi\nassistant\n"
    assert client.messages.count_tokens(
        model="org/name", messages=USER, system="Be brief."
    ).input_tokens == m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0)


def test_a_stream_builds_the_same_message(served: Any, client: Any, vocabulary: Any) -> None:
    served.replies([*vocabulary.ids("Hello"), EOS])
    with client.messages.stream(**ask(client)) as stream:
        assert "".join(stream.text_stream) == "Hello"
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[0].text, final.usage.output_tokens) == ("end_turn", "Hello", 6)


def test_events_come_in_their_order(served: Any, client: Any, vocabulary: Any) -> None:
    served.replies([*vocabulary.ids("ab"), EOS])
    body = ask(client, stream=True)
    text = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json=body, timeout=20).text
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    kinds = [event.removeprefix("event: ") for event, _ in frames]
    delta = "content_block_delta"
    assert kinds == [
        "message_start",
        "content_block_start",
        delta,
        delta,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [json.loads(data[6:])["type"] for _, data in frames] == kinds


def test_stop_reasons(served: Any, client: Any, vocabulary: Any) -> None:
    served.replies(vocabulary.ids("abcdef"), vocabulary.ids("abcdef"))
    assert client.messages.create(**ask(client, max_tokens=3)).stop_reason == "max_tokens"
    m = client.messages.create(**ask(client, stop_sequences=["cd"]))
    assert (m.stop_reason, m.stop_sequence, m.content[0].text) == ("stop_sequence", "cd", "ab")


def test_results_of_tools_become_messages_of_their_own(served: Any, client: Any) -> None:
    served.replies([EOS])
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    client.messages.create(**ask(client, messages=messages))
    prompt = served.tokenizer.decode(served.admitted[0].ids.tolist(), True)
    assert prompt == "user\nhi\nassistant\n\ntool\n42\nuser\nso?\nassistant\n"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "none"}, "NotFoundError"),
        ({"extra_body": {"temperature": 3}}, "BadRequestError"),
        ({"messages": []}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "BadRequestError"),
    ],
)
def test_errors_have_the_shape_of_this_api(client: Any, fields: dict[str, Any], error: str) -> None:
    with pytest.raises(getattr(anthropic, error)) as e:
        client.messages.create(**ask(client, **fields))
    assert e.value.body["type"] == "error"
    assert set(e.value.body["error"]) == {"type", "message"}


def test_reasoning_and_a_call_are_blocks() -> None:
    from minisgl.api import Accepted, Delta, EngineInfo, Part, Usage
    from minisgl_plugins.frontend.anthropic import Message
    from minisgl_plugins.frontend.anthropic_request import as_chat
    from minisgl_plugins.frontend.openai_chunks import Tally
    from minisgl_plugins.frontend.openai_fields import OpenAISettings
    from minisgl_plugins.frontend.openai_request import read_chat

    info = EngineInfo("m", ("m",), 64, 100, (1,), 16, 10, 8, 64, "cpu", "float32", 5)
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"model": "m", "max_tokens": 5, "messages": USER, "tools": [tool], "stream": True}
    tally = Tally(1, 1)
    tally.accepted(0, Accepted(1, 3))
    answer = Message(read_chat(as_chat(body), info, OpenAISettings()), tally)
    parts = (
        Part("reasoning", "why"),
        Part("call", "f"),
        Part("arguments", '{"a"'),
        Part("arguments", ": 1}"),
        Part("end"),
    )
    last = Delta(1, parts=parts, finish="stop", usage=Usage(3, 4))
    frames = b"".join(answer.events(last)).decode()
    assert frames.count("event: content_block_start") == frames.count("event: content_block_stop") == 2
    assert '"partial_json":"{\\"a\\""' in frames
    whole = answer.whole()
    thought, call = whole["content"]
    assert thought["thinking"] == "why"
    assert thought["signature"]
    signed = f'"delta":{{"type":"signature_delta","signature":"{thought["signature"]}"}}'
    assert frames.index('"thinking_delta"') < frames.index(signed) < frames.index("content_block_stop")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert whole["stop_reason"] == "tool_use"


def test_a_schema_for_the_answer_and_an_effort_are_passed_on() -> None:
    from minisgl_plugins.frontend.anthropic_request import as_chat

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    wanted = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    base = {"model": "m", "max_tokens": 5, "messages": USER}
    chat = as_chat({**base, "output_config": {"format": form, "effort": "low"}})
    assert chat["response_format"] == wanted
    assert chat["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert as_chat({**base, "output_format": form})["response_format"] == wanted
    assert "response_format" not in as_chat({**base, "output_config": {"format": None}})


def test_formats_that_are_not_known_are_refused_by_their_path(client: Any) -> None:
    for config, path in (
        ({"format": {"type": "xml"}}, "output_config.format.type"),
        ({"effort": "huge"}, "output_config.effort"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=path):
            client.messages.create(**ask(client, output_config=config))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}},
            "output_config.format.schema",
        ),
        (
            {"extra_body": {"output_format": {"type": "json_schema", "schema": {"type": "nope"}}}},
            "output_format.schema",
        ),
        ({"max_tokens": 10_000}, None),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences"),
    ],
)
def test_errors_of_what_it_becomes_name_the_fields_of_this_api(
    client: Any, fields: dict[str, Any], path: str | None
) -> None:
    with pytest.raises(anthropic.BadRequestError) as e:
        client.messages.create(**ask(client, **fields))
    message = e.value.body["error"]["message"]
    assert path is None or f"'{path}'" in message
    assert not any(theirs in message for theirs in ("response_format", "max_completion_tokens", "'stop'"))


def test_tools_keep_their_places_in_errors() -> None:
    """Those that the vendor's servers run are left out of what chat completions get."""
    from minisgl_plugins.frontend.anthropic_request import names

    schema = {"type": "object"}
    tools = [{"type": "web_search_1", "name": "w"}, {"name": "a", "input_schema": schema}]
    found = names({"tools": tools})
    assert found["tools[0].function.parameters"] == "tools[1].input_schema"
    assert found["tools[0].function"] == "tools[1]"


# ------------------------------------------------------------------------------------------------------ access errors


def anthropic_error(r: httpx.Response, status: int, kind: str) -> None:
    assert (r.status_code, r.json()["error"]["type"]) == (status, kind), r.text
    assert (set(r.json()), r.json()["type"], set(r.json()["error"])) == (
        {"type", "error"},
        "error",
        {"type", "message"},
    )
    assert r.headers["content-type"] == "application/json"
    assert "x-request-id" in r.headers


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_20_errors_before_the_handler_have_the_shape_of_this_api(start: Any, path: str) -> None:
    served = start(server={"api_key": "k", "max_request_body": 2000})
    key, url = {"x-api-key": "k"}, served.url + path
    anthropic_error(httpx.post(url, json={}), 401, "authentication_error")
    anthropic_error(httpx.post(url, json={}, headers={"x-api-key": "no"}), 401, "authentication_error")
    anthropic_error(httpx.get(url, headers=key), 405, "invalid_request_error")
    anthropic_error(httpx.post(url, content=b"x" * 3000, headers=key), 413, "request_too_large")
    anthropic_error(httpx.post(url, content=b"{", headers=key), 415, "invalid_request_error")
    anthropic_error(httpx.get(served.url + "/v1/messages/batches", headers=key), 404, "not_found_error")


def test_20_only_paths_of_this_api_have_its_errors(start: Any, api: Any) -> None:
    served = start(server={"api_key": "k"})
    for path in ("/v1/chat/completions", "/v1/messagesx", "/v1", "/"):
        api.refused(httpx.post(served.url + path, json={}), 401, "invalid_api_key", None)


def test_a_server_that_drains_says_so_in_the_shape_of_this_api(start: Any, vocabulary: Any) -> None:
    served = start()
    served.replies([*vocabulary.ids("abc"), EOS])
    served.hold(passes=2)
    ended: list[httpx.Response] = []
    body = {"model": "org/name", "max_tokens": 5, "messages": USER}
    running = threading.Thread(target=lambda: ended.append(httpx.post(f"{served.url}/v1/messages", json=body)))
    running.start()
    wait_until(lambda: bool(served.admitted))
    drained = asyncio.run_coroutine_threadsafe(served.host.drain(20), served.loop)
    served.run(lambda: asyncio.sleep(0))  # the drain has begun
    r = httpx.post(f"{served.url}/v1/messages", json={})
    anthropic_error(r, 503, "overloaded_error")
    assert r.headers["retry-after"] == "1"
    served.go_on()
    running.join(20)
    drained.result(20)
    assert ended[0].json()["content"][0]["text"] == "abc"


def test_the_sdk_names_a_missing_key(start: Any) -> None:
    served = start(server={"api_key": "k"})
    made = anthropic.Anthropic(base_url=served.url, api_key="no", max_retries=0)
    with made, pytest.raises(anthropic.AuthenticationError, match="not the right one"):
        made.messages.create(**ask(made))


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_agents_look_for(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* context length is 256 tokens"):
        client.messages.create(**ask(client, messages=[{"role": "user", "content": "x" * 300}]))
