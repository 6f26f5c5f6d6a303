"""Every registered cache policy, scheduler policy and step loop passes the contract of its kind."""

from __future__ import annotations

import pytest

from minisgl.base.errors import ConfigError
from minisgl.plugin.registry import Registry
from minisgl.testing import contract

KINDS = ("cache", "scheduler", "loop")

globals().update(
    {cls.__name__: cls for kind in KINDS for name in Registry.scan().names(kind) for cls in [contract(kind, name)]}
)

TestRadixLfu = contract("cache", "radix", {"eviction": "lfu"})
TestChunkedLongestInTiles = contract("scheduler", "chunked", {"order": "longest", "tile_tokens": 8})
TestChunkedSmallChunks = contract("scheduler", "chunked", {"max_chunk": 7, "reserve": 0.2})


def test_a_kind_without_a_contract_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="no contract for kind 'tokenizer'; there is one for attention, cache, logits, loop, scheduler",
    ):
        contract("tokenizer", "hf")
