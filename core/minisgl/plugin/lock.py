"""The plugin lock: which plugins a server runs with, so that its processes can compare before any of them works."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from minisgl.base.errors import PluginError

if TYPE_CHECKING:
    from minisgl.plugin.registry import Registry


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

    # ------------------------------------------------------------------------------------------------ comparing
    def observed(self, registry: Registry) -> PluginLock:
        """The lock of the same picks as this environment has them; what it lacks is left out. Imports nothing.

        What the first process added by itself as ``module:attr`` is added here too, so that it can be loaded here.
        """
        from minisgl.plugin.registry import API_DIST, Ref

        entries: list[LockEntry] = []
        for e in self.entries:
            if e.dist == API_DIST:
                registry.put(Ref(*e, door="plugin lock"))
            try:
                entries += registry.lock([(e.kind, e.name)]).entries
            except PluginError:
                continue
        return PluginLock.of(registry.core_version, entries)

    def explain(self, other: PluginLock) -> list[str]:
        """How ``other`` (there) differs from this lock (here), one line each; [] if it does not."""
        lines = []
        if self.core != other.core:
            lines.append(f"minisgl: version here {self.core}, there {other.core}")
        if self.python != other.python:
            lines.append(f"Python: version here {self.python}, there {other.python}")
        mine, theirs = ({(e.kind, e.name): e for e in lock.entries} for lock in (self, other))
        for kind, name in sorted({*mine, *theirs}):
            a, b = mine.get((kind, name)), theirs.get((kind, name))
            if a != b:
                lines.append(f"{kind} {name!r}: {_difference(a, b)}")
        return lines

    def check(self, other: PluginLock, who: str) -> None:
        """Raises: PluginError if the process ``who`` has another lock."""
        if lines := self.explain(other):
            listed = "\n".join(f"  {line}" for line in lines)
            raise PluginError(f"{who} has a different plugin set, so it was not started:\n{listed}")

    def require_importable(self, who: str = "other processes") -> None:
        """Raises: PluginError for a plugin that exists in this process only."""
        for e in self.entries:
            where = e.target.partition(":")[0] if e.target.startswith("__main__:") else ""
            where = "a function" if "<locals>" in e.target else where
            where = "this process, as an object" if e.target.endswith("()") else where
            if where:
                raise PluginError(
                    f"{e.kind} {e.name!r} is defined in {where}; {who} cannot import it. Put it in a module"
                    + (f", and enable 'module' or 'module:attr' ({e.target})" if e.kind == "hooks" else "")
                )


def _difference(a: LockEntry | None, b: LockEntry | None) -> str:
    if a is None or b is None:
        here, there = (f"{e.dist} {e.version}".strip() if e else "missing" for e in (a, b))
        return f"here {here}, there {there}"
    if a.dist != b.dist:
        return f"package here {a.dist} {a.version}, there {b.dist} {b.version}"
    if a.version != b.version:
        return f"version here {a.version}, there {b.version}"
    return f"target here {a.target}, there {b.target}"
