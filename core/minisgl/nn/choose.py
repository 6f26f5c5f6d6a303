"""Which plugins of the device side are used: those that the configuration names, or what ``auto`` becomes here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from minisgl.base.errors import ConfigError, PluginError
from minisgl.config.schema import Settings
from minisgl.plugin.registry import Registry
from minisgl.runtime.attention import AttentionBackend, AttnFacts
from minisgl.runtime.kernels import Ops
from minisgl.runtime.sampling import Sampler

# What "auto" tries, in order.
ATTENTION_ORDER = ("torch",)
OPS_ORDER = ("triton", "flashinfer", "sgl", "torch")
SAMPLER_ORDER = ("fused", "torch")


def pick_attention(config: Settings, registry: Registry, facts: AttnFacts) -> tuple[str, type[AttentionBackend]]:
    """The configured backend, or with ``auto`` the first that supports ``facts``: what a ``prefer`` hook names, then core's.

    Raises: ConfigError with each backend's reason; PluginError if a named one is unknown or broken.
    """
    names = config.use("attention")
    if len(names) != 1:
        raise ConfigError(f"attention.use={names!r} is not supported in this version; name one backend or auto")
    auto = names[0] == "auto"
    reasons = []
    preferred = registry.preferred("attention", facts, registry.names("attention")) if auto else None
    order = dict.fromkeys([*([preferred] if preferred else []), *ATTENTION_ORDER])
    for name in order if auto else names:
        try:
            cls: type[AttentionBackend] = registry.load("attention", name)
        except PluginError as exc:
            if not auto:
                raise
            reasons.append(f"{name}: {exc}")
            continue
        reason = cls.supports(facts)
        if reason is None:
            return name, cls
        reasons.append(f"{name}: {reason}")
    raise ConfigError(
        f"attention={names[0]!r} cannot serve this model: {'; '.join(reasons)}; "
        f"registered: {', '.join(map(repr, registry.names('attention')))}"
    )


def pick_ops(config: Settings, registry: Registry, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The configured plugins, or with ``auto`` all of core's list that work here. An op comes from the first that has it."""
    names = config.use("ops")
    if names != ("auto",):
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


def _candidates(registry: Registry, kind: str, order: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in order:
        if name in registry.names(kind):
            try:
                yield name, registry.load(kind, name)
            except PluginError:  # "auto" may leave it out; a plugin that is named may not
                continue
