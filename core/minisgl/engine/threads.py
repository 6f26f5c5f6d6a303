"""How the CPU threads of a model wait for one another."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "10000"


def bound_spinning() -> None:
    """Let waiting OpenMP threads sleep after a fraction of a millisecond. libgomp's own limit is some milliseconds: when
    other processes want the cores, such as the text and API workers, a step of a small model then takes several times as
    long. It is read once, when torch is imported, so call this before any plugin is; a program that has imported torch
    itself, or has set how threads wait, keeps what it has."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
