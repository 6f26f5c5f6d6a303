"""Requests of ``minisgl simulate``: public trace formats, synthetic ones, and the tokens made up for them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.base.errors import ConfigError
from minisgl_cli.simulate.synthetic import Synthetic, draw
from minisgl_cli.simulate.trace import read_trace
from minisgl_cli.simulate.workload import Request, at_rate, rate_of, tokens_of

# Two lines of the trace of Mooncake, and the record that Qwen-Bailian's README shows, its ids cut to the blocks of 33 tokens.
MOONCAKE = [
    {"timestamp": 3052, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]},
    {"timestamp": 0, "input_length": 1200, "output_length": 500, "hash_ids": [0, 42, 7]},
]
BAILIAN = {
    "chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 33, "output_length": 132, "type": "text",
    "turn": 2, "hash_ids": [1089, 1090, 13148],
}  # fmt: skip


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_mooncake_has_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    form, [first, second] = read_trace(write(tmp_path / "t.jsonl", *MOONCAKE))
    assert form.name == "mooncake"
    assert (first.at_s, second.at_s) == (0.0, 3.052)  # in order of time
    assert first.lengths.tolist() == [512, 512, 176]
    assert (second.input_len, second.output_len) == (2287, 316)
    same = first.prompt()[:1024] == second.prompt()[:1024]
    assert same.all()
    assert (first.prompt()[1024:1200] != second.prompt()[1024:1200]).all()


def test_bailian_has_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    other = BAILIAN | {"chat_id": 160, "timestamp": 62.5, "hash_ids": [1089, 5, 13148]}
    form, [first, second] = read_trace(write(tmp_path / "t.jsonl", BAILIAN, other))
    assert form.name == "qwen-bailian"
    assert first.at_s == 61.114
    assert first.lengths.tolist() == [16, 16, 1]
    same = first.prompt() == second.prompt()
    assert same.tolist() == [True] * 16 + [False] * 16 + [True]


def test_a_last_block_without_an_id_is_like_no_other(tmp_path: Path) -> None:
    records = [BAILIAN | {"hash_ids": [1089, 1090]}] * 2
    _, [first, second] = read_trace(write(tmp_path / "t.jsonl", *records))
    assert (first.input_len, second.input_len) == (33, 33)
    assert (first.prompt() == second.prompt()).tolist() == [True] * 32 + [False]


def test_a_limit_takes_the_first_lines(tmp_path: Path) -> None:
    _, requests = read_trace(write(tmp_path / "t.jsonl", MOONCAKE[1], MOONCAKE[0], {"wrong": 1}), limit=2)
    assert [r.at_s for r in requests] == [0.0, 3.052]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_length": 0}, "input_length = 0; an integer >= 1"),
        ({"input_length": "7"}, "input_length = '7'"),
        ({"output_length": True}, "output_length = True"),
        ({"timestamp": -1}, "timestamp = -1; a number >= 0"),
        ({"timestamp": None}, "timestamp = None"),
        ({"hash_ids": None}, "hash_ids = None; a list of integers"),
        ({"hash_ids": [1, "a", 2]}, "a list of integers"),
        ({"hash_ids": [1, -2, 2]}, "a list of integers"),
        (
            {"hash_ids": [1]},
            "1 hash_ids for input_length 33; the qwen-bailian format has one for each 16 tokens, 3 here",
        ),
        ({"hash_ids": [1, 2, 3, 4]}, "4 hash_ids"),
        ({"turn": None}, "turn = None; the qwen-bailian format needs int"),
        ({"chat_id": "x"}, "chat_id = 'x'; the qwen-bailian format needs int"),
        ({"type": 3}, "type = 3; the qwen-bailian format needs str"),
    ],
)
def test_a_wrong_field_is_refused_with_its_line(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", BAILIAN, BAILIAN | wrong)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    assert f"--trace {path}:2: " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(("line", "message"), [("{", "not JSON"), ("[1]", "is no JSON object")])
def test_a_line_that_is_no_object_is_refused_with_its_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match=rf":3: .*{message}"):
        read_trace(path)


def test_formats_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":2: chat_id = None; the qwen-bailian format needs int"):
        read_trace(write(tmp_path / "t.jsonl", BAILIAN, MOONCAKE[0]))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(write(tmp_path / "t.jsonl"))


# ------------------------------------------------------------------------------------------------------------ tokens


def test_pieces_with_one_key_begin_alike_and_others_differ() -> None:
    key = np.zeros(100, np.int64)
    at = np.arange(100)
    tokens = tokens_of(key + 5, at)
    assert tokens.dtype == np.int32
    assert (tokens >= 0).all()
    assert (tokens == tokens_of(key + 5, at)).all()
    assert len({*tokens.tolist(), *tokens_of(key + 6, at).tolist()}) == 200


def one(at_s: float, follows: int | None = None) -> Request:
    return Request(at_s, np.array([1], np.int64), np.array([4], np.int64), 2, 1, follows)


def test_a_rate_stretches_the_pattern() -> None:
    """Three requests over 4 s come at 2 / 4 s * 3 / 3 = 0.5 per second; at 2 per second they take a quarter of the time."""
    requests = [one(1.0), one(2.0), one(5.0)]
    assert rate_of(requests) == 0.5
    assert [r.at_s for r in at_rate(requests, 2.0)] == [0.0, 0.25, 1.0]
    assert [r.at_s for r in at_rate(requests, float("inf"))] == [0.0, 0.0, 0.0]


def test_what_follows_another_request_keeps_its_pause() -> None:
    """Two conversations of two turns: 1 conversation per second is 2 requests per second."""
    requests = [one(0.0), one(7.0, follows=0), one(1.0), one(7.0, follows=2)]
    assert rate_of(requests) == 2.0
    assert [r.at_s for r in at_rate(requests, 4.0)] == [0.0, 7.0, 0.5, 7.0]


def test_requests_that_come_at_once_cannot_be_stretched() -> None:
    with pytest.raises(ConfigError, match="no pattern to stretch"):
        at_rate([one(3.0), one(3.0)], 2.0)
    assert [r.at_s for r in at_rate([one(3.0)], 2.0)] == [0.0]  # one alone has none and needs none


# --------------------------------------------------------------------------------------------------------- synthetic


def test_equal_seeds_give_equal_requests() -> None:
    s = Synthetic(requests=50, turns=(1, 3), system_prompts=2)
    first, again, other = draw(s, 3), draw(s, 3), draw(s, 4)
    assert len(first) == 50
    assert all((a.prompt() == b.prompt()).all() and a.at_s == b.at_s for a, b in zip(first, again, strict=True))
    assert [r.at_s for r in first] != [r.at_s for r in other]


def test_lengths_are_within_their_ranges() -> None:
    for r in draw(Synthetic(requests=100, input_len=(5, 9), output_len=(2, 3)), 0):
        assert 5 <= r.input_len <= 9
        assert 2 <= r.output_len <= 3


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    requests = draw(
        Synthetic(requests=6, turns=(3, 3), system_prompts=1, system_len=20, input_len=(4, 4), output_len=(5, 5)), 0
    )
    assert [r.follows for r in requests] == [None, 0, 1, None, 3, 4]
    for earlier, later in pairwise(requests):
        if later.follows is not None:
            answer = tokens_of(np.full(5, earlier.output_key), np.arange(5))
            said = np.concatenate([earlier.prompt(), answer])
            assert (later.prompt()[: len(said)] == said).all()
            assert later.input_len == len(said) + 4


def test_system_prompts_are_shared() -> None:
    requests = draw(Synthetic(requests=40, system_prompts=3, system_len=64, input_len=(8, 8)), 0)
    assert len({r.prompt()[:64].tobytes() for r in requests}) == 3
    assert len({r.prompt()[64:].tobytes() for r in requests}) == 40


def test_a_share_of_inputs_is_long() -> None:
    """With probability 0.25, of 400: 100 expected, standard deviation 8.7."""
    requests = draw(Synthetic(requests=400, input_len=(1, 10), long_share=0.25, long_len=(1000, 2000)), 0)
    assert 60 <= sum(r.input_len >= 1000 for r in requests) <= 140


@pytest.mark.parametrize(("cv", "low", "high"), [(1.0, 0.9, 1.1), (3.0, 2.5, 3.5), (0.3, 0.27, 0.33)])
def test_gaps_have_the_asked_variation(cv: float, low: float, high: float) -> None:
    gaps = np.diff([r.at_s for r in draw(Synthetic(requests=4000, cv=cv), 0)])
    assert low <= gaps.std() / gaps.mean() <= high
