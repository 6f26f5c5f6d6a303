"""Settings that are right by themselves and wrong together, as far as that shows without a model or a device (fault S6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from minisgl.base.errors import ConfigError
from minisgl.config.names import KeyPath, spell
from minisgl.config.schema import Settings

if TYPE_CHECKING:
    from minisgl.config.load import Origin


def check_together(s: Settings, origins: Mapping[KeyPath, Origin]) -> None:
    """Refuse combinations with which some request could never go on.

    A step holds one token of every decoding row, so ``batch_tokens`` must be at least ``max_running``. It need not be more:
    decode rows may fill the step, because a prompt that is being prefilled is itself one of the ``max_running``, which
    leaves it a token. Any chunk of at least one token makes progress, whatever the page size.

    Raises: ConfigError with the settings' values and origins.
    """
    limits, kv = s.limits, s.kv
    if limits.batch_tokens is not None and limits.max_running is not None and limits.batch_tokens < limits.max_running:
        _refuse(
            f"limits.batch_tokens = {limits.batch_tokens} does not fit limits.max_running = {limits.max_running}: each running "
            "request takes one token of a step; give at least as many batch_tokens, or run fewer at once",
            [("limits", "batch_tokens"), ("limits", "max_running")],
            origins,
        )
    if kv.num_pages is None:
        return
    room = kv.num_pages * kv.page_size
    if limits.max_len is not None and limits.max_len > room:
        _refuse(
            f"limits.max_len = {limits.max_len} does not fit kv.num_pages = {kv.num_pages}: that is {room} tokens with "
            f"kv.page_size = {kv.page_size}, so the longest requests could never run; give at least "
            f"{-(-limits.max_len // kv.page_size)} pages",
            [("limits", "max_len"), ("kv", "num_pages"), ("kv", "page_size")],
            origins,
        )
    if room < 2:
        _refuse(
            f"kv.num_pages = {kv.num_pages} does not fit kv.page_size = {kv.page_size}: a request needs room for 2 tokens",
            [("kv", "num_pages"), ("kv", "page_size")],
            origins,
        )
    if kv.grow_pages > kv.num_pages:
        _refuse(
            f"kv.grow_pages = {kv.grow_pages} does not fit kv.num_pages = {kv.num_pages}: a row could never grow",
            [("kv", "grow_pages"), ("kv", "num_pages")],
            origins,
        )


def _refuse(text: str, paths: Iterable[KeyPath], origins: Mapping[KeyPath, Origin]) -> None:
    by = ", ".join(f"{spell(p)} set by {origins[p].where if p in origins else 'default'}" for p in paths)
    raise ConfigError(f"config: {text}\n        {by}")
