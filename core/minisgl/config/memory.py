"""What a ``kv.memory`` setting says."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40
}  # fmt: skip


def parse_memory(text: str, free: int) -> int:
    """Bytes meant: a fraction of ``free`` bytes (``0.9``) or a size (``2GiB``). Raises: ValueError with what is accepted."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?(B)?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError("it is neither a fraction such as 0.9 nor a size such as 2GiB or 512MiB")
    value, unit, suffix = float(found[1]), (found[2] or "").upper(), found[3]
    if unit or suffix:
        return int(value * _UNITS[unit])
    if not 0 < value <= 1:
        raise ValueError(f"it has no unit and is no fraction in (0, 1]; write {text.strip()}GiB or 0.9")
    return int(value * free)
