"""Defaults of the step's size fit whatever the user set."""

from __future__ import annotations

import pytest

from minisgl.config.schema import LimitsSettings
from minisgl.nn.assemble import step_limits


@pytest.mark.parametrize(
    ("limits", "device", "expected"),
    [
        ({}, "cpu", (32, 256)),
        ({}, "cuda", (256, 8192)),
        ({"batch_tokens": 8}, "cpu", (8, 8)),
        ({"max_running": 512}, "cpu", (512, 512)),
        ({"max_running": 4, "batch_tokens": 16}, "cuda", (4, 16)),
    ],
)
def test_a_step_always_has_room_for_every_running_request(
    limits: dict[str, int], device: str, expected: tuple[int, int]
) -> None:
    """S6: setting one of the two alone never gives a combination that cannot make progress."""
    assert step_limits(LimitsSettings(**limits), device) == expected
