from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.text.stops import StopHolder


def feed(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What each piece lets out, the flush last; and the match."""
    holder = StopHolder(stops, include)
    out = [holder.push(p) for p in pieces]
    return [*out, holder.flush()], holder.matched


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string that the text so far ends with, in list order."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    marks = sorted({c % (len(text) + 1) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(marks)]


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=12),
    include=st.booleans(),
)
def test_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    out, matched = feed(stops, pieces_of(text, cuts), include)
    assert ("".join(out), matched) == cut(text, stops, include)


@settings(deadline=None, max_examples=200)
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_only_the_longest_partial_match_is_held(text: str, stops: list[str]) -> None:
    """A2: hold only a real partial match."""
    holder = StopHolder(stops)
    shown = ""
    for i, char in enumerate(text):
        shown += holder.push(char)
        if holder.matched is not None:
            return
        so_far = text[: i + 1]
        partial = max((k for s in stops for k in range(1, len(s)) if so_far.endswith(s[:k])), default=0)
        assert shown == so_far[: len(so_far) - partial]


def test_a1_no_part_of_a_stop_string_is_let_out() -> None:
    out, matched = feed(["DEFGHIJ"], ["ABC", "DEF", "GH", "IJKL", "MN"])
    assert out == ["ABC", "", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_a1_match_in_the_middle_of_a_token_cuts_it() -> None:
    assert feed(["END"], ["E", "N", "D then"]) == (["", "", "", ""], "END")
    assert feed(["END"], ["E", "N", "D then"], include=True) == (["", "", "END", ""], "END")


def test_a2_held_text_is_flushed_at_the_end() -> None:
    assert feed(["END"], ["xE", "N"]) == (["x", "", "EN"], None)


def test_a2_markers_are_not_split_by_unrelated_stop_strings() -> None:
    assert feed(["\n\nUser:"], ["<think>", "hm", "</think>"])[0] == ["<think>", "hm", "</think>", ""]


def test_stop_that_completes_first_wins_whatever_their_order() -> None:
    assert feed(["cdef", "b"], ["abcdef"]) == (["a", ""], "b")


def test_ties_are_decided_by_list_order() -> None:
    assert feed(["bc", "abc"], ["abc"]) == (["a", ""], "bc")
    assert feed(["abc", "bc"], ["abc"]) == (["", ""], "abc")


def test_nothing_follows_a_match() -> None:
    holder = StopHolder(["x"])
    assert holder.push("ax") == "a"
    assert holder.push("bx") == ""
    assert holder.flush() == ""
