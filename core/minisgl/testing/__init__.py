"""Tools for tests of plugins and of core. The contract of a kind, for an author's own test file:

from minisgl.testing import contract
TestLfu = contract("cache", "lfu")               # by entry-point name, or contract("cache", LFUCache, {"decay": 0.5})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def contract(kind: str, target: str | type, settings: Mapping[str, Any] | None = None) -> type:
    """A pytest class with the checks that every plugin of ``kind`` must pass.

    Args: target: entry-point name, or the class itself. settings: options it is built with.
    Raises: ConfigError if there is no contract for ``kind``; what Registry.load raises.
    """
    from minisgl.testing.contracts import make_contract

    return make_contract(kind, target, settings or {})
