"""Mutants that survive for a reason: what they do instead is as right as what they replace.

``explained.txt``: groups of lines, each with a line ``# why`` above it; a line is a mutant as ``generated.py`` shows it,
``module.Class.function: was  ->  now``.
"""

from __future__ import annotations

from pathlib import Path


def explained(text: str) -> dict[str, str]:
    """Line of a mutant -> why. Raises: ValueError if a line has no reason above it."""
    why, out = "", dict[str, str]()
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("# "):
            why = line.removeprefix("# ")
        elif why:
            out[line] = why
        else:
            raise ValueError(f"no reason stands above {line!r}")
    return out


EXPLAINED = explained((Path(__file__).parent / "explained.txt").read_text())
