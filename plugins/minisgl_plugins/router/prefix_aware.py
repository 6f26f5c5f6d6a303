"""The engine that has probably cached most of the prompt, unless it has much more to do than the others.

The idea is that of SGLang's cache-aware load balancer (its router, 2024), with a table of prefix hashes instead of a tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from pydantic import Field

from minisgl.api import I32, PluginSettings, ReplicaLoad, Router, RouterContext


class PrefixAwareRouter(Router):
    """Remembers, for each engine, the prompts it was sent, as hashes of their prefixes in whole blocks.

    A prompt goes to the engine that knows the longest prefix of it, if that is long enough and the engine is not too busy;
    else to the least loaded one.
    """

    class Settings(PluginSettings):
        block_tokens: int = Field(64, ge=1, description="tokens of the blocks that prompts are compared in")
        min_match: float = Field(0.1, ge=0, le=1, description="least share of a prompt that must be known to count")
        max_lead: int = Field(
            16, ge=0, description="open requests that the engine may have more than the least loaded one"
        )
        memory_blocks: int = Field(65536, ge=1, description="blocks remembered of each engine, least recent lost first")

    def __init__(self, ctx: RouterContext) -> None:
        self._settings = ctx.settings
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(ctx.replicas)]

    def route(self, ids: I32, namespace: bytes, loads: Sequence[ReplicaLoad]) -> int:
        blocks = list(self._blocks(ids, namespace))
        chosen = self._best(blocks, len(ids), loads)
        self._remember(self._known[chosen], blocks)
        return chosen

    def _best(self, blocks: list[bytes], n: int, loads: Sequence[ReplicaLoad]) -> int:
        s = self._settings
        least = min(load.requests for load in loads)
        matched = [self._matched(known, blocks) for known in self._known]
        close = [
            i
            for i, load in enumerate(loads)
            if load.requests - least <= s.max_lead and matched[i] and matched[i] * s.block_tokens >= s.min_match * n
        ]
        if close:
            return min(close, key=lambda i: (-matched[i], loads[i].requests, i))
        return min(range(len(loads)), key=lambda i: (loads[i].requests, loads[i].tokens, len(self._known[i]), i))

    def _blocks(self, ids: I32, namespace: bytes) -> Iterator[bytes]:
        """A hash of each prefix of whole blocks, the shortest first."""
        size = self._settings.block_tokens
        hashed = blake2b(namespace, digest_size=16)
        for start in range(0, len(ids) - size + 1, size):
            hashed.update(ids[start : start + size].tobytes())
            yield hashed.digest()

    def _matched(self, known: OrderedDict[bytes, None], blocks: list[bytes]) -> int:
        """How many leading blocks an engine knows."""
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))

    def _remember(self, known: OrderedDict[bytes, None], blocks: list[bytes]) -> None:
        """The end of a prompt is the first to be forgotten, as in a cache that gives up leaves."""
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._settings.memory_blocks:
            known.popitem(last=False)
