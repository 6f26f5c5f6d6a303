"""How many pages a KV setting gives."""

import logging

import pytest
import torch
from pydantic import ValidationError

from minisgl.base.errors import CapacityError
from minisgl.config.memory import parse_memory
from minisgl.config.schema import KVSettings
from minisgl.runtime.attention import KVSpec
from minisgl.runtime.kv import plan_room

CPU = torch.device("cpu")
SPEC = KVSpec(kv_heads=2, head_dim=4, dtype=torch.float32, page_size=16)
PAGE = 2 * 16 * 2 * 4 * 4 * 3  # bytes of K and V in three layers


def room(max_slots=4, max_len=100, **kv):
    return plan_room(KVSettings(**kv), SPEC, 3, CPU, max_slots, max_len)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.5", 500), ("1", 1000), ("1.0", 1000), ("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000),
     ("64k", 64_000), ("3Mi", 3 << 20), ("100B", 100), ("2TiB", 2 << 40)],
)  # fmt: skip
def test_memory_is_a_fraction_of_what_is_free_or_a_size(text, size):
    assert parse_memory(text, 1000) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "2", "1.1", "0", "GiB", "1PiB"])
def test_other_memory_is_refused_with_what_is_accepted(text):
    with pytest.raises(ValueError, match=r"0\.9"):
        parse_memory(text, 1000)
    with pytest.raises(ValidationError, match=r"0\.9"):  # when the settings are read, before a model is loaded
        KVSettings(memory=text)


@pytest.mark.parametrize(("given", "kept"), [(0.5, "0.5"), (1, "1"), (1.0, "1.0"), ("auto", "auto")])
def test_the_fraction_may_be_a_number(given, kept):
    assert KVSettings(memory=given).memory == kept


@pytest.mark.parametrize("given", [2, 1.5, 0.0, -0.5, True, None, []])
def test_other_numbers_and_types_are_refused(given):
    with pytest.raises(ValidationError):
        KVSettings(memory=given)


def test_pages_are_rounded_down_and_one_is_the_dummy_m10():
    r = room(memory=f"{4 * PAGE + PAGE - 1}B", max_len=33)
    assert r.num_pages == 3
    assert r.kv_bytes == 4 * PAGE


def test_max_len_is_never_beyond_the_pool_and_small_values_stay_m10(caplog):
    assert room(num_pages=9, max_len=100).max_len == 100
    assert room(num_pages=50, max_len=7).max_len == 7
    with caplog.at_level(logging.WARNING):
        assert room(num_pages=2, max_len=100).max_len == 32
    assert "context cut from 100 to 32 tokens: kv.num_pages=2" in caplog.text


def test_no_more_pages_than_all_rows_can_use():
    assert room(num_pages=10_000, max_slots=4, max_len=100).num_pages == 4 * 7
    assert room(memory="1GiB", max_slots=1, max_len=16).num_pages == 1


def test_a_pool_without_a_page_is_refused_with_sizes():
    with pytest.raises(CapacityError) as refused:
        room(memory=f"{2 * PAGE - 1}B")
    assert f"takes {PAGE} bytes" in str(refused.value)
    assert "--kv.memory 1MiB" in str(refused.value)
