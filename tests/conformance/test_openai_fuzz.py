"""Whatever the body, the answer is a result or an error envelope, never a 500, and never large."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/responses")
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)

# Text as JSON can carry it: no lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["user", "assistant", "text", "auto", "none", "json_object", "\0", "x" * 5000, 0, 1, -1, 2**31])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
NAMES = [
    "model",
    "messages",
    "prompt",
    "stop",
    "stop_token_ids",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "stream_options",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "functions",
    "user",
    "metadata",
    "ignore_eos",
    "min_tokens",
    "best_of",
    "suffix",
    "cache_salt",
    "request_id",
    "priority",
    "presence_penalty",
    "allowed_token_ids",
    "bad_words",
    "logits",
    "return_tokens_as_token_ids",
    "repetition_penalty",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "documents",
    "modalities",
    "tokens",
    "add_special_tokens",
    "length_penalty",
    "use_beam_search",
    "include_reasoning",
    "thinking_token_budget",
    "skip_special_tokens",
    "input",
    "instructions",
    "max_output_tokens",
    "text",
    "reasoning",
    "include",
    "truncation",
]
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "function"]) | JSON,
        "content": TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3) | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | JSON})})
        )
        | JSON,
        "name": JSON,
        "reasoning": JSON,
    },
)
GOOD: dict[str, Any] = {
    PATHS[0]: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    PATHS[1]: {"prompt": "x"},
    PATHS[4]: {"input": "x", "max_output_tokens": 2},
}
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "call_id": TEXT,
        **dict.fromkeys(("name", "arguments", "encrypted_content"), TEXT | JSON),
        **dict.fromkeys(
            ("content", "output", "summary"),
            TEXT
            | JSON
            | st.lists(
                st.fixed_dictionaries(
                    {
                        "type": st.sampled_from(["input_text", "output_text", "reasoning_text", "input_image"]),
                        "text": TEXT,
                    }
                ),
                max_size=3,
            ),
        ),
    },
)
BODY = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)


def check(r: httpx.Response) -> None:
    assert r.status_code in (200, 400, 404), (r.status_code, r.text[:500])
    assert "x-request-id" in r.headers
    if r.status_code == 200:
        return
    error = r.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert len(error["message"].encode()) <= 1024
    assert len(r.content) < 2048


def send(api: Any, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    check(api.http.post(path, content=content, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", PATHS)
def test_any_fields(api, path):
    @SETTINGS
    @given(BODY)
    def run(body: dict[str, Any]) -> None:
        send(api, path, body)

    run()


def test_any_one_field_of_a_good_request(api):
    @SETTINGS
    @given(st.sampled_from(NAMES), JSON, st.sampled_from([*GOOD]))
    def run(name: str, value: Any, path: str) -> None:
        send(api, path, {**GOOD[path], name: value})

    run()


def test_any_messages(api):
    @SETTINGS
    @given(st.lists(MESSAGE, max_size=3), BODY)
    def run(messages: list[Any], more: dict[str, Any]) -> None:
        send(api, PATHS[0], {**more, "messages": messages})

    run()


def test_any_items(api):
    @SETTINGS
    @given(st.lists(ITEM, max_size=4), BODY)
    def run(items: list[Any], more: dict[str, Any]) -> None:
        send(api, PATHS[4], {**more, "input": items})

    run()


def test_any_json_and_any_bytes(api):
    @SETTINGS
    @given(st.sampled_from(PATHS), JSON.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=200))
    def run(path: str, body: bytes) -> None:
        check(api.http.post(path, content=body, headers={"content-type": "application/json"}))

    run()


def test_a_large_bad_body_gets_a_small_answer(api):
    for prompt in ([["x"] * 5] * 1000, [True] * 40_000, ["x", *range(40_000)], "x" * 1_000_000, [0] * 300_000):
        r = api.post(PATHS[1], {"prompt": prompt})
        check(r)
        assert r.status_code == 400


def test_the_engine_lives_after_all_of_it(api):
    assert api.chat("x").status_code == 200
