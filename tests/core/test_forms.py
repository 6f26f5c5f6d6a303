"""Masks of rows that are held to a grammar: which rows, which tokens, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minisgl.base.errors import RequestError
from minisgl.base.grammar import U32, Matcher
from minisgl.base.types import NO_PAGES, RowInit, SamplingSpec
from minisgl.runtime.forms import Forms

VOCAB, STOP = 40, 39


class Counting(Matcher):
    """Allows token n after n tokens, up to 3 of them, and then only the stop."""

    def __init__(self) -> None:
        self.n = 0

    def fill(self, mask: U32) -> None:
        token = STOP if self.done else self.n
        mask[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        good = token == self.n
        self.n += good
        return good

    def rollback(self, count: int) -> None:
        self.n -= count

    @property
    def done(self) -> bool:
        return self.n >= 3


def make(compiled: bytes) -> Matcher:
    if compiled == b"bad":
        raise RequestError("too large")
    return Counting()


def row(slot: int, grammar: bytes, written: tuple[int, ...] = ()) -> RowInit:
    spec = SamplingSpec(stop_ids=(STOP,), grammar=grammar)
    ids = np.zeros(1, np.int32)
    return RowInit(slot, slot, 0, ids, NO_PAGES, spec, len(written), 9, np.array(written, np.int32))


def slots(*values: int) -> Any:
    return np.array(values, np.int32)


def allowed(forms: Forms, *which: int, width: int = VOCAB + 8) -> list[list[int]]:
    logits = forms.mask(torch.zeros(len(which), width), slots(*which))
    return [torch.isfinite(r).nonzero().flatten().tolist() for r in logits]


def tokens(forms: Forms, *values: int) -> None:
    forms.sampled(lambda: slots(*values))


def test_only_rows_with_a_grammar_are_masked() -> None:
    forms = Forms(VOCAB, torch.device("cpu"), make)
    forms.change(NO_PAGES, (row(0, b""), row(2, b"g")))
    assert forms.any(slots(1, 2))
    assert not forms.any(slots(0, 1))
    assert allowed(forms, 0, 2) == [list(range(VOCAB + 8)), [0]]


def test_a_matcher_that_was_prepared_is_not_made_again_but_for_a_row_that_comes_back() -> None:
    made: list[bytes] = []

    def making(compiled: bytes) -> Matcher:
        made.append(compiled)
        return make(compiled)

    forms = Forms(VOCAB, torch.device("cpu"), making)
    forms.prepare(2, b"g")
    forms.change(NO_PAGES, (row(2, b"g"),))
    assert (made, allowed(forms, 2)) == ([b"g"], [[0]])
    forms.change(slots(2), (row(2, b"g", written=(0, 1)),))
    assert (made, allowed(forms, 2)) == ([b"g", b"g"], [[2]])


def test_a_mask_follows_the_token_before_and_ends_with_a_stop() -> None:
    forms = Forms(VOCAB, torch.device("cpu"), make)
    forms.change(NO_PAGES, (row(0, b"g"), row(1, b"g")))
    for n in range(3):
        assert allowed(forms, 1, 0) == [[n], [n]]
        tokens(forms, n, n)
    assert allowed(forms, 0) == [[STOP]]


def test_a_token_of_a_row_that_left_does_not_reach_the_next_one_in_its_slot() -> None:
    forms = Forms(VOCAB, torch.device("cpu"), make)
    forms.change(NO_PAGES, (row(0, b"g"),))
    assert allowed(forms, 0) == [[0]]
    tokens(forms, 0)
    forms.change(slots(0), (row(0, b"g"),))
    assert allowed(forms, 0) == [[0]]


def test_a_row_that_comes_back_goes_on_where_it_was() -> None:
    forms = Forms(VOCAB, torch.device("cpu"), make)
    forms.change(NO_PAGES, (row(0, b"g", (0, 1)),))
    assert allowed(forms, 0) == [[2]]


def test_a_grammar_that_fails_leaves_only_a_stop() -> None:
    forms = Forms(VOCAB, torch.device("cpu"), make)
    forms.change(NO_PAGES, (row(0, b"bad"), row(1, b"g")))
    assert allowed(forms, 0, 1) == [[STOP], [0]]
    tokens(forms, STOP, 7)  # 7 is not what the grammar allows
    assert allowed(forms, 1) == [[STOP]]


def test_w4_nothing_beyond_the_vocabulary_is_allowed() -> None:
    forms = Forms(VOCAB, torch.device("cpu"), make)
    forms.change(NO_PAGES, (row(0, b"bad"),))
    assert allowed(forms, 0, width=96) == [[STOP]]
