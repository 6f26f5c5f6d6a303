"""What holds of every server of the OpenAI API, whatever its model says: ``pytest tests/conformance --base-url URL``.

Numbers are those of the conformance list; where a case needs an engine that replays given tokens its exact form is elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest

USER: Any = [{"role": "user", "content": "Count from one to twenty."}]
GREEDY = {"temperature": 0, "max_tokens": 16}


def message(r: httpx.Response) -> dict[str, Any]:
    assert r.status_code == 200, r.text
    return dict(r.json()["choices"][0]["message"])


def chat(api: Any, **fields: Any) -> httpx.Response:
    return api.post("/v1/chat/completions", {"messages": USER, **GREEDY, **fields})


def complete(api: Any, prompt: Any, **fields: Any) -> httpx.Response:
    return api.complete(prompt, **{**GREEDY, **fields})


def test_01_a_chat_answer_has_its_members_and_counts(api, model_name):
    body = chat(api, model=model_name).json()
    assert set(body) >= {"id", "object", "created", "model", "choices", "usage"}
    assert (body["object"], body["model"]) == ("chat.completion", model_name)
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert set(choice) >= {"index", "message", "logprobs", "finish_reason"}
    assert choice["finish_reason"] in ("stop", "length")
    assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)
    assert "tool_calls" not in choice["message"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 1 <= usage["completion_tokens"] <= 16


def test_02_a_stream_is_the_whole_answer_in_pieces(api, sdk, model_name):
    whole = chat(api).json()
    first, *content, finish, usage = api.chunks(chat(api, stream=True, stream_options={"include_usage": True}))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in c["choices"][0]["delta"] for c in content)
    assert [c["choices"][0]["finish_reason"] for c in (first, *content)] == [None] * (1 + len(content))
    assert finish["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], whole["usage"]["total_tokens"])
    text = whole["choices"][0]["message"]["content"]
    assert api.text([first, *content, finish]) == text
    assert len({(c["id"], c["created"], c["object"]) for c in (first, *content, finish, usage)}) == 1
    stream = sdk.chat.completions.create(model=model_name, messages=USER, stream=True, **GREEDY)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == text


def test_03_usage_is_not_sent_unasked(api):
    chunks = api.chunks(chat(api, stream=True))
    assert all("usage" not in c and c["choices"] for c in chunks)


def test_04_each_choice_of_a_stream_ends_once(api):
    chunks = api.chunks(chat(api, stream=True, n=3, temperature=1))
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1, 2]
    for i in range(3):
        of_choice = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        assert [bool(c["finish_reason"]) for c in of_choice] == [False] * (len(of_choice) - 1) + [True]


def test_05_continuous_usage_grows(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in api.chunks(chat(api, stream=True, stream_options=options))]
    assert counts == sorted(counts)


@pytest.mark.parametrize("stream", [False, True])
def test_08_text_ends_before_a_stop_string(api, stream):
    text = message(chat(api))["content"]
    stop = text[len(text) // 2 :][:3]
    r = chat(api, stop=[stop], stream=stream)
    chunks = api.chunks(r) if stream else []
    cut = api.text(chunks) if stream else message(r)["content"]
    assert cut == text[: text.index(stop)]
    last = chunks[-1]["choices"][0] if stream else r.json()["choices"][0]
    assert last["finish_reason"] == "stop"


def test_10_echo_with_log_probabilities_has_an_entry_for_each_token(api):
    prompt = api.post("/tokenize", {"prompt": "one two three four", "add_special_tokens": False}).json()["tokens"]
    prompts = [prompt, prompt[:2]]
    choices = complete(api, prompts, echo=True, logprobs=1, max_tokens=1).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    for choice, ids in zip(choices, prompts, strict=True):
        told = choice["logprobs"]
        assert {len(column) for column in told.values()} == {len(ids) + 1}
        assert (told["token_logprobs"][0], told["top_logprobs"][0], told["text_offset"][0]) == (None, None, 0)
        assert told["text_offset"] == sorted(told["text_offset"])
        for token, own, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]:
            assert top[token] == own <= max(top.values())


def test_11_echo_alone_costs_no_tokens(api):
    body = complete(api, "abc", echo=True, max_tokens=0).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abc", "length")
    assert body["usage"]["completion_tokens"] == 0
    api.refused(complete(api, "abc", max_tokens=0), 400, "integer_below_min_value", "max_tokens")


def test_12_choices_of_several_prompts_in_one_stream(api):
    chunks = api.chunks(complete(api, ["a", "b"], n=2, stream=True, stream_options={"include_usage": True}))
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    assert [not c["choices"] for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_17_what_asks_for_nothing_is_accepted(api):
    r = chat(api, stop=None, tool_choice="none", foo={"bar": 1}, user="me", metadata={"a": "b"}, store=False)
    assert r.status_code == 200, r.text


def test_18_models_are_found_by_their_names(api, sdk, model_name):
    listed = {m["id"]: m for m in api.http.get("/v1/models").json()["data"]}
    assert api.http.get(f"/v1/models/{model_name}").json() == listed[model_name]
    assert api.http.get(f"/v1/models/{model_name.replace('/', '%2F')}").json() == listed[model_name]
    api.refused(chat(api, model="no/such"), 404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="no/such", messages=USER)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_19_more_than_the_context_is_refused(api, model_name, stream):
    most = api.http.get("/v1/models").json()["data"][0]["max_model_len"]
    for prompt, tokens in (([5] * (most + 1), 1), ([5] * 10, most)):
        r = complete(api, prompt, max_tokens=tokens, stream=stream)
        said = api.refused(r, 400, "context_length_exceeded", "prompt")
        assert re.match(rf"This model's maximum context length is {most} tokens\.", said)


def test_20_a_key_is_needed_where_one_is_set(api, target):
    for path in ("/health", "/ready", "/ping", "/version"):
        assert httpx.get(target.url + path).status_code == 200
    if not target.key:
        pytest.skip("the server takes no key")
    for headers in ({}, {"authorization": f"Bearer {target.key}x"}):
        for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nope"), ("GET", "/openapi.json")):
            r = httpx.request(method, target.url + path, headers=headers)
            api.refused(r, 401, "invalid_api_key", None)
            assert r.headers["www-authenticate"] == "Bearer"


def test_28_a_length_that_is_asked_for_is_the_length(api):
    usage = chat(api, ignore_eos=True, max_tokens=64, min_tokens=64).json()["usage"]
    assert usage["completion_tokens"] == 64


def test_29_the_server_goes_on_after_a_client_that_leaves(api):
    body = {"messages": USER, "stream": True, "ignore_eos": True, "max_tokens": 100}
    with api.http.stream("POST", "/v1/chat/completions", json=body) as r:
        next(r.iter_lines())
    assert chat(api).status_code == 200


def test_tokens_of_a_text_are_that_text(api):
    text = "héllo, 世界 👩‍👩‍👧"
    tokens = api.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert api.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
