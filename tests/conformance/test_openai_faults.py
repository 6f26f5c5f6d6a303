"""Faults that servers of this kind have had; ids are those of the fault list."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from minisgl.api.hookspec import hookimpl
from minisgl.base.errors import RequestError
from minisgl.text.tokenizer import TokenizerContext

EOS = 1
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def test_m1_a_client_that_leaves_gives_its_pages_and_its_row_back(served, api, until):
    served.hold(passes=6)
    body = {"prompt": "x" * 40, "stream": True, "ignore_eos": True, "max_tokens": 200}
    with api.http.stream("POST", "/v1/completions", json=body) as r:
        next(r.iter_lines())
        assert served.counts()["running"] == 1
    until(lambda: len(served.aborted) == 1)
    served.hold(passes=3)  # the one that takes the abort in, and those that clean up
    until(lambda: served.counts()["running"] == 0)
    counts = served.counts()
    assert counts["free"] + counts["evictable"] == served.engine.info.num_pages
    assert counts["locked"] == 0


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_m2_no_stream_means_one_json_object(api, fields):
    r = api.chat(**fields)
    assert r.headers["content-type"] == "application/json"
    assert r.json()["object"] == "chat.completion"


@pytest.mark.parametrize("stream", [False, True])
def test_a1_no_part_of_a_stop_string_reaches_the_client(served, api, vocabulary, stream):
    served.replies(vocabulary.ids("ABCDEFGHIJKL"))
    r = api.chat("the alphabet: ABC", stop="DEFGHIJ", stream=stream)
    if stream:
        chunks = api.chunks(r)
        assert [c["choices"][0]["delta"].get("content", "") for c in chunks] == ["", "A", "B", "C", ""]
        last = chunks[-1]["choices"][0]
    else:
        (last,) = r.json()["choices"]
        assert last["message"]["content"] == "ABC"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DEFGHIJ")


def test_a1_a_match_inside_one_token_is_cut_there(served, api, vocabulary):
    reply = [*vocabulary.ids("a"), vocabulary.word["x END y"], *vocabulary.ids("b")]
    served.replies(reply, reply)
    assert api.text(api.chunks(api.chat(stream=True, stop="END"))) == "ax "
    assert api.chat(stop="END").json()["choices"][0]["message"]["content"] == "ax "


@pytest.mark.parametrize("ends", ["eos", "length"])
def test_a2_held_text_comes_at_the_end_and_only_real_partial_matches_are_held(served, api, vocabulary, ends):
    text = "see E, EN"
    served.replies([*vocabulary.ids(text), EOS] if ends == "eos" else vocabulary.ids(text + "D"))
    chunks = api.chunks(api.chat(stream=True, stop="END", max_tokens=len(text) if ends == "length" else None))
    content = [c["choices"][0]["delta"]["content"] for c in chunks[1:-1]]
    assert content == ["s", "e", "e", " ", "E,", " ", "EN"]
    assert chunks[-1]["choices"][0]["finish_reason"] == ("stop" if ends == "eos" else "length")


@pytest.mark.parametrize("text", ["👩‍👩‍👧 ok", "Příliš žluťoučký kůň", "สวัสดีครับ", "你好，世界", 'a\u2028b\r\n\tc"\\'])
def test_a3_scripts_of_the_world_survive_both_ways(served, api, vocabulary, text):
    served.replies(vocabulary.ids(text), vocabulary.ids(text))
    chunks = api.chunks(api.chat(stream=True))
    assert all("\ufffd" not in c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert api.text(chunks) == text == api.chat().json()["choices"][0]["message"]["content"]


def test_a3_a_prompt_that_ends_in_half_a_character_is_not_sent_back(served, api, vocabulary):
    half, rest = vocabulary.ids("é")
    prompt = [*vocabulary.ids("secret"), half]
    served.replies([rest, *vocabulary.ids("ok"), EOS], [rest, *vocabulary.ids("ok"), EOS])
    chunks = api.chunks(api.complete(prompt, stream=True))
    assert api.text(chunks) == "\ufffdok"
    assert api.complete(prompt).json()["choices"][0]["text"] == "\ufffdok"


def test_a4_usage_is_sent_only_if_asked_and_then_last(served, api, vocabulary):
    for options, wanted in (
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ):
        served.replies([*vocabulary.ids("ab"), EOS])
        chunks = api.chunks(api.chat(stream=True, stream_options=options))
        with_usage = [i for i, c in enumerate(chunks) if c.get("usage") is not None]
        assert with_usage == ([len(chunks) - 1] if wanted else [])
        assert [i for i, c in enumerate(chunks) if not c["choices"]] == with_usage


def test_a5_first_delta_has_role_and_empty_content_and_finish_reason_is_null(served, api, vocabulary):
    served.replies([*vocabulary.ids("ab"), EOS])
    choices = [c["choices"][0] for c in api.chunks(api.chat(stream=True))]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]


def test_a6_one_finish_for_each_choice_and_texts_kept_apart(served, api, vocabulary):
    served.replies([*vocabulary.ids("one"), EOS], [*vocabulary.ids("other"), EOS])
    chunks = api.chunks(api.chat(stream=True, n=2))
    assert [api.text(chunks, i) for i in range(2)] == ["one", "other"]
    for i in range(2):
        finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == i]
        assert finishes.count("stop") == 1
        assert finishes[-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a9_too_long_is_refused_before_it_queues_and_disturbs_nobody(served, api, until, vocabulary, stream):
    served.replies([*vocabulary.ids("fine"), EOS])
    served.hold()
    results: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: results.append(api.chat()))
    thread.start()
    until(lambda: len(served.admitted) == 1)
    with httpx.Client(base_url=served.url) as other:  # answered though the engine stands still
        r = other.post("/v1/completions", json={"prompt": "x" * 257, "stream": stream})
        message = api.refused(r, 400, "context_length_exceeded", "prompt")
        assert "257 in the prompt" in message
        r = other.post("/v1/completions", json={"prompt": "x" * 200, "max_tokens": 57, "stream": stream})
        message = api.refused(r, 400, "context_length_exceeded", "prompt")
        assert "257 tokens (200 in the prompt, 57 in the completion)" in message
    assert len(served.admitted) == 1
    served.go_on()
    thread.join(20)
    assert results[0].json()["choices"][0]["message"]["content"] == "fine"


def test_a10_empty_prompt_and_echo_without_output_leave_the_engine_alone(served, api, vocabulary):
    api.refused(api.complete(""), 400, "invalid_value", "prompt")  # this tokenizer has no BOS
    api.refused(api.complete([]), 400, "empty_array", "prompt")
    api.refused(api.complete([[]]), 400, "empty_array", "prompt[0]")
    api.refused(api.complete([[5], []]), 400, "empty_array", "prompt[1]")
    for prompt in ("abc", vocabulary.ids("abc")):
        for n in (1, 2):
            body = api.complete(prompt, echo=True, max_tokens=0, n=n).json()
            assert [c["text"] for c in body["choices"]] == ["abc"] * n
    chunks = api.chunks(api.complete("abc", echo=True, max_tokens=0, stream=True))
    assert (api.text(chunks), chunks[-1]["choices"][0]["finish_reason"]) == ("abc", "length")
    too_long = api.complete("x" * 257, echo=True, max_tokens=0)
    api.refused(too_long, 400, "context_length_exceeded", "prompt")
    assert served.admitted == []
    served.replies([*vocabulary.ids("alive"), EOS])
    assert api.complete("x").json()["choices"][0]["text"] == "alive"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logit_bias": {"191222": -100}}, "logit_bias"),
        (CHAT, {"logit_bias": {"AI": -100}}, "logit_bias"),
        (CHAT, {"logit_bias": {"-1": -100}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1e2": -100}}, "logit_bias"),
        (CHAT, {"stop_token_ids": [151645]}, "stop_token_ids[0]"),
        (CHAT, {"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ("/v1/completions", {"prompt": [5, 151645]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[5], [6, -1]]}, "prompt[1][1]"),
        ("/detokenize", {"tokens": [151645]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**62]}, "tokens[0]"),
    ],
)
def test_a11_ids_outside_the_vocabulary(served, api, path, fields, param):
    body = {"messages": USER, **fields} if path == CHAT else {"prompt": "x", **fields}
    api.refused(api.post(path, body), 400, "invalid_value", param)
    assert served.admitted == []


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(["a", 5], "prompt[1]"), ([5, "a"], "prompt[1]"), ([[5], "a"], "prompt[1]"), ([True], "prompt[0]"), (5, "prompt")],
)
def test_mixed_prompts_are_refused(api, prompt, param):
    api.refused(api.complete(prompt), 400, "invalid_type", param)


class PureMiddleware:
    """As a plugin writes it: ASGI in, ASGI out."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-plugin", b"was here")]
            await send(message)

        await self.app(scope, receive, marked)


class Middleware:
    def __init__(self, *classes: Any) -> None:
        self.classes = classes

    @hookimpl
    def http_middleware(self, frontend: str, add: Callable[[Any], None]) -> None:
        for cls in self.classes if frontend == "openai" else ():
            add(cls)


class Buffering(BaseHTTPMiddleware):
    async def dispatch(self, request: Any, call_next: Any) -> Any:
        return await call_next(request)


@pytest.fixture(scope="module")
def wrapped(start: Callable[..., Any]) -> Any:
    return start(hooks=[Middleware(PureMiddleware)])


@pytest.fixture(scope="module")
def base_wrapped(start: Callable[..., Any]) -> Any:
    return start(hooks=[Middleware(Buffering)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", ["wrapped", "base_wrapped"])
def test_a16_a_client_that_leaves_is_noticed_through_middleware(request, which, stream):
    served = request.getfixturevalue(which)
    served.aborted.clear()
    served.admitted.clear()
    served.hold()
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    body = json.dumps({"messages": USER, "stream": stream})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())

    async def leave() -> float:
        while not served.admitted:
            await asyncio.sleep(0.001)
        start = served.loop.time()
        sock.close()
        while not served.aborted:
            assert served.loop.time() - start < 10
            await asyncio.sleep(0.001)
        return served.loop.time() - start

    assert served.run(leave) < 0.1
    served.go_on()


def test_a16_middleware_of_plugins_sees_answers(wrapped):
    assert httpx.get(wrapped.url + "/v1/models").headers["x-plugin"] == "was here"
    assert "x-plugin" not in httpx.get(wrapped.url + "/health").headers  # not a route of that frontend


def test_a17_refusals_of_stream_requests_have_their_status(start, api, vocabulary):
    """The queue is full: 503, not a 200 with an error inside."""
    served = start(limits={"queue": 1, "max_running": 1})
    served.hold()
    held = []
    for i in range(2):  # one may run and one may wait
        thread = threading.Thread(target=lambda: httpx.post(served.url + CHAT, json={"messages": USER}))
        thread.start()
        held.append(thread)

        async def admitted(count: int = i + 1) -> None:
            while len(served.admitted) < count:
                await asyncio.sleep(0.001)

        served.run(admitted)
    r = httpx.post(served.url + CHAT, json={"messages": USER, "stream": True})
    api.refused(r, 503, "server_overloaded", None)
    assert r.headers["retry-after"] == "1"
    served.go_on()
    for thread in held:
        thread.join(20)


class Refuse:
    @hookimpl
    def check_request(self, request: Any, info: Any) -> None:
        text = request.text or request.messages[0]["content"]
        if text == "boom":
            raise ZeroDivisionError("a bug in the plugin")
        if text.startswith("bad"):
            raise RequestError("not here", status=403, code="forbidden_word", param="prompt")


def test_a17_hooks_refuse_with_their_own_status_before_anything_runs(start, api, caplog):
    served = start(hooks=[Refuse()])
    for stream in (False, True):
        r = httpx.post(f"{served.v1}/completions", json={"prompt": "bad word", "stream": stream})
        api.refused(r, 403, "forbidden_word", "prompt")
        r = httpx.post(f"{served.v1}/completions", json={"prompt": ["fine", "bad"], "stream": stream})
        api.refused(r, 403, "forbidden_word", "prompt")
    assert served.admitted == []
    assert httpx.post(f"{served.v1}/completions", json={"prompt": "good"}).status_code == 200
    r = httpx.post(f"{served.v1}/completions", json={"prompt": "boom"})
    message = api.refused(r, 500, "internal_error", None)
    assert r.headers["x-request-id"] in message
    assert "bug in the plugin" not in message
    assert "ZeroDivisionError: a bug in the plugin" in caplog.text
    assert r.headers["x-should-retry"] == "false"


def test_a17_every_stream_ends_with_done(served, api, vocabulary):
    served.replies(vocabulary.ids("z" * 200))
    chunks = api.chunks(api.chat(stream=True, max_tokens=200))  # checks the end
    assert api.text(chunks) == "z" * 200


def test_tokenizer_fixture_agrees_with_the_vocabulary(model, shared, vocabulary):
    """The ids that the tests write by hand are those of the tokenizer."""
    tokenizer = shared.registry.create("tokenizer", "hf", {}, lambda s: TokenizerContext(s, model.path))
    assert tokenizer.encode("héllo", special=True).tolist() == vocabulary.ids("héllo")
    assert tokenizer.eos == {EOS}
