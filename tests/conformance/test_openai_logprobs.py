"""Log probabilities and the fields that change logits, over HTTP. Numbers are those of the conformance list; A7 and A11 of the list
of faults. The scripted engine makes up log probabilities that depend on the token: see ``ScriptedExecutor._scores``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

EOS = 1
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def made_up(token: int, k: int, vocab: int) -> list[tuple[int, float]]:
    """The k likeliest tokens and their numbers, as the scripted engine has them, by hand."""
    own = np.float32(-0.1 - (token % 7) / 64)
    return [((token + j) % vocab, float(np.float32(float(own) - j / 2))) for j in range(k)]


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def joined_content(chunks: list[dict[str, Any]], index: int = 0) -> list[Any]:
    return [entry for c in choices_of(chunks, index) if c["logprobs"] for entry in c["logprobs"]["content"]]


def joined_lists(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, list[Any]]:
    told = [c["logprobs"] for c in choices_of(chunks, index) if c["logprobs"]]
    return {k: [x for t in told for x in t[k]] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


def test_06_bytes_of_chat_logprobs_join_to_the_text(served, api, vocabulary):
    text = "héllo 👩‍👩‍👧 世界"
    ids = [*vocabulary.ids(text), vocabulary.word["Hello"], EOS]
    served.replies(ids, ids)
    choice = api.chat(logprobs=True).json()["choices"][0]
    assert choice["message"]["content"] == text + "Hello"
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert bytes(b for e in entries for b in e["bytes"] or ()) == (text + "Hello").encode()
    assert len(entries) == len(ids)
    assert entries[-1]["token"] == "<|im_end|>"
    assert entries[-1]["bytes"] is None
    assert entries[-2] == {
        "token": "Hello",
        "logprob": entries[-2]["logprob"],
        "bytes": [*b"Hello"],
        "top_logprobs": [],
    }
    chunks = api.chunks(api.chat(logprobs=True, stream=True))
    assert joined_content(chunks) == entries
    assert api.text(chunks) == text + "Hello"


@pytest.mark.parametrize("k", [0, 1, 3, 20])
def test_a7_each_token_has_its_own_alternatives_and_a_stream_the_same(served, api, vocabulary, k):
    ids = [*vocabulary.ids("abcxyz"), EOS]
    served.replies(ids, ids)
    entries = api.chat(logprobs=True, top_logprobs=k).json()["choices"][0]["logprobs"]["content"]
    for token, entry in zip(ids, entries, strict=True):
        want = made_up(token, k, vocabulary.size)
        assert [c["logprob"] for c in entry["top_logprobs"]] == [number for _, number in want]
        assert entry["logprob"] == made_up(token, 1, vocabulary.size)[0][1]
        if k:
            assert entry["top_logprobs"][0]["token"] == entry["token"]
    chunks = api.chunks(api.chat(logprobs=True, top_logprobs=k, stream=True))
    assert joined_content(chunks) == entries
    assert all(len(c["logprobs"]["content"]) for c in choices_of(chunks) if c["logprobs"])


def test_a7_two_choices_and_a_request_without_side_by_side(served, api, vocabulary):
    replies = [[*vocabulary.ids(t), EOS] for t in ("ab", "wxyz")]
    served.replies(*replies, replies[0])
    chunks = api.chunks(api.chat(logprobs=True, top_logprobs=2, n=2, stream=True))
    for index, ids in enumerate(replies):
        entries = joined_content(chunks, index)
        assert [e["logprob"] for e in entries] == [made_up(i, 1, vocabulary.size)[0][1] for i in ids]
    plain = api.chunks(api.chat(stream=True))
    assert all(c["logprobs"] is None for c in choices_of(plain))


def test_the_sdk_collects_logprobs(served, sdk, vocabulary):
    ids = [*vocabulary.ids("abc"), EOS]
    served.replies(ids, ids)
    whole = sdk.chat.completions.create(model="org/name", messages=USER, logprobs=True, top_logprobs=2)
    with sdk.chat.completions.stream(model="org/name", messages=USER, logprobs=True, top_logprobs=2) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        content = answer.choices[0].logprobs.content
        assert [e.token for e in content] == ["a", "b", "c", "<|im_end|>"]
        assert [len(e.top_logprobs) for e in content] == [2] * 4
    assert whole.choices[0].logprobs.content == streamed.choices[0].logprobs.content


@pytest.mark.parametrize("stream", [False, True])
def test_10_echo_with_logprobs(served, api, vocabulary, stream):
    """What lm-eval sends: all lists have the prompt's tokens and the one that was generated."""
    prompts = [vocabulary.ids("hello"), vocabulary.ids("abc")]
    served.replies(rules=[{"prompt": p, "replies": [[vocabulary.byte[ord("!")]]]} for p in prompts])
    r = api.complete(prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234, stream=stream)
    if stream:
        chunks = api.chunks(r)
        lists = [joined_lists(chunks, i) for i in range(2)]
        texts = [api.text(chunks, i) for i in range(2)]
    else:
        choices = r.json()["choices"]
        assert [c["index"] for c in choices] == [0, 1]
        lists, texts = [c["logprobs"] for c in choices], [c["text"] for c in choices]
    assert texts == ["hello!", "abc!"]
    for prompt, text, told in zip(prompts, texts, lists, strict=True):
        n = len(prompt) + 1
        assert [len(told[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [n] * 4
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert "".join(told["tokens"]) == text
        for token, number, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"]))[1:]:
            assert top[token] == number
            assert max(top.values()) >= number
            assert len(top) <= 2
        assert told["text_offset"] == list(range(n))
        want = [made_up(i, 1, vocabulary.size)[0][1] for i in [*prompt, vocabulary.byte[ord("!")]]]
        assert told["token_logprobs"][1:] == want[1:]


@pytest.mark.parametrize("stream", [False, True])
def test_10_every_choice_of_an_echo_begins_with_its_prompt(served, api, vocabulary, stream):
    """Two choices, of which the engine scores the prompt once."""
    prompt = vocabulary.ids("a prompt of more than one page of tokens")
    served.replies(rules=[{"prompt": prompt, "replies": [[vocabulary.byte[ord(c)], EOS] for c in "xy"]}])
    r = api.complete(prompt, echo=True, logprobs=1, n=2, stream=stream)
    if stream:
        chunks = api.chunks(r)
        lists, texts = [joined_lists(chunks, i) for i in range(2)], [api.text(chunks, i) for i in range(2)]
    else:
        choices = r.json()["choices"]
        lists, texts = [c["logprobs"] for c in choices], [c["text"] for c in choices]
    assert sorted(t[-1] for t in texts) == ["x", "y"]
    for told, text in zip(lists, texts, strict=True):
        assert "".join(told["tokens"][:-1]) == text
        assert told["token_logprobs"][: len(prompt)] == lists[0]["token_logprobs"][: len(prompt)]
        assert None not in told["token_logprobs"][1:]
    assert [a.sampling.prompt_logprobs for a in served.admitted] == [1, None]


@pytest.mark.parametrize("stream", [False, True])
def test_11_echo_with_logprobs_and_no_output(served, api, vocabulary, stream):
    r = api.complete("abc", echo=True, logprobs=2, max_tokens=0, stream=stream)
    if stream:
        chunks = api.chunks(r)
        told, text, why = joined_lists(chunks), api.text(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = r.json()["choices"][0]
        assert (r.json()["usage"]["prompt_tokens"], r.json()["usage"]["completion_tokens"]) == (3, 0)
        told, text, why = choice["logprobs"], choice["text"], choice["finish_reason"]
    assert (text, why, told["tokens"]) == ("abc", "length", ["a", "b", "c"])
    assert [n is None for n in told["token_logprobs"]] == [True, False, False]


def test_completion_logprobs_have_the_last_token_and_every_name_once(served, api, vocabulary):
    """A token that is no text alone is written by its bytes; EOS is among them; logprobs 0 gives the token itself."""
    ids = [*vocabulary.ids("é"), vocabulary.word[" world"], EOS]
    served.replies(ids, ids)
    told = api.complete("x", logprobs=0).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", " world", "<|im_end|>"]
    assert told["text_offset"] == [0, 0, 1, 7]
    assert told["top_logprobs"] == [{t: n} for t, n in zip(told["tokens"], told["token_logprobs"], strict=True)]
    chunks = api.chunks(api.complete("x", logprobs=0, stream=True))
    assert joined_lists(chunks) == told
    served.replies(ids)
    named = api.complete("x", logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{i}" for i in ids]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_string_are_told_and_none_after_them(served, api, vocabulary, stream):
    w = vocabulary.word
    served.replies([*vocabulary.ids("say "), w["E"], w["N"], w["D then"], *vocabulary.ids("more"), EOS])
    r = api.complete("x", stop="END", logprobs=0, stream=stream)
    told = joined_lists(api.chunks(r)) if stream else r.json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["s", "a", "y", " ", "E", "N", "D then"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs(served, api, vocabulary, path):
    """By id, with null for the first; such a prompt is computed, not read from the cache."""
    served.replies(*[[EOS]] * 3)
    body = {"messages": USER} if path == CHAT else {"prompt": "hello, a longer prompt that fills pages"}
    api.post(path, body)
    answer = api.post(path, {**body, "prompt_logprobs": 2, "return_token_ids": True}).json()
    holder = answer if path == CHAT else answer["choices"][0]
    ids, told = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert len(told) == len(ids)
    assert told[0] is None
    for token, entry in zip(ids[1:], told[1:], strict=True):
        want = made_up(token, 2, vocabulary.size)
        assert {int(i): e["logprob"] for i, e in entry.items()} == dict(want)
        assert entry[str(token)]["rank"] == 1
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    api.refused(api.post(path, {**body, "prompt_logprobs": 1, "stream": True}), 400, "invalid_value", "prompt_logprobs")


def test_28_min_tokens_holds_stop_strings_back_and_reaches_the_engine(served, api, vocabulary):
    ids = [*vocabulary.ids("END and END"), EOS]
    served.replies(ids, [*vocabulary.ids("c" * 70), EOS])
    choice = api.chat(stop="END", min_tokens=5).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("END and ", "END")
    assert served.admitted[-1].sampling.min_new == 5
    body = api.chat(ignore_eos=True, max_tokens=64, min_tokens=64).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (64, "length")


def test_fields_reach_the_engine_as_they_were_sent(served, api, vocabulary):
    served.replies([EOS])
    r = api.chat(
        presence_penalty=0.5, frequency_penalty=-1.5, repetition_penalty=1.2, logit_bias={"5": -100, "7": 2.5},
        allowed_token_ids=[7, 5, 5], bad_words=["Hello"], min_tokens=0, stop_token_ids=[9], best_of=None,
    )  # fmt: skip
    assert r.status_code == 200, r.text
    s = served.admitted[-1].sampling
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.5, -1.5, 1.2)
    assert dict(zip(s.bias_ids, s.biases, strict=True)) == {5: -100, 7: 2.5}
    assert s.allowed_ids == (5, 7)
    assert s.stop_ids == (EOS, 9)
    assert s.bad_words == (tuple(vocabulary.ids("Hello")), tuple(vocabulary.ids(" Hello")))


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        (CHAT, {"allowed_token_ids": [151645]}, "invalid_value", "allowed_token_ids[0]"),
        (CHAT, {"allowed_token_ids": [5, -1]}, "invalid_value", "allowed_token_ids[1]"),
        (CHAT, {"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
        (CHAT, {"allowed_token_ids": ["5"]}, "invalid_type", "allowed_token_ids[0]"),
        (CHAT, {"logit_bias": {"151645": 1}}, "invalid_value", "logit_bias"),
        (CHAT, {"logit_bias": {"5": "1"}}, "invalid_type", "logit_bias.5"),
        (CHAT, {"logit_bias": {"5": -100.5}}, "decimal_below_min_value", "logit_bias.5"),
        (CHAT, {"bad_words": "x"}, "invalid_type", "bad_words"),
        (CHAT, {"bad_words": ["x", " "]}, "invalid_value", "bad_words[1]"),
        (CHAT, {"bad_words": ["x"] * 129}, "array_above_max_length", "bad_words"),
        (CHAT, {"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
        (CHAT, {"min_tokens": -1}, "integer_below_min_value", "min_tokens"),
        (CHAT, {"prompt_logprobs": 21}, "integer_above_max_value", "prompt_logprobs"),
        (CHAT, {"logprobs": 5}, "invalid_type", "logprobs"),
        (CHAT, {"logits": {"nobody": {}}}, "invalid_value", "logits.nobody"),
        (TEXT, {"logprobs": True}, "invalid_type", "logprobs"),
        (TEXT, {"logprobs": "1"}, "invalid_type", "logprobs"),
        (TEXT, {"logprobs": 21}, "integer_above_max_value", "logprobs"),
        (TEXT, {"logprobs": -1}, "integer_below_min_value", "logprobs"),
        (TEXT, {"min_tokens": 17}, "invalid_value", "min_tokens"),
    ],
)
def test_15_a11_bad_values_of_these_fields(served, api, path, fields, code, param):
    body = {"messages": USER, **fields} if path == CHAT else {"prompt": "x", **fields}
    api.refused(api.post(path, body), 400, code, param)
    assert served.admitted == []
