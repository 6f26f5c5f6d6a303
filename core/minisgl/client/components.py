"""Plugins that a program chooses by argument, by name or as a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.base.errors import ConfigError
from minisgl.config.schema import KindSection, Settings
from minisgl.plugin.registry import Registry


def scan(settings: Settings) -> Registry:
    """The registry as the plugin settings want it."""
    p = settings.plugins
    return Registry.scan(prefer=p.prefer, disable=p.disable, bundled_only=p.scan == "bundled")


def choose(settings: Settings, registry: Registry, components: Mapping[str, str | type]) -> Settings:
    """Settings with ``components`` chosen; a class is registered under its own name."""
    kinds = dict(settings.kinds)
    for kind, chosen in components.items():
        if not isinstance(chosen, (str, type)):
            raise ConfigError(
                f"{kind} = {chosen!r} is no plugin's name or class; settings are given as LLM({kind}=...)"
            )
        name = chosen if isinstance(chosen, str) else chosen.__name__
        if not isinstance(chosen, str):
            registry.add(kind, name, chosen)
        registry.ref(kind, name)  # a wrong kind or name is refused here
        section = kinds.get(kind)
        update: dict[str, Any] = {"use": name}
        kinds[kind] = section.model_copy(update=update) if section is not None else KindSection(use=name)
    return settings.model_copy(update={"kinds": kinds})
