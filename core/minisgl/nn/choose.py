"""Which plugins of the device side are used: those that the configuration names, or what ``auto`` becomes here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from minisgl.base.errors import ConfigError, PluginError
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttentionBackend, AttnFacts
from minisgl.runtime.kernels import Ops
from minisgl.runtime.phase import check_pair
from minisgl.runtime.sampling import Sampler

# What "auto" tries, in order.
ATTENTION_ORDER = ("torch",)  # on any device, after those of its architecture
ATTENTION_BY_SM: dict[
    int, tuple[str, ...]
] = {  # by exact compute capability x 10 (M17); "a,b": a for prefill, b for decode
    90: ("fa,flashinfer", "flashinfer", "fa"),
    **dict.fromkeys((80, 86, 89, 100, 103, 120), ("flashinfer",)),
}
OPS_ORDER = ("triton", "flashinfer", "sgl", "torch")
SAMPLER_ORDER = ("fused", "torch")
# Behind the fields that every request may have; in the order of their own `order`.
LOGITS_OF_FIELDS = ("bias", "penalties", "min_tokens", "allowed_tokens", "bad_words")


class AttentionPick(NamedTuple):
    """``name`` as in the configuration. ``backends``: one, or two for prefill and decode. ``why``: for the log."""

    name: str
    backends: tuple[tuple[str, type[AttentionBackend]], ...]
    why: str


def pick_attention(config: Settings, registry: Registry, facts: AttnFacts) -> AttentionPick:
    """The configured backends, or with ``auto`` the first that support ``facts``: what a ``prefer`` hook names, then core's.

    Raises: ConfigError with each backend's reason; PluginError if a named one is unknown or broken.
    """
    names = config.use("attention")
    if len(names) > 2:
        raise ConfigError(f"attention.use={names!r} is not valid: name one backend, two (prefill,decode), or auto")
    if names != ("auto",):
        reason, backends = _serves(registry, names, facts)
        if reason is None:
            return AttentionPick(",".join(names), backends, "configured")
        raise _cannot_serve(",".join(names), [reason], registry)
    asked = registry.preferred("attention", facts, registry.names("attention"))
    where = f"compute capability {facts.sm / 10:.1f}" if facts.sm else f"device {facts.device}"
    reasons: list[str] = []
    for name in dict.fromkeys([*([asked] if asked else []), *ATTENTION_BY_SM.get(facts.sm, ()), *ATTENTION_ORDER]):
        try:
            reason, backends = _serves(registry, tuple(name.split(",")), facts)
        except PluginError as exc:
            reason, backends = f"{name}: {exc}", ()
        if reason is None:
            why = "a plugin prefers it" if name == asked else f"auto on {where}"
            return AttentionPick(name, backends, "; ".join([why, *(f"not {r}" for r in dict.fromkeys(reasons))]))
        reasons.append(reason)
    raise _cannot_serve("auto", reasons, registry)


def _serves(
    registry: Registry, names: Sequence[str], facts: AttnFacts
) -> tuple[str | None, tuple[tuple[str, type[AttentionBackend]], ...]]:
    """Why backends ``names`` cannot serve together, or None; and their classes. Raises: PluginError, ConfigError."""
    backends: tuple[tuple[str, type[AttentionBackend]], ...] = tuple(
        (name, registry.load("attention", name)) for name in names
    )
    for name, cls in backends:
        if (reason := cls.supports(facts)) is not None:
            return f"{name}: {reason}", backends
    if len(backends) == 2:
        check_pair(names, backends[0][1], backends[1][1], facts)
    return None, backends


def _cannot_serve(name: str, reasons: Sequence[str], registry: Registry) -> ConfigError:
    return ConfigError(
        f"attention={name!r} cannot serve this model: {'; '.join(dict.fromkeys(reasons))}; "
        f"registered: {', '.join(map(repr, registry.names('attention')))}"
    )


def pick_ops(config: Settings, registry: Registry, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The configured plugins, or with ``auto`` all of core's list that work here. An op comes from the first that has it.

    Raises: ConfigError, PluginError if a named one does not.
    """
    names = config.use("ops")
    if names != ("auto",):
        for name in names:
            named: type[Ops] = registry.load("ops", name)
            if (reason := named.supports(device, dtype)) is not None:
                raise ConfigError(f"ops {name!r} cannot be used: {reason}; use ops=auto, or 'torch' on any device")
        return list(names)
    found: Iterator[tuple[str, type[Ops]]] = _candidates(registry, "ops", OPS_ORDER)
    return [name for name, cls in found if cls.supports(device, dtype) is None]


def pick_sampler(config: Settings, registry: Registry, device: torch.device) -> str:
    """The configured sampler, or with ``auto`` the first of core's list that works here. Raises: ConfigError, PluginError."""
    (name,) = config.use("sampler")
    if name == "auto":
        found: Iterator[tuple[str, type[Sampler]]] = _candidates(registry, "sampler", SAMPLER_ORDER)
        return next(n for n, cls in found if cls.supports(device) is None)
    cls: type[Sampler] = registry.load("sampler", name)
    if (reason := cls.supports(device)) is not None:
        raise ConfigError(f"sampler={name!r} cannot be used on {device}: {reason}; use auto, or 'torch' on any device")
    return name


def pick_logits(config: Settings, registry: Registry) -> tuple[list[str], tuple[str, ...]]:
    """All logits processors: those behind the fields that every request may have, and the configured ones, which are also given
    by themselves. Raises: PluginError."""
    own = tuple(name for name in dict.fromkeys(config.use("logits")) if name not in LOGITS_OF_FIELDS)
    names = [*LOGITS_OF_FIELDS, *own]
    for name in names:
        registry.load("logits", name)
    return names, own


def _candidates(registry: Registry, kind: str, order: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in order:
        if name in registry.names(kind):
            try:
                yield name, registry.load(kind, name)
            except PluginError:  # "auto" may leave it out; a plugin that is named may not
                continue
