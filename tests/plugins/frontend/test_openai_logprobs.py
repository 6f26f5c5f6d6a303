"""Log probabilities as JSON, where the made-up ones of the scripted engine do not reach."""

from __future__ import annotations

import math

from minisgl.api import Candidate, TokenLogprob
from minisgl_plugins.frontend.openai_logprobs import LogprobWriter

PLAIN, IDS = LogprobWriter(False), LogprobWriter(True)


def candidate(token: int, logprob: float | None, data: bytes | None, text: str | None = None) -> Candidate:
    return Candidate(token, logprob, text or (data or b"").decode("utf-8", "replace"), data)


def test_minus_infinity_is_a_number_that_json_has() -> None:
    c = candidate(5, -math.inf, b"x")
    told = [TokenLogprob(c, 9, (c,), 0)]
    assert PLAIN.chat(told)["content"][0]["logprob"] == -9999.0
    assert PLAIN.completion(told)["token_logprobs"] == [-9999.0]
    assert PLAIN.completion(told)["top_logprobs"] == [{"x": -9999.0}]
    assert PLAIN.prompt(told, 1) == [{"5": {"logprob": -9999.0, "rank": 9, "decoded_token": "x"}}]


def test_of_tokens_that_are_written_alike_the_likelier_counts() -> None:
    """Two ids may stand for the same text."""
    own, other = candidate(5, -2.0, b"a"), candidate(6, -0.5, b"a")
    told = [TokenLogprob(own, 2, (other, own), 0)]
    assert PLAIN.completion(told)["top_logprobs"] == [{"a": -0.5}]
    assert PLAIN.completion(told)["token_logprobs"] == [-2.0]
    assert IDS.completion(told)["top_logprobs"] == [{"token_id:6": -0.5, "token_id:5": -2.0}]


def test_tokens_that_are_no_text_alone_have_names_of_their_own() -> None:
    """U+FFFD itself is text; cut characters are written as bytes, so that they are not one name."""
    halves = [candidate(7, -1.0, b"\xc3"), candidate(8, -1.5, b"\xc4")]
    told = [TokenLogprob(halves[0], 1, tuple(halves), 0)]
    assert PLAIN.completion(told)["top_logprobs"] == [{"bytes:\\xc3": -1.0, "bytes:\\xc4": -1.5}]
    entry = PLAIN.chat(told)["content"][0]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xC3])
    special = TokenLogprob(candidate(1, -0.1, None, "<|end|>"), 1, (), 3)
    assert PLAIN.completion([special])["tokens"] == ["<|end|>"]


def test_a_token_outside_its_alternatives_is_added_to_them() -> None:
    best, own = candidate(3, -0.1, b"b"), candidate(4, -4.0, b"c")
    told = [TokenLogprob(own, 17, (best,), 0)]
    assert PLAIN.completion(told)["top_logprobs"] == [{"b": -0.1, "c": -4.0}]
    assert [c["token"] for c in PLAIN.chat(told)["content"][0]["top_logprobs"]] == ["b"]
    (entry,) = PLAIN.prompt(told, 1)
    assert entry is not None
    assert {int(i): e["rank"] for i, e in entry.items()} == {3: 1, 4: 17}


def test_offsets_of_an_output_begin_after_the_echo() -> None:
    prompt = [TokenLogprob(candidate(1, None, b"ab"), 0, (), 0), TokenLogprob(candidate(2, -1.0, b"c"), 1, (), 2)]
    output = [TokenLogprob(candidate(3, -1.0, b"d"), 1, (), 0), TokenLogprob(candidate(4, -1.0, b"e"), 1, (), 1)]
    lists = PLAIN.completion(output, 3, prompt)
    assert lists["text_offset"] == [0, 2, 3, 4]
    assert lists["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert lists["top_logprobs"][0] is None
