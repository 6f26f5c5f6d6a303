"""The bundled routers, one decision at a time."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from minisgl.api import I32, ConfigError, ReplicaLoad, Router, RouterContext
from minisgl.plugin.registry import Registry

IDLE = ReplicaLoad(0, 0)


def make(name: str, replicas: int, **options: Any) -> Router:
    registry = Registry.scan(bundled_only=True)
    router: Router = registry.create("router", name, options, lambda s: RouterContext(s, replicas, Random(0)))
    return router


def prompt(*parts: tuple[int, int]) -> I32:
    """Parts (token, how many of it)."""
    return np.concatenate([np.full(n, token, np.int32) for token, n in parts])


def test_round_robin_takes_each_in_turn() -> None:
    router = make("round-robin", 3)
    busy_first = [ReplicaLoad(9, 900), IDLE, IDLE]
    assert [router.route(prompt((1, 4)), b"", busy_first) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_counts_requests_then_tokens_then_index() -> None:
    router = make("least-loaded", 3)
    assert router.route(prompt((1, 4)), b"", [ReplicaLoad(2, 10), ReplicaLoad(1, 999), ReplicaLoad(2, 1)]) == 1
    assert router.route(prompt((1, 4)), b"", [ReplicaLoad(2, 10), ReplicaLoad(2, 9), ReplicaLoad(2, 9)]) == 1


def test_prefix_aware_returns_to_the_engine_that_has_the_longest_prefix() -> None:
    router = make("prefix-aware", 2, block_tokens=16)
    assert router.route(prompt((1, 64), (2, 64)), b"", [IDLE, ReplicaLoad(1, 1)]) == 0
    assert router.route(prompt((1, 32), (3, 64)), b"", [ReplicaLoad(9, 9), IDLE]) == 0  # 32 of 96 are known at 0
    assert router.route(prompt((5, 64)), b"", [ReplicaLoad(9, 9), IDLE]) == 1  # known to nobody
    assert router.route(prompt((1, 64), (2, 32), (4, 16)), b"", [ReplicaLoad(9, 9), IDLE]) == 0


def test_prefix_aware_leaves_an_engine_that_leads_by_too_many_requests() -> None:
    router = make("prefix-aware", 2, block_tokens=16, max_lead=4)
    known = prompt((1, 64))
    assert router.route(known, b"", [IDLE, IDLE]) == 0
    assert router.route(known, b"", [ReplicaLoad(5, 1), ReplicaLoad(1, 1)]) == 0
    assert router.route(known, b"", [ReplicaLoad(6, 1), ReplicaLoad(1, 1)]) == 1


def test_prefix_aware_ignores_a_short_match() -> None:
    router = make("prefix-aware", 2, block_tokens=16, min_match=0.5)
    assert router.route(prompt((1, 32)), b"", [IDLE, IDLE]) == 0
    load = [ReplicaLoad(1, 1), IDLE]
    assert router.route(prompt((1, 16), (2, 17)), b"", load) == 1  # 16 of 33 tokens
    assert router.route(prompt((1, 32), (3, 32)), b"", load) == 0  # 32 of 64


def test_prefix_aware_keeps_namespaces_apart() -> None:
    router = make("prefix-aware", 2, block_tokens=16)
    assert router.route(prompt((1, 64)), b"a", [IDLE, IDLE]) == 0
    assert router.route(prompt((1, 64)), b"b", [ReplicaLoad(1, 1), IDLE]) == 1
    assert router.route(prompt((1, 64)), b"a", [ReplicaLoad(1, 1), IDLE]) == 0


def test_prefix_aware_forgets_the_least_recent_blocks() -> None:
    router = make("prefix-aware", 2, block_tokens=16, memory_blocks=4)
    first_busy = [ReplicaLoad(1, 1), IDLE]
    assert router.route(prompt((1, 64)), b"", [IDLE, ReplicaLoad(1, 1)]) == 0
    assert router.route(prompt((2, 64)), b"", [IDLE, ReplicaLoad(1, 1)]) == 0  # four blocks: the first four are lost
    assert router.route(prompt((2, 64)), b"", first_busy) == 0
    assert router.route(prompt((1, 64)), b"", first_busy) == 1


def test_a_wrong_option_of_a_router_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown option router\.prefix-aware\.block; options: block_tokens"):
        make("prefix-aware", 2, block=16)
