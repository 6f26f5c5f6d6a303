"""Every bundled logits processor passes the contract of its kind; and the contract finds what it is for."""

from __future__ import annotations

import pytest
import torch

from minisgl.api import SamplingSpec
from minisgl.api.device import BANNED, FOREVER, LogitsProcessor
from minisgl.testing import contract

SPECS = {
    "bias": (SamplingSpec(bias_ids=(4, 9), biases=(2.0, -100.0)), SamplingSpec(bias_ids=(0,), biases=(0.5,))),
    "penalties": (
        SamplingSpec(presence_penalty=1.0, frequency_penalty=-0.5),
        SamplingSpec(repetition_penalty=1.4),
        SamplingSpec(repetition_penalty=0.8, frequency_penalty=1.5),
    ),
    "min_tokens": (SamplingSpec(stop_ids=(2, 5), min_new=4), SamplingSpec(stop_ids=(1,), min_new=7)),
    "allowed_tokens": (SamplingSpec(allowed_ids=(1, 2)), SamplingSpec(allowed_ids=(30, 39))),
    "bad_words": (SamplingSpec(bad_words=((1, 2), (3,))), SamplingSpec(bad_words=((2, 3, 2), (1, 1), (3, 2, 3, 4)))),
}


def checks(name: str) -> type:
    """The contract of one, with what it is asked."""
    base = contract("logits", name)
    return type(base.__name__, (base,), {"specs": SPECS[name]})


globals().update({cls.__name__: cls for name in SPECS for cls in [checks(name)]})


class Forgetful(LogitsProcessor):
    """Bans the last token; ``set_row`` leaves what the slot's former row had."""

    def __init__(self, ctx):  # type: ignore[no-untyped-def]
        self.last = torch.full((ctx.max_slots + 1,), 0)

    def set_row(self, row):  # type: ignore[no-untyped-def]
        return FOREVER if row.sampling.extra else 0

    def apply(self, logits, rows):  # type: ignore[no-untyped-def]
        logits.scatter_(1, self.last[rows.slot][:, None], BANNED)

    def sampled(self, tokens, rows):  # type: ignore[no-untyped-def]
        self.last[rows.slot] = tokens


def test_the_contract_finds_state_that_is_left_in_a_slot_or_lost_by_a_preemption() -> None:
    found = contract("logits", Forgetful)()
    found.test_it_changes_logits_of_rows_that_ask_and_leaves_others_alone()
    found.test_rows_do_not_depend_on_their_neighbours()
    with pytest.raises(AssertionError, match="step 0"):
        found.test_a_recycled_slot_has_nothing_of_the_row_before()
    with pytest.raises(AssertionError, match="step 0"):
        found.test_a_row_that_was_preempted_goes_on_as_if_it_had_not_been(4)
