"""The names of settings: how a path is spelled in each source, what it may be, and what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from minisgl.config.schema import CORE_SECTIONS
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry

KeyPath = tuple[str, ...]  # ("cache", "radix", "eviction"): section, key; or kind, plugin, option
Style = Literal["python", "option", "env", "file", "hook"]

# The only short names: option --page-size, Python page_size=.
ALIASES: dict[str, KeyPath] = {
    "model": ("model", "path"),
    "served_name": ("model", "served_names"),
    "dtype": ("model", "dtype"),
    "device": ("model", "device"),
    "load_format": ("weights", "format"),
    "host": ("server", "host"),
    "port": ("server", "port"),
    "api_key": ("server", "api_key"),
    "api_workers": ("server", "api_workers"),
    "metrics_compat": ("metrics", "compat"),
    "page_size": ("kv", "page_size"),
    "max_running": ("limits", "max_running"),
    "max_len": ("limits", "max_len"),
    "tp": ("parallel", "tp"),
    "cuda_graph_max_rows": ("engine", "cuda_graph_max_rows"),
    "cuda_graph_max_tokens": ("engine", "cuda_graph_max_tokens"),
    "text_workers": ("text", "workers"),
    "log_level": ("log", "level"),
}
KIND_SECTIONS = tuple(k.name for k in KINDS.values() if k.by_config)
ENV_PREFIX = "MINISGL_"


def snake(name: str) -> str:
    return name.replace("-", "_")


def fields(section: str) -> dict[str, Any]:
    """Key -> annotation of a core section."""
    return {f.alias or name: f.annotation for name, f in CORE_SECTIONS[section].model_fields.items()}


def is_flag(path: KeyPath) -> bool:
    """Whether an option may stand without a value."""
    if len(path) != 2 or path[0] not in CORE_SECTIONS:
        return False
    annotation = fields(path[0]).get(snake(path[1]))
    return annotation is bool or bool in get_args(annotation)


def spell(path: KeyPath, style: Style = "file") -> str:
    """The path as a source of that style writes it."""
    if style == "env":
        return ENV_PREFIX + "__".join(re.sub(r"\W", "_", p) for p in path).upper()
    if style == "option":
        short = {v: k for k, v in ALIASES.items()}
        if path[1:] == ("use",):
            return f"--{path[0]}"
        name = short.get(path) or ".".join(path)
        return "--" + name.replace("_", "-")
    return ".".join(path)


class Names:
    """All settings there are with these plugins."""

    def __init__(self, registry: Registry) -> None:
        self._plugins = {k: {snake(r.name).lower(): r.name for r in registry.refs(k)} for k in KIND_SECTIONS}

    def canonical(self, path: Sequence[str]) -> KeyPath | None:
        """The one spelling of a path that some source wrote, or None if there is no such setting. ``-`` and ``_`` are one."""
        head, rest = snake(path[0]), path[1:]
        if head in self._plugins:
            if not rest:
                return (head, "use")
            if snake(rest[0]) == "use":
                return (head, "use") if len(rest) == 1 else None
            plugin = self._plugins[head].get(snake(rest[0]).lower())
            return None if plugin is None else (head, plugin, *map(snake, rest[1:]))
        if head not in CORE_SECTIONS or not rest:
            return (head,) if head in CORE_SECTIONS else None
        key = snake(rest[0])
        if (head, key) == ("plugins", "prefer"):
            return (head, key, ".".join(rest[1:])) if rest[1:] else (head, key)
        return (head, key) if key in fields(head) and len(rest) == 1 else None

    def plugins(self, kind: str) -> list[str]:
        return sorted(self._plugins[kind].values())

    def known(self) -> list[KeyPath]:
        """Every path known without importing a plugin."""
        core = [(s, f) for s in CORE_SECTIONS for f in fields(s)]
        kinds = [(k, "use") for k in self._plugins]
        return [*core, *kinds, *((k, p) for k in self._plugins for p in self.plugins(k))]

    def nearest(self, path: Sequence[str], style: Style) -> str:
        """What was probably meant instead of an unknown path, spelled; "" if nothing is near."""
        head = snake(path[0])
        if head in self._plugins and len(path) > 1:
            near = difflib.get_close_matches(path[1], [*self.plugins(head), "use"], n=1)
            return spell((head, *near, *map(snake, path[2:])), style) if near else ""
        spelled = {".".join(p): p for p in self.known()}
        if style in ("option", "python"):
            spelled |= ALIASES if len(path) == 1 else {}
        near = difflib.get_close_matches(".".join(map(snake, path)).lower(), spelled, n=1)
        return spell(spelled[near[0]], style) if near else ""
