"""Whatever the body, the answer is a result or an error envelope, never a 500, never large, and there within a second."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_plugins.frontend import anthropic_about, openai_about, responses_about
from minisgl_plugins.frontend.openai_fields import OpenAISettings

MOST_BYTES = 4096  # of an error
MOST_S, TRIES = 1.0, 4

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES = {
    CHAT: openai_about.chat(OpenAISettings()).body,
    COMPLETIONS: openai_about.completions(OpenAISettings()).body,
    RESPONSES: responses_about.responses(OpenAISettings()).body,
    MESSAGES: anthropic_about.messages(OpenAISettings()).body,
    "/v1/messages/count_tokens": anthropic_about.COUNT_TOKENS.body,
    "/tokenize": openai_about.TOKENIZE.body,
    "/detokenize": openai_about.DETOKENIZE.body,
}
FIELDS = {path: sorted(body.schema()["properties"]) for path, body in BODIES.items() if body is not None}
PATHS = tuple(FIELDS)
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
NAMES = sorted({name for names in FIELDS.values() for name in names})
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
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
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


def check(r: httpx.Response, path: str) -> None:
    assert r.status_code in (200, 400, 404), (r.status_code, r.text[:500])
    assert "x-request-id" in r.headers
    if r.status_code == 200:
        return
    assert len(r.content) <= MOST_BYTES
    error = r.json()["error"]
    if path.startswith(MESSAGES):
        assert set(error) == {"message", "type"}
        assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[r.status_code]
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["code"], str)
    assert len(error["message"].encode()) <= 1024


def ask(api: Any, path: str, content: bytes) -> httpx.Response:
    """The checked answer. A refusal that takes too long may take it again: another process had the processor."""
    took: list[float] = []
    while len(took) < TRIES:
        r: httpx.Response = api.http.post(path, content=content, headers={"content-type": "application/json"})
        check(r, path)
        took.append(r.elapsed.total_seconds())
        if r.status_code == 200 or took[-1] < MOST_S:
            return r
    raise AssertionError((path, content[:500], took))


def send(api: Any, path: str, body: Any) -> httpx.Response:
    """A body that says nothing else asks for few tokens, which other servers have to work for."""
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return ask(api, path, json.dumps({most: 2, **body}).encode())


@pytest.mark.parametrize("path", PATHS)
def test_any_fields(api, path):
    @SETTINGS
    @given(BODY)
    def run(body: dict[str, Any]) -> None:
        send(api, path, body)

    run()


def test_any_one_field_of_a_good_request(api, model_name):
    @SETTINGS
    @given(st.sampled_from([*GOOD]), st.data())
    def run(path: str, data: st.DataObject) -> None:
        name, value = data.draw(st.sampled_from(FIELDS[path])), data.draw(JSON)
        send(api, path, {"model": model_name, **GOOD[path], name: value})

    run()


def test_any_messages(api):
    @SETTINGS
    @given(st.lists(MESSAGE, max_size=3), BODY)
    def run(messages: list[Any], more: dict[str, Any]) -> None:
        send(api, CHAT, {**more, "messages": messages})

    run()


def test_any_items(api):
    @SETTINGS
    @given(st.lists(ITEM, max_size=4), BODY)
    def run(items: list[Any], more: dict[str, Any]) -> None:
        send(api, RESPONSES, {**more, "input": items})

    run()


def test_any_json_and_any_bytes(api):
    @SETTINGS
    @given(st.sampled_from(PATHS), JSON.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=200))
    def run(path: str, body: bytes) -> None:
        ask(api, path, body)

    run()


def test_a_large_bad_body_gets_a_small_answer(api):
    for prompt in ([["x"] * 5] * 1000, [True] * 40_000, ["x", *range(40_000)], "x" * 1_000_000, [0] * 300_000):
        assert send(api, COMPLETIONS, {"prompt": prompt}).status_code == 400


def test_the_engine_lives_after_all_of_it(api):
    assert api.chat("x", max_tokens=2).status_code == 200
