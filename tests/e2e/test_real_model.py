"""The default model through the real server and the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from minisgl.testing.server import Server

ANSWER = "The capital of France is Paris."
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(smollm2: Any) -> Iterator[OpenAI]:
    with Server() as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def test_greedy_answer_is_exact(client: OpenAI) -> None:
    out = client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0)
    assert out.choices[0].message.content == ANSWER
    assert out.choices[0].finish_reason == "stop"


def test_greedy_stream_is_exact(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_defaults_say_paris_every_time(client: OpenAI) -> None:
    """The source's sampling defaults make a small model sensible."""

    def ask(_: int) -> str:
        out = client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=QUESTION, max_tokens=64)
        return out.choices[0].message.content or ""

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, range(10)))
    assert all("Paris" in answer for answer in answers), answers


def test_seed_makes_an_answer_repeatable_beside_others(client: OpenAI) -> None:
    """P2, through the whole server."""

    def tell(seed: int | None) -> str:
        out = client.completions.create(
            model="SmolLM2-135M-Instruct", prompt="Once upon a time", temperature=1.0, seed=seed, max_tokens=16
        )
        return out.choices[0].text

    alone = tell(7)
    with ThreadPoolExecutor(8) as pool:
        among = list(pool.map(tell, [None, None, 7, None, None, None, 7, None]))
    assert among[2] == among[6] == alone
    assert len({among[i] for i in (0, 1, 3, 4, 5, 7)}) > 1


CITY: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 9_999_999},
        "size": {"enum": ["small", "large"]},
        "rivers": {"type": "array", "items": {"enum": ["Seine", "Tiber"]}, "maxItems": 2},
        "old": {"type": ["boolean", "null"]},
    },
    "required": ["city", "people", "size", "rivers", "old"],
    "additionalProperties": False,
}


def _formed(client: OpenAI, schema: Any, strict: bool, **fields: Any) -> Any:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": strict}}
    ask: Any = [{"role": "user", "content": "Tell me about a city, as JSON."}]
    return client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=ask, response_format=form, **fields)


def test_27_fifty_seeds_keep_to_the_schema(client: OpenAI) -> None:
    def tell(seed: int) -> Any:
        return _formed(client, CITY, True, temperature=1, seed=seed, max_tokens=120).choices[0]

    with ThreadPoolExecutor(50) as pool:
        choices = list(pool.map(tell, range(50)))
    finished = [json.loads(c.message.content) for c in choices if c.finish_reason == "stop"]
    assert len(finished) >= 45  # the schema bounds every part, but whitespace is the model's
    for value in finished:
        jsonschema.validate(value, CITY)
    assert len({json.dumps(value) for value in finished}) > 25  # the seeds differ


def test_27_what_a_grammar_cannot_hold_is_refused_where_it_is_strict(client: OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 4}, "uniqueItems": True, "maxItems": 2}
    with pytest.raises(BadRequestError) as caught:
        _formed(client, schema, True, max_tokens=8)
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "response_format.json_schema.schema")
    assert _formed(client, schema, False, temperature=0, max_tokens=16).choices[0].finish_reason in ("stop", "length")
