"""The Anthropic API through its own SDK, with an engine that replays given tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from minisgl.client.frontend import FrontendContext
from minisgl.client.http import HttpHost

anthropic = pytest.importorskip("anthropic", reason="the 'anthropic' SDK is not installed")

EOS = 1
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Any) -> Any:
    """Of a second host beside the usual one, in the same event loop, on the same engine."""
    import socket

    frontend = served.registry.create(
        "frontend", "anthropic", {}, lambda s: FrontendContext(s, served.client, served.settings, served.hooks)
    )
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()

    async def start() -> tuple[HttpHost, Any]:
        host = HttpHost(served.settings, served.client, {"anthropic": frontend}, served.hooks)
        return host, asyncio.ensure_future(host.serve(sock))

    host, serving = served.run(start)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as made:
        yield made

    async def stop() -> None:
        host.close()
        await serving

    served.run(stop)


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
    assert thought == {"type": "thinking", "thinking": "why", "signature": ""}
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
