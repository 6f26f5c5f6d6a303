from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.text.decode import ByteDecoder, WindowDecoder, gpt2_alphabet

TEXT = "héllo 👩‍👩‍👧 世界 ก็ดี na\u0301ive \U0001f1e8\U0001f1ff"


def test_alphabet_is_that_of_the_tokenizers_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = gpt2_alphabet()
    assert set(alphabet) == set(ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


@pytest.mark.parametrize("at", range(1, len(TEXT.encode())))
def test_a3_text_split_at_any_byte_has_no_replacement_character(at: int) -> None:
    data = TEXT.encode()
    decoder = ByteDecoder([data[:at], data[at:]])
    pieces = [decoder.push([0]), decoder.push([1]), decoder.finish()]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=5), max_size=12))
def test_a3_joined_pieces_are_the_whole_decoded_at_once(tokens: list[bytes]) -> None:
    decoder = ByteDecoder(tokens)
    text = "".join([decoder.push([i]) for i in range(len(tokens))]) + decoder.finish()
    assert text == b"".join(tokens).decode("utf-8", "replace")


def test_a3_cut_character_becomes_one_replacement_at_the_end() -> None:
    """Conformance case 7: max_tokens cut after 2 of 3 bytes."""
    decoder = ByteDecoder([b"\xe4", b"\xb8", b"\x96"])
    assert decoder.push([0, 1]) == ""
    assert decoder.finish() == "\ufffd"


def test_ids_outside_the_table_add_nothing() -> None:
    assert ByteDecoder([b"a"]).push([0, 1, -1, 99, 0]) == "aa"


def test_invalid_bytes_cost_linear_time() -> None:
    """8000 lone continuation bytes take DecodeStream seconds; here they are 8000 lookups."""
    decoder = ByteDecoder([b"\x80"])
    start = time.perf_counter()
    assert "".join([decoder.push([0]) for _ in range(8000)]) == "\ufffd" * 8000
    assert time.perf_counter() - start < 0.5


def words(ids: Sequence[int]) -> str:
    """A decoder like WordPiece's: a space before every word but the first, none before a suffix; 9 has no text."""
    vocabulary = ["the", "play", "##ing", "##s", "world"]
    text = " ".join(vocabulary[i] for i in ids if i != 9)
    return text.replace(" ##", "").replace("##", "")


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 9]), max_size=40))
def test_window_joins_to_the_whole_for_decoders_that_look_at_neighbours(ids: list[int]) -> None:
    decoder = WindowDecoder(words, limit=4)
    assert "".join([decoder.push([i]) for i in ids]) + decoder.finish() == words(ids)


def raw(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=12))
def test_a3_window_holds_cut_characters(text: str) -> None:
    decoder = WindowDecoder(raw)
    pieces = [decoder.push([b]) for b in text.encode()]
    assert "".join(pieces) + decoder.finish() == text
    assert text.count("\ufffd") == "".join(pieces).count("\ufffd")


def test_window_lets_a_real_replacement_character_go() -> None:
    decoder = WindowDecoder(raw, limit=4)
    text = "".join([decoder.push([0x80]) for _ in range(10)]) + decoder.finish()
    assert text == "\ufffd" * 10


def test_window_stays_small_on_ids_without_text() -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return ""

    decoder = WindowDecoder(decode, limit=8)
    for _ in range(200):
        decoder.push([9])
    assert max(seen) <= 8
