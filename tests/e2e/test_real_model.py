"""The default model through the real server and the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

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
