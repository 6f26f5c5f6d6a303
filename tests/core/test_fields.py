"""Readers of JSON fields: types, ranges, null, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minisgl.base.errors import RequestError
from minisgl.client.envelope import clip, error_object
from minisgl.client.fields import Fields


def code(read: Callable[[Fields], Any], value: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        read(Fields({"x": value}))
    assert caught.value.status == 400
    assert caught.value.param == "x"
    return caught.value.code


@pytest.mark.parametrize("value", [True, False, "5", [], {}, 1.5])
def test_only_integral_numbers_are_integers(value):
    assert code(lambda f: f.integer("x"), value) == "invalid_type"


@pytest.mark.parametrize(("value", "read"), [(5, 5), (5.0, 5), (-3.0, -3), (2**63 - 1, 2**63 - 1), (None, None)])
def test_integers_and_integral_floats_are_read(value, read):
    got = Fields({"x": value}).integer("x")
    assert got == read
    assert not isinstance(got, float)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (2**63, "integer_above_max_value"),
        (1e300, "integer_above_max_value"),
        (-(2**63) - 1, "integer_below_min_value"),
        (-9.223372036854775808e18, "integer_below_min_value"),  # what JSON parsers make of -2**63 - 1
    ],
)
def test_integers_outside_64_bit_are_refused(value, wanted):
    assert code(lambda f: f.integer("x"), value) == wanted


@pytest.mark.parametrize("value", [True, "0.5", [], {}])
def test_only_numbers_are_numbers(value):
    assert code(lambda f: f.number("x"), value) == "invalid_type"


def test_ranges_are_inclusive():
    assert Fields({"x": 2}).number("x", 0, 2) == 2.0
    assert Fields({"x": 0}).number("x", 0, 2) == 0.0
    assert code(lambda f: f.number("x", 0, 2), 2.0000001) == "decimal_above_max_value"
    assert code(lambda f: f.number("x", 0, 2), -0.0000001) == "decimal_below_min_value"


@pytest.mark.parametrize("value", [0, 1, "true", "yes", [], {}])
def test_only_true_and_false_are_booleans(value):
    assert code(lambda f: f.boolean("x"), value) == "invalid_type"


def test_null_is_absent():
    f = Fields({"x": None})
    assert f.boolean("x") is f.integer("x") is f.number("x") is f.string("x") is f.array("x") is f.object("x") is None
    assert code(lambda f: f.require("x"), None) == "missing_required_parameter"


def test_a_neutral_value_must_have_its_own_type():
    Fields({"x": 1}).refuse("x", 1)
    assert code(lambda f: f.refuse("x", 1), True) == "unsupported_parameter"
    assert code(lambda f: f.refuse("x", False), 0) == "unsupported_parameter"


def test_nested_objects_know_their_path():
    inner = Fields({"a": {"b": 5}}).object("a")
    assert inner is not None
    with pytest.raises(RequestError) as caught:
        inner.boolean("b")
    assert caught.value.param == "a.b"


def test_unknown_names_are_those_nobody_asked_for():
    f = Fields({"x": 1, "y": 2})
    f.integer("x")
    assert f.unknown() == ["y"]


@pytest.mark.parametrize("value", ["é" * 100_000, [1] * 100_000, {"a": 1}, "\0\n"])
def test_messages_stay_small_and_show_no_large_input(value):
    with pytest.raises(RequestError) as caught:
        Fields({"x": value}).integer("x")
    assert len(caught.value.message) < 300


def test_the_envelope_is_clipped_at_a_character():
    error = RequestError("é" * 2000, param="p" * 1000)
    said = error_object(error)["error"]
    assert len(said["message"].encode()) <= 1024
    assert said["message"].endswith("é...")
    assert len(said["param"]) == 200
    assert clip("a\ud800b", 10) == "a?b"
