"""The OpenAI frontend on an engine client that a test drives item by item."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from minisgl.api import Accepted, Delta, EngineInfo, FrontendContext, GenerateRequest, RequestError, Usage
from minisgl.client.http import HttpHost
from minisgl.config.schema import Settings
from minisgl.observe.meter import Meter
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.registry import Registry
from minisgl_plugins.frontend.openai_merge import merged

INFO = EngineInfo("m", ("m", "alias"), 64, 100, (1,), 16, 10, 8, 64, "cpu", "float32", 5)
END = Usage(3, 1)


class Played:
    """Gives each prompt its items; an exception is raised, a number of items is waited for, over all prompts."""

    info = INFO

    def __init__(self, plays: dict[str, list[Any]], code: str | None = None) -> None:
        self.plays = plays
        self.code = code
        self.meter = Meter()
        self.given = 0
        self.closed: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.more = asyncio.Condition()

    def healthy(self) -> str | None:
        return self.code

    async def generate(self, r: GenerateRequest) -> AsyncIterator[Accepted | Delta]:
        self.requests.append(r)
        name = r.text or ""
        try:
            for item in self.plays[name]:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, int):
                    async with self.more:
                        await self.more.wait_for(lambda wanted=item: self.given >= wanted)
                    continue
                yield item
                async with self.more:
                    self.given += 1
                    self.more.notify_all()
        finally:
            self.closed.append(name)


def ask(
    client: Played,
    body: dict[str, Any],
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
    **options: Any,
) -> httpx.Response:
    async def go() -> httpx.Response:
        registry = Registry.scan(bundled_only=True)
        hooks, settings = Hooks(registry, ()), Settings()
        frontend = registry.create("frontend", "openai", options, lambda s: FrontendContext(s, client, settings, hooks))
        app: Any = HttpHost(settings, client, {"openai": frontend}, hooks).app  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://host") as http:
            return await http.post(path, json=body, headers=headers, timeout=10)

    return asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a17_a_refused_prompt_decides_the_status_though_another_has_output(stream):
    refusal = RequestError("too long", code="context_length_exceeded", param="prompt")
    client = Played({"good": [Accepted(1, 3), Delta(1, text="a"), Delta(1, text="b"), 99], "bad": [2, refusal]})
    r = ask(client, {"prompt": ["good", "bad"], "stream": stream})
    assert r.status_code == 400
    assert r.json()["error"]["code"] == "context_length_exceeded"
    assert sorted(client.closed) == ["bad", "good"]  # what ran is aborted


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(None, "internal_error"), ("engine_dead", "engine_dead"), ("server_draining", "server_draining")],
)
def test_words_of_the_engine_never_reach_the_wire(code, wanted):
    client = Played({"x": [Accepted(1, 3), Delta(1, text="a"), Delta(1, finish="abort", usage=END)]})

    class Later(Played):
        def healthy(self) -> str | None:  # while the request comes in all is well
            return code if self.given >= 2 else None

    client = Later(client.plays)
    r = ask(client, {"prompt": "x", "stream": True})
    frames = [json.loads(line[6:]) for line in r.text.split("\n\n") if line.startswith("data: {")]
    assert frames[0]["choices"][0]["text"] == "a"
    assert frames[1]["error"]["code"] == wanted
    assert len(frames) == 2
    assert r.text.endswith("data: [DONE]\n\n")


def test_an_unexpected_exception_in_a_stream_is_one_frame_without_its_text(caplog):
    client = Played({"x": [Accepted(1, 3), Delta(1, text="a"), KeyError("secret")]})
    r = ask(client, {"prompt": "x", "stream": True})
    assert '"code":"internal_error"' in r.text
    assert "secret" not in r.text
    assert "secret" in caplog.text


def test_usage_of_a_prompt_counts_once_and_cached_tokens_are_those_of_the_first_choice():
    end = [Delta(i, index=i, ids=(1,), finish="stop", usage=Usage(40, 2, cached)) for i, cached in ((1, 32), (0, 16))]
    body = ask(Played({"x": [Accepted(1, 40), *end]}), {"prompt": "x", "n": 2}).json()
    assert body["usage"]["prompt_tokens"] == 40
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert [c["index"] for c in body["choices"]] == [0, 1]


def test_continuous_usage_needs_include_usage():
    play = [Accepted(1, 3), Delta(1, text="a", ids=(5,)), Delta(1, finish="stop", usage=END)]
    body = {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert '"usage"' not in ask(Played({"x": play}), body).text


def test_what_a_request_becomes():
    play = {"x": [Accepted(1, 3), Delta(1, finish="stop", usage=END)]}
    body = {
        "model": "alias",
        "prompt": "x",
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -7,
        "stop": "S",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "priority": -3,
        "cache_salt": "salt",
        "max_tokens": 4,
        "max_completion_tokens": 5,
    }
    client = Played(play)
    assert ask(client, body).json()["model"] == "alias"
    (r,) = client.requests
    s = r.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed, s.max_tokens) == (0.0, 0.5, -1, 0.1, -7, 5)
    assert (s.stop, s.stop_token_ids, s.ignore_eos, s.include_stop_str_in_output) == (("S",), (7,), True, True)
    assert (s.skip_special_tokens, r.add_special_tokens, r.priority, r.cache_salt) == (False, False, -3, "salt")
    assert (r.text, r.ids, r.messages, r.n, r.param, r.clamp_max_tokens) == ("x", None, None, 1, "prompt", False)
    client = Played(play)
    ask(client, {"prompt": "x"})
    (r,) = client.requests
    assert (r.sampling.max_tokens, r.clamp_max_tokens, r.sampling.temperature) == (16, True, None)


def test_what_a_chat_request_becomes():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    raw = {"function": {"name": "g", "arguments": "not json"}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call, raw], "reasoning": "why"},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "function", "content": "2", "name": "g"},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    client = Played({"": [Accepted(1, 3), Delta(1, finish="stop", usage=END)]})
    body = {
        "messages": messages,
        "reasoning_effort": "none",
        "chat_template_kwargs": {"style": "short"},
        "documents": [{"text": "t"}],
    }
    assert ask(client, body, "/v1/chat/completions").status_code == 200
    (r,) = client.requests
    assert r.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "c1"},
                {"type": "function", "function": {"name": "g", "arguments": "not json"}},
            ],
            "reasoning_content": "why",
            "reasoning": "why",
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "name": "g"},
        {"role": "assistant", "content": "no"},
    )
    assert r.template == {
        "style": "short",
        "reasoning_effort": "none",
        "enable_thinking": False,
        "documents": [{"text": "t"}],
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    assert (r.sampling.max_tokens, r.add_special_tokens, r.param) == (None, False, "messages")


@pytest.mark.parametrize(
    ("user", "header", "key"),
    [
        ("kim", "Bearer secret", "kim"),
        (None, None, ""),
        (None, "Bearer secret", "sha256:" + hashlib.sha256(b"Bearer secret").hexdigest()[:32]),
        ("", "Bearer secret", "sha256:" + hashlib.sha256(b"Bearer secret").hexdigest()[:32]),
        ("x" * 129, None, "sha256:" + hashlib.sha256(b"x" * 129).hexdigest()[:32]),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_a_request_is_counted_for_its_user_or_else_its_api_key(user: Any, header: Any, key: str, chat: bool):
    client = Played({"": [Accepted(1, 3), Delta(1, finish="stop", usage=END)]})
    client.plays["x"] = client.plays[""]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": ["x", "x"]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    headers = {"authorization": header} if header else {}
    assert ask(client, body | {"user": user}, path, headers=headers).status_code == 200
    assert [r.key for r in client.requests] == [key] * (1 if chat else 2)


def test_a_strict_server_refuses_unknown_fields():
    client = Played({"x": [Accepted(1, 3), Delta(1, finish="stop", usage=END)]})
    assert ask(client, {"prompt": "x", "foo": 1}).status_code == 200
    r = ask(client, {"prompt": "x", "foo": 1}, strict=True)
    assert (r.status_code, r.json()["error"]["code"], r.json()["error"]["param"]) == (400, "unknown_parameter", "foo")
    everything = {"user": "u", "stop": None, "logit_bias": {}, "best_of": 1, "echo": False, "guided_json": None}
    assert ask(client, {"prompt": "x", **everything}, strict=True).status_code == 200


def test_merged_streams_close_all_when_one_fails():
    closed: list[int] = []

    async def stream(i: int) -> AsyncIterator[int]:
        try:
            yield i
            if i == 1:
                raise ValueError("one")
            await asyncio.Event().wait()
        finally:
            closed.append(i)

    async def go() -> list[tuple[int, int]]:
        return [item async for item in merged([stream(i) for i in range(3)])]

    with pytest.raises(ValueError, match="one"):
        asyncio.run(go())
    assert sorted(closed) == [0, 1, 2]
