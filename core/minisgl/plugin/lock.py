"""The plugin lock: which plugins a server runs with, so that its processes can compare before any of them works."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple


class LockEntry(NamedTuple):
    """One selected plugin. ``target``: ``module:attr``; ``dist`` and ``version``: its package."""

    kind: str
    name: str
    target: str
    dist: str
    version: str


@dataclass(frozen=True, slots=True)
class PluginLock:
    """``core``: version of minisgl. ``python``: ``3.11``. ``entries``: sorted."""

    core: str
    python: str
    entries: tuple[LockEntry, ...]

    @classmethod
    def of(cls, core: str, entries: Iterable[LockEntry]) -> PluginLock:
        return cls(core, f"{sys.version_info.major}.{sys.version_info.minor}", tuple(sorted(set(entries))))

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal for equal locks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PluginLock:
        data = json.loads(text)
        return cls(data["core"], data["python"], tuple(LockEntry(*e) for e in data["entries"]))
