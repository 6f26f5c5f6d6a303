"""How many calls something makes: what a rule about its cost is tested with, since a time depends on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def counted(call: Callable[[], T], events: tuple[str, ...] = ("call",)) -> tuple[T, int]:
    """Runs ``call`` with the garbage collector off, since what that calls is nobody's cost here.

    Args: events: what counts, of the events of ``sys.setprofile``: Python functions alone, or with "c_call" C functions too.
    Returns: its value, and the number of calls made from it.
    """
    count = 0

    def tick(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in events

    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(tick)
    try:
        value = call()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return value, count
