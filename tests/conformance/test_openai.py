"""The OpenAI API over real HTTP, with an engine that replays given tokens. Numbers are those of the conformance list."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

EOS = 1
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
# What the template makes of USER, by hand: <|im_start|> user \n h i <|im_end|> \n <|im_start|> assistant \n
PROMPT_TOKENS = 1 + len("user\n") + len("hi") + 1 + 1 + 1 + len("assistant\n")


# ------------------------------------------------------------------------------------------------ 1-5: shapes


def test_01_chat_response_has_exactly_the_keys_of_the_api(served, api, vocabulary):
    served.replies([vocabulary.word["Hello"], vocabulary.word[" world"], EOS])
    r = api.chat()
    assert r.status_code == 200
    body = r.json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    assert body["model"] == "org/name"
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello world", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    usage = body["usage"]
    assert usage["completion_tokens"] == 3  # EOS included
    assert usage["prompt_tokens"] == PROMPT_TOKENS
    assert usage["total_tokens"] == PROMPT_TOKENS + 3
    assert set(usage) == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    }
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert int(r.headers["openai-processing-ms"]) >= 0


def test_01_completion_response_has_exactly_the_keys_of_the_api(served, api, vocabulary):
    served.replies([vocabulary.word["Hello"], EOS])
    body = api.complete("abc").json()
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 2)


def test_02_chat_stream_with_usage(served, api, sdk, vocabulary):
    reply = [vocabulary.word["Hello"], vocabulary.word[" world"], EOS]
    served.replies(reply, reply, reply)
    whole = api.chat().json()
    chunks = api.chunks(api.chat(stream=True, stream_options={"include_usage": True}))
    first, *content, finish, usage = chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [c["choices"][0]["delta"] for c in content] == [{"content": "Hello"}, {"content": " world"}]
    assert all(set(c["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"} for c in content)
    assert finish["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert usage["choices"] == []
    cached = {"prompt_tokens_details": {"cached_tokens": 16}}  # a page of the first request's prompt
    assert usage["usage"] == {**whole["usage"], **cached}
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (first["id"], first["created"], "org/name", "chat.completion.chunk")
    }
    assert all(c["usage"] is None for c in chunks[:-1])
    with sdk.chat.completions.stream(model="org/name", messages=USER, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole["choices"][0]["message"]["content"]
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.total_tokens == whole["usage"]["total_tokens"]


def test_03_no_usage_in_a_stream_that_did_not_ask_for_it(served, api, sdk, vocabulary):
    served.replies(vocabulary.ids("abc"), vocabulary.ids("abc"))
    chunks = api.chunks(api.chat(stream=True))
    assert all("usage" not in c and c["choices"] for c in chunks)
    with sdk.chat.completions.stream(model="org/name", messages=USER) as stream:
        assert stream.get_final_completion().choices[0].message.content == "abc"


def test_04_choices_of_different_lengths_stream_side_by_side(served, api, sdk, vocabulary):
    texts = ["a", "abcdef", "xyz"]
    replies = [[*vocabulary.ids(t), EOS] for t in texts]
    served.replies(*replies, *replies)
    chunks = api.chunks(api.chat(stream=True, n=3, stream_options={"include_usage": True}))
    roles = [c["choices"][0] for c in chunks[:3]]
    assert [(c["index"], c["delta"].get("role")) for c in roles] == [(i, "assistant") for i in range(3)]
    assert not any("role" in c["choices"][0]["delta"] for c in chunks[3:-1])
    for i, text in enumerate(texts):
        of_choice = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == i]
        assert [c["finish_reason"] for c in of_choice] == [None] * (len(of_choice) - 1) + ["stop"]
        assert api.text(chunks, i) == text
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] == PROMPT_TOKENS
    assert usage["completion_tokens"] == sum(len(r) for r in replies)
    with sdk.chat.completions.stream(model="org/name", messages=USER, n=3) as stream:
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == texts


def test_05_usage_in_every_chunk(served, api, vocabulary):
    served.replies([*vocabulary.ids("abcd"), EOS])
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = api.chunks(api.chat(stream=True, stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 5
    assert all(c["usage"]["prompt_tokens"] == PROMPT_TOKENS for c in chunks)
    assert all(c["usage"]["total_tokens"] == PROMPT_TOKENS + n for c, n in zip(chunks, counts, strict=True))


# ------------------------------------------------------------------------------------------- 6-9: text and stops


def test_06_characters_are_never_split(served, api, vocabulary):
    text = "héllo 👩‍👩‍👧 世界"
    served.replies(vocabulary.ids(text), vocabulary.ids(text))
    chunks = api.chunks(api.chat(stream=True))
    assert not any("\ufffd" in c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert api.text(chunks) == text
    assert api.chat().json()["choices"][0]["message"]["content"] == text


def test_07_a_character_cut_by_the_length_becomes_one_replacement(served, api, vocabulary):
    served.replies(vocabulary.ids("世"), vocabulary.ids("世"))
    body = api.chat(max_tokens=2).json()
    chunks = api.chunks(api.chat(max_tokens=2, stream=True))
    assert body["choices"][0]["message"]["content"] == api.text(chunks) == "\ufffd"
    assert body["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"


def _end(vocabulary: Any) -> list[int]:
    word = vocabulary.word
    return [*vocabulary.ids("say "), word["E"], word["N"], word["D then"], *vocabulary.ids("more"), EOS]


def test_08_stop_string_over_three_tokens(served, api, vocabulary):
    served.replies(_end(vocabulary))
    chunks = api.chunks(api.chat(stream=True, stop=["END"]))
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]] == list("say ")
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    served.replies(_end(vocabulary))
    body = api.chat(stop=["END"]).json()
    assert body["choices"][0]["message"]["content"] == "say "
    assert body["usage"]["completion_tokens"] == len("say ") + 3  # with the tokens of the match, without later ones


def test_08_stop_string_is_kept_on_request(served, api, vocabulary):
    for stream in (False, True):
        served.replies(_end(vocabulary))
        r = api.chat(stop=["END"], include_stop_str_in_output=True, stream=stream)
        text = api.text(api.chunks(r)) if stream else r.json()["choices"][0]["message"]["content"]
        assert text == "say END"


def test_09_held_text_is_delivered_at_the_end(served, api, vocabulary):
    reply = [*vocabulary.ids("the "), vocabulary.word["EN"], EOS]
    served.replies(reply, reply)
    chunks = api.chunks(api.chat(stream=True, stop=["END"]))
    assert api.text(chunks) == "the EN"
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
    assert api.chat(stop=["END"]).json()["choices"][0]["message"]["content"] == "the EN"


# ------------------------------------------------------------------------------------------- 11, 12: completions


def test_11_echo_without_output(served, api):
    body = api.complete("abc", echo=True, max_tokens=0).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
    assert served.admitted == []
    api.refused(api.complete("abc", max_tokens=0), 400, "integer_below_min_value", "max_tokens")


def test_11_echo_goes_before_the_output(served, api, vocabulary):
    for prompt in ("abc", vocabulary.ids("abc")):
        for stream in (False, True):
            served.replies([*vocabulary.ids("de"), EOS])
            r = api.complete(prompt, echo=True, stream=stream)
            text = api.text(api.chunks(r)) if stream else r.json()["choices"][0]["text"]
            assert text == "abcde"


def test_12_several_prompts_and_choices_in_one_stream(served, api, vocabulary):
    # Each prompt's own answers, so that a choice under a wrong index shows.
    rules = [
        {"prompt": vocabulary.ids("a"), "replies": [[*vocabulary.ids("A0"), EOS], [*vocabulary.ids("A1"), EOS]]},
        {"prompt": vocabulary.ids("b"), "replies": [[*vocabulary.ids("B0"), EOS], [*vocabulary.ids("B1"), EOS]]},
    ]
    served.replies(rules=rules)
    r = api.complete(["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    *chunks, usage = api.chunks(r)
    assert [api.text(chunks, i) for i in range(4)] == ["A0", "A1", "B0", "B1"]
    finishes = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2, 3]
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (2, 12)
    assert all(set(c["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"} for c in chunks)
    served.replies(rules=rules)
    whole = api.complete(["a", "b"], n=2).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(["A0", "A1", "B0", "B1"]))


# ----------------------------------------------------------------------------------------------- 13-18: refusals


@pytest.mark.parametrize("body", ["{", "[]", '{"temperature": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', ""])
def test_13_bad_json(api, body):
    r = api.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    api.refused(r, 400, "invalid_json", None)


@pytest.mark.parametrize("levels", [201, 255, 1000, 1024])
def test_13_more_levels_than_can_be_written_again(api, levels):
    """Also where nothing is read of them."""
    deep = '{"a":' * (levels - 1) + "1" + "}" * (levels - 1)
    for field in ("chat_template_kwargs", "logits", "foo"):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {deep}}}'
        r = api.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert "200 levels" in api.refused(r, 400, "invalid_json", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "chat_template_kwargs": "deep"}),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": "deep"}}}),
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": "deep"}}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": "deep"}]}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "f", "schema": "deep"}}}),
        ("/v1/messages", {"max_tokens": 1, "messages": USER, "tools": [{"name": "f", "input_schema": "deep"}]}),
    ],
)
def test_13_as_many_levels_as_are_read_are_written_too(served, api, path, body):
    """Whatever the schema is good for."""
    text = json.dumps({"model": "org/name", **body})
    levels = 200 - text[: text.index('"deep"')].count("{") - text[: text.index('"deep"')].count("[")
    deep = '{"type":"object","properties":' + '{"a":' * (levels - 2) + "{}" + "}" * (levels - 1)
    r = api.http.post(path, content=text.replace('"deep"', deep), headers={"content-type": "application/json"})
    assert r.status_code in (200, 400), r.text
    assert "levels" not in r.text


def test_13_arguments_of_a_call_that_are_nested_deeply_stay_text(served, api):
    call = {"function": {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert api.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200


def test_13_too_deep_json(api):
    r = api.http.post(CHAT, content="[" * 100_000, headers={"content-type": "application/json"})
    api.refused(r, 400, "invalid_json", None)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
)
def test_13_other_media_types(api, headers):
    r = api.http.post(CHAT, content=b"{}", headers=headers)
    api.refused(r, 415, "unsupported_media_type", None)


def test_13_charset_parameter_is_allowed(api):
    headers = {"content-type": "application/json; charset=utf-8"}
    r = api.http.post(CHAT, content=b'{"messages": [{"role": "user", "content": "x"}]}', headers=headers)
    assert r.status_code == 200


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "messages"),
        ({"messages": None}, "missing_required_parameter", "messages"),
        ({"messages": []}, "empty_array", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "foo", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [*USER, {"role": "tool"}]}, "missing_required_parameter", "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "empty_array", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_value",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "missing_required_parameter",
            "messages[0].content[0].text",
        ),
    ],
)
def test_14_bad_messages(api, body, code, param):
    api.refused(api.post(CHAT, body), 400, code, param)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("temperature", 2.1, "decimal_above_max_value"),
        ("temperature", -0.1, "decimal_below_min_value"),
        ("temperature", "0.5", "invalid_type"),
        ("temperature", True, "invalid_type"),
        ("top_p", 1.5, "decimal_above_max_value"),
        ("min_p", -1, "decimal_below_min_value"),
        ("top_k", -2, "integer_below_min_value"),
        ("n", 0, "integer_below_min_value"),
        ("n", 129, "integer_above_max_value"),
        ("n", 1.5, "invalid_type"),
        ("n", "1", "invalid_type"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("max_completion_tokens", -5, "integer_below_min_value"),
        ("seed", 2**63, "integer_above_max_value"),
        ("seed", 2**70, "integer_above_max_value"),
        ("seed", -(2**63) - 1, "integer_below_min_value"),
        ("priority", 2**64, "integer_above_max_value"),
        ("top_logprobs", 21, "integer_above_max_value"),
        ("presence_penalty", 3, "decimal_above_max_value"),
        ("frequency_penalty", -3, "decimal_below_min_value"),
        ("repetition_penalty", 0, "decimal_below_min_value"),
        ("repetition_penalty", 1e-46, "decimal_below_min_value"),  # 0 in float32
        ("repetition_penalty", 1e39, "decimal_above_max_value"),  # infinite in float32
        ("stream", "yes", "invalid_type"),
        ("stop", "", "invalid_value"),
        ("stop", ["x"] * 17, "array_above_max_length"),
        ("stop", 5, "invalid_type"),
        ("ignore_eos", 1, "invalid_type"),
        ("cache_salt", "", "string_below_min_length"),
        ("cache_salt", "x" * 129, "string_above_max_length"),
        ("cache_salt", "a/b", "invalid_value"),
        ("request_id", "a b", "invalid_value"),
        ("user", 5, "invalid_type"),
        ("metadata", [], "invalid_type"),
        ("logit_bias", {"x": 1}, "invalid_value"),
        ("reasoning_effort", "huge", "invalid_value"),
        ("tools", [], "empty_array"),
        ("tool_choice", "required", "invalid_value"),
        ("model", 5, "invalid_type"),
    ],
)
def test_15_values_out_of_range_or_type(api, field, value, code):
    api.refused(api.chat(**{field: value}), 400, code, field)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
        ({"stop": ["a", 5]}, "invalid_type", "stop[1]"),
        ({"logit_bias": {"5": 101}}, "decimal_above_max_value", "logit_bias.5"),
        ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs.messages"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "invalid_value",
            "continue_final_message",
        ),
    ],
)
def test_15_bad_parts_of_a_field(api, fields, code, param):
    api.refused(api.chat(**fields), 400, code, param)


def test_15_integral_floats_are_integers(served, api, vocabulary):
    served.replies(vocabulary.ids("abcdef"))
    body = api.chat(max_tokens=3.0, n=1.0).json()
    assert body["choices"][0]["message"]["content"] == "abc"


def test_16_fields_that_need_another(api):
    api.refused(api.chat(top_logprobs=2), 400, "invalid_value", "top_logprobs")
    api.refused(api.chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options")


def test_17_what_asks_for_nothing_is_accepted(served, api):
    r = api.chat(
        stop=None,
        tool_choice="none",
        foo={"bar": 1},
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        verbosity="low",
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1,
        logit_bias={},
        logprobs=False,
        top_logprobs=0,
        min_tokens=0,
        response_format={"type": "text"},
        n=None,
        temperature=None,
        parallel_tool_calls=True,
        guided_json=None,
        include_reasoning=True,
    )
    assert r.status_code == 200, r.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"chat_template": "x"}, "chat_template"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
    ],
)
def test_17_what_is_not_built_is_refused_by_name(served, api, path, fields, param):
    body = {"messages": USER, **fields} if path == CHAT else {"prompt": "x", **fields}
    api.refused(api.post(path, body), 400, "unsupported_parameter", param)
    assert served.admitted == []


def test_18_models(served, api, sdk):
    api.refused(api.chat(model="gpt-x"), 404, "model_not_found", "model")
    listed = api.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"], model["parent"]) == ("org/name", "model", 256, None)
    assert set(model) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
    assert api.http.get("/v1/models/org/name").json() == model
    assert api.http.get("/v1/models/org%2Fname").json() == model
    assert sdk.models.retrieve("org/name").id == "org/name"
    api.refused(api.http.get("/v1/models/org%2Fother"), 404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="gpt-x", messages=USER)
    assert caught.value.code == "model_not_found"


# ------------------------------------------------------------------------------------------ 19-21: limits, keys


def test_19_context_length(served, api):
    too_long = api.chat("x" * 300)
    message = api.refused(too_long, 400, "context_length_exceeded", "messages")
    assert re.match(r"This model's maximum context length is 256 tokens\. However, you requested \d+ tokens", message)
    message = api.refused(api.chat(max_tokens=250), 400, "context_length_exceeded", "messages")
    asked = PROMPT_TOKENS + 250
    assert f"{asked} tokens ({PROMPT_TOKENS} in the messages, 250 in the completion)" in message
    api.refused(api.complete("x" * 300), 400, "context_length_exceeded", "prompt")
    api.refused(api.chat("x" * 300, stream=True), 400, "context_length_exceeded", "messages")
    assert served.admitted == []


def test_19_a_defaulted_maximum_is_cut_to_the_context(served, api, vocabulary):
    served.replies(vocabulary.ids("y" * 100))
    body = api.complete("x" * 250).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("y" * 6, "length")


@pytest.fixture(scope="module")
def keyed(start: Callable[..., Any]) -> Any:
    return start(server={"api_key": "secret", "admin_key": "root"})


def test_20_api_key(keyed, api):
    def ask(method: str, path: str, key: str | None) -> httpx.Response:
        headers = {} if key is None else {"authorization": key}
        return httpx.request(method, keyed.url + path, headers=headers)

    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", "/tokenize"), ("GET", "/nope")):
        for key in (None, "Bearer wrong", "Bearer", "Basic secret", "secret"):
            r = ask(method, path, key)
            api.refused(r, 401, "invalid_api_key", None)
            assert r.headers["www-authenticate"] == "Bearer"
    assert ask("GET", "/v1/models", "Bearer secret").status_code == 200
    assert ask("GET", "/v1/models", "bearer secret").status_code == 200
    for path in ("/health", "/ready", "/ping", "/version"):
        assert ask("GET", path, None).status_code == 200
    assert ask("OPTIONS", CHAT, None).status_code == 405


def test_20_admin_routes_have_a_key_of_their_own(keyed, api):
    stats = f"{keyed.url}/stats"
    api.refused(httpx.get(stats, headers={"authorization": "Bearer secret"}), 401, "invalid_api_key", None)
    root = {"authorization": "Bearer root"}
    assert isinstance(httpx.get(stats, headers=root).json(), dict)
    assert httpx.post(f"{keyed.url}/flush_cache", headers=root).status_code == 200
    api.refused(httpx.get(f"{keyed.url}/v1/models", headers=root), 401, "invalid_api_key", None)


def test_20_without_an_admin_key_there_are_no_admin_routes(api):
    api.refused(api.http.get("/stats"), 404, "unknown_url", None)
    api.refused(api.http.post("/flush_cache"), 404, "unknown_url", None)


def test_21_unknown_urls_and_methods(api):
    r = api.http.get(CHAT)
    api.refused(r, 405, "method_not_allowed", None)
    assert r.headers["allow"] == "POST"
    message = api.refused(api.http.post("/nope"), 404, "unknown_url", None)
    assert message == "Invalid URL (POST /nope)"
    api.refused(api.http.get("/v1/embeddings"), 404, "unknown_url", None)


def test_21_bodies_over_the_limit(api):
    def mebibytes() -> Iterator[bytes]:
        for _ in range(65):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    declared = api.http.post(CHAT, content=b" " * (65 << 20), headers=headers)
    api.refused(declared, 413, "request_too_large", None)
    api.refused(api.http.post(CHAT, content=mebibytes(), headers=headers), 413, "request_too_large", None)
    assert api.http.get("/health").status_code == 200
    assert api.chat().status_code == 200


# ------------------------------------------------------------------------------------- 28-30: ends and failures


def test_28_ignore_eos_runs_to_the_length(served, api, vocabulary):
    served.replies([*vocabulary.ids("ab"), EOS, *vocabulary.ids("c" * 100)])
    body = api.chat(ignore_eos=True, max_tokens=64).json()
    assert body["usage"]["completion_tokens"] == 64
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"].startswith("abc")


def test_29_a_client_that_leaves_a_stream(served, api, until):
    served.hold(passes=4)
    with api.http.stream("POST", CHAT, json={"messages": USER, "stream": True, "ignore_eos": True}) as r:
        lines = (line for line in r.iter_lines() if line.startswith("data: "))
        for _ in range(4):  # role and three of content
            next(lines)
    assert until(lambda: len(served.aborted) == 1) < 0.1
    served.go_on()
    assert until(lambda: served.counts()["running"] == 0 and served.client.num_open == 0) < 1


@pytest.mark.parametrize("passes", [0, 3])
def test_29_a_client_that_leaves_without_a_stream(served, until, passes, caplog):
    """Waiting in the queue (no pass yet), and running."""
    served.hold(passes)
    sock = _raw_post(served, '{"messages": [{"role": "user", "content": "x"}], "ignore_eos": true}')
    until(lambda: len(served.admitted) == 1 and served._passes == 0)
    sock.close()
    assert until(lambda: len(served.aborted) == 1) < 0.1
    served.go_on()
    assert until(lambda: served.counts()["running"] == 0 and served.client.num_open == 0) < 1
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


def _raw_post(served: Any, body: str) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())
    return sock


def _in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``call`` in a thread. Returns: wait for its result."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()

    def wait() -> Any:
        thread.join(20)
        return result[0]

    return wait


@pytest.mark.parametrize("stream", [False, True])
def test_30_an_error_before_the_first_token_has_its_status(served, api, until, stream):
    served.hold()
    wait = _in_background(lambda: api.chat(stream=stream))
    until(lambda: len(served.admitted) == 1)
    served.give_up(served.admitted[0].uid, "no room for this request")
    message = api.refused(wait(), 500, "internal_error", None)
    assert message == "no room for this request"


def test_30_an_error_after_two_tokens_is_one_frame(served, sdk, api, until, vocabulary):
    served.replies(vocabulary.ids("abcdef"), vocabulary.ids("abcdef"))
    served.hold(passes=2)
    wait = _in_background(lambda: api.chat(stream=True))
    until(lambda: len(served.admitted) == 1 and served._passes == 0)
    served.give_up(served.admitted[0].uid, "no room for this request")
    *chunks, error = api.chunks(wait())
    assert api.text(chunks) == "ab"
    assert [len(c["choices"][0]["delta"].get("content", "")) for c in chunks] == [0, 1, 1]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert error == {
        "error": {
            "message": "no room for this request",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


def test_30_the_sdk_raises_the_error_of_a_stream(served, sdk, until, vocabulary):
    served.replies(vocabulary.ids("abcdef"))
    served.hold(passes=2)
    stream = sdk.chat.completions.create(model="org/name", messages=USER, stream=True)
    until(lambda: served._passes == 0)
    served.give_up(served.admitted[0].uid, "no room")
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
def test_30_engine_death_before_the_first_token(start, api, stream):
    served = start()
    served.replies({"tokens": [], "fail_after": 0})
    r = httpx.post(served.url + CHAT, json={"messages": USER, "stream": stream})
    api.refused(r, 500, "engine_dead", None)
    later = httpx.post(served.url + CHAT, json={"messages": USER})
    api.refused(later, 503, "engine_dead", None)
    assert "retry-after" in later.headers
    api.refused(httpx.get(served.url + "/health"), 503, "engine_dead", None)


def test_30_engine_death_in_a_stream(start, api, vocabulary):
    served = start()
    served.replies({"tokens": vocabulary.ids("abcdef"), "fail_after": 2})
    r = httpx.post(served.url + CHAT, json={"messages": USER, "stream": True})
    *chunks, error = api.chunks(r)
    assert api.text(chunks) == "ab"
    assert error["error"]["code"] == "engine_dead"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)


# ---------------------------------------------------------------------------------------------------- extras


def test_request_id_is_echoed_or_made(served, api):
    assert api.http.get("/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    made = api.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{32}", made)
    r = api.chat(request_id="mine-1")
    assert r.headers["x-request-id"] == "mine-1"
    assert r.json()["id"] == "chatcmpl-mine-1"


def test_cached_tokens_are_counted_and_a_salt_keeps_apart(served, api):
    text = "y" * 100
    first, again, salted = (api.chat(text, **f).json()["usage"] for f in ({}, {}, {"cache_salt": "s"}))
    assert first["prompt_tokens_details"]["cached_tokens"] < 32  # the shared head of the template
    assert again["prompt_tokens_details"]["cached_tokens"] >= 96
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("root", ["", "/v1"])
def test_tokenize_and_back(api, vocabulary, root):
    r = api.post(f"{root}/tokenize", {"prompt": "héllo", "add_special_tokens": False}).json()
    assert r == {"count": 6, "max_model_len": 256, "tokens": vocabulary.ids("héllo"), "token_strs": None}
    assert api.post(f"{root}/detokenize", {"tokens": r["tokens"]}).json() == {"prompt": "héllo"}
    chat = api.post(f"{root}/tokenize", {"messages": USER}).json()
    assert chat["count"] == len(chat["tokens"]) == PROMPT_TOKENS
    api.refused(api.post(f"{root}/detokenize", {"tokens": [5, 100000]}), 400, "invalid_value", "tokens[1]")
    api.refused(api.post(f"{root}/detokenize", {}), 400, "missing_required_parameter", "tokens")
    api.refused(api.post(f"{root}/tokenize", {}), 400, "missing_required_parameter", "prompt")


def test_message_forms_reach_the_template(served, api, vocabulary):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    tokens = api.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    text = api.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"


def test_continue_final_message(served, api, vocabulary):
    messages = [*USER, {"role": "assistant", "content": "I am"}]
    served.replies([*vocabulary.ids(" here"), EOS], [*vocabulary.ids(" here"), EOS])
    fields = {"messages": messages, "continue_final_message": True}
    assert api.post(CHAT, fields).json()["choices"][0]["message"]["content"] == " here"
    assert served.admitted[0].ids[-4:].tolist() == vocabulary.ids("I am")
    chunks = api.chunks(api.post(CHAT, {**fields, "echo": True, "stream": True}))
    assert api.text(chunks) == "I am here"
    api.refused(api.chat(echo=True), 400, "invalid_value", "echo")


def test_stop_token_ids_and_their_reason(served, api, vocabulary):
    (x,) = vocabulary.ids("x")
    served.replies(vocabulary.ids("abxcd"))
    (choice,) = api.chat(stop_token_ids=[x]).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", x)


def test_special_tokens_are_shown_on_request(served, api, vocabulary):
    reply = [*vocabulary.ids("a"), 2, *vocabulary.ids("b"), EOS]
    served.replies(reply, reply)
    assert api.chat().json()["choices"][0]["message"]["content"] == "ab"
    shown = api.chat(skip_special_tokens=False).json()["choices"][0]["message"]["content"]
    assert shown == "a<|im_start|>b"
