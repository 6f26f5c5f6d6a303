"""The plugin lock: what it holds, its fingerprint, and how differences are told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minisgl.base.errors import PluginError
from minisgl.plugin.lock import LockEntry, PluginLock
from minisgl.plugin.registry import Registry


def lock(*entries: tuple[str, ...], core: str = "0.1.0", python: str = "3.11") -> PluginLock:
    return PluginLock(core, python, tuple(sorted(LockEntry(*e) for e in entries)))


FA = ("attention", "flashinfer", "m:F", "minisgl", "0.1.0")


def test_a_lock_is_sorted_and_survives_json() -> None:
    registry = Registry.scan()
    made = registry.lock([("loop", "sync"), ("cache", "radix"), ("loop", "sync")])
    assert [(e.kind, e.name) for e in made.entries] == [("cache", "radix"), ("loop", "sync")]
    again = PluginLock.from_json(made.to_json())
    assert again == made
    assert again.fingerprint == made.fingerprint == registry.lock([("cache", "radix"), ("loop", "sync")]).fingerprint
    assert len(made.fingerprint) == 16


@pytest.mark.parametrize("i", range(5))
def test_every_part_of_an_entry_changes_the_fingerprint(i: int) -> None:
    other = [*FA]
    other[i] += "x"
    assert lock(FA).fingerprint != lock(tuple(other)).fingerprint


@pytest.mark.parametrize(
    ("there", "lines"),
    [
        (lock(FA), []),
        (lock((*FA[:4], "0.2.0")), ["attention 'flashinfer': version here 0.1.0, there 0.2.0"]),
        (lock((*FA[:2], "m:G", *FA[3:])), ["attention 'flashinfer': target here m:F, there m:G"]),
        (lock((*FA[:3], "acme", "9")), ["attention 'flashinfer': package here minisgl 0.1.0, there acme 9"]),
        (lock(), ["attention 'flashinfer': here minisgl 0.1.0, there missing"]),
        (
            lock(FA, ("cache", "x", "m:X", "p", "1"), core="0.2.0", python="3.12"),
            [
                "minisgl: version here 0.1.0, there 0.2.0",
                "Python: version here 3.11, there 3.12",
                "cache 'x': here missing, there p 1",
            ],
        ),
    ],
)
def test_differences_are_told_line_by_line(there: PluginLock, lines: list[str]) -> None:
    assert lock(FA).explain(there) == lines


def test_a_process_with_another_lock_is_refused_with_the_difference() -> None:
    with pytest.raises(PluginError) as caught:
        lock(FA).check(lock((*FA[:4], "0.2.0")), "rank 2 (host b, pid 77)")
    assert str(caught.value) == (
        "rank 2 (host b, pid 77) has a different plugin set, so it was not started:\n"
        "  attention 'flashinfer': version here 0.1.0, there 0.2.0"
    )
    lock(FA).check(lock(FA), "rank 2")


def test_a_child_sees_its_own_environment_not_its_parents(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"cache": {"lfu": "acme:LFU"}}, where="parent")
    parent = Registry.scan().lock([("cache", "lfu"), ("cache", "radix")])
    make_dist("acme-llm", "0.4", {"cache": {"lfu": "acme:LFU"}}, where="child")
    assert parent.explain(parent.observed(Registry.scan())) == ["cache 'lfu': version here 0.3, there 0.4"]
    bundled = parent.observed(Registry.scan(bundled_only=True))
    assert parent.explain(bundled) == ["cache 'lfu': here acme-llm 0.3, there missing"]


def test_a_fresh_process_gets_the_same_fingerprint() -> None:
    made = Registry.scan().lock([("cache", "radix"), ("attention", "torch")])
    code = (
        "import sys; from minisgl.plugin.lock import PluginLock; from minisgl.plugin.registry import Registry\n"
        "print(PluginLock.from_json(sys.argv[1]).observed(Registry.scan()).fingerprint)\n"
        "assert not {'torch', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, made.to_json()], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == made.fingerprint


def test_what_a_program_added_by_name_is_known_to_a_child_through_the_lock() -> None:
    """X1: registered in the first process, unknown in the others."""
    registry = Registry.scan()
    registry.add("cache", "mine", "minisgl_plugins.cache.naive:NaiveCachePolicy")
    made = registry.lock([("cache", "mine")])
    child = Registry.scan()
    assert made.explain(PluginLock.from_json(made.to_json()).observed(child)) == []
    assert child.load("cache", "mine").__name__ == "NaiveCachePolicy"


@pytest.mark.parametrize(
    ("target", "where"),
    [
        ("__main__:Mine", "is defined in __main__"),
        ("m:f.<locals>.Mine", "is defined in a function"),
        ("m:Plugin()", "is defined in this process, as an object"),
    ],
)
def test_what_only_this_process_has_is_refused_before_others_start(target: str, where: str) -> None:
    with pytest.raises(PluginError, match=r"rank processes cannot import it\. Put it in a module") as caught:
        lock(("cache", "mine", target, "<api>", "")).require_importable("rank processes")
    assert f"cache 'mine' {where}" in str(caught.value)


def test_ordinary_plugins_are_importable_everywhere() -> None:
    lock(FA, ("hooks", "acme", "acme:hooks", "acme", "1")).require_importable()
