"""Settings from all sources, with the origin of each.

Highest first: Python, options, environment, ``--config`` files (later wins), ./minisgl.toml, the user's file, config_defaults
hooks; below them the defaults of plugins and core. Tables merge key by key, everything else replaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import SecretStr, ValidationError

from minisgl.base.errors import ConfigError, PluginError
from minisgl.config.checks import check_together
from minisgl.config.layers import Entry, Layer, default_files, from_env, from_file, from_python, split_options
from minisgl.config.names import KIND_SECTIONS, KeyPath, Names, spell
from minisgl.config.schema import CORE_SECTIONS, DEFAULT_MODEL, KindSection, PluginsSettings, Settings
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry
from minisgl.plugin.shape import explain_errors

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Origin:
    """``where``: the source that counts. ``hides``: weaker sources of the same setting, the strongest first."""

    where: str
    hides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where they come from. ``origins``: path -> origin, of all that is not a default. ``registry`` and
    ``hooks``: as the settings want them, for this process."""

    settings: Settings
    origins: Mapping[KeyPath, Origin]
    registry: Registry
    hooks: Hooks = field(repr=False)

    def origin(self, path: KeyPath) -> str:
        return find_origin(self.origins, path)


def load_settings(
    *,
    overrides: Mapping[str, Any] = _NOTHING,
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    files: Sequence[Path] = (),
    registry: Registry | None = None,
    plugins: Sequence[str | object] = (),
) -> Loaded:
    """Read, merge and check all settings.

    Args: overrides: nested tables or short names, the strongest source. argv: options that are settings, nothing else.
        environ: instead of os.environ. files: instead of none, each stronger than the one before. registry: instead of a
        scan. plugins: hook plugins in addition to plugins.enable.
    Raises: ConfigError with every wrong setting and its origin; PluginError for a plugin that is unknown or broken.
    """
    environ = os.environ if environ is None else environ
    options, rest = split_options(argv)
    if rest:
        raise ConfigError(f"config: unknown option {rest[0]}")
    paths = [*reversed(files), *default_files(environ)]
    layers = [from_python(overrides), options, from_env(environ), *map(from_file, paths)]
    registry, hooks = _plugins(layers, registry, plugins)
    names = Names(registry)
    known = _canonical(layers, names)
    known += _hook_defaults(hooks, known, names)
    origins = _origins(known)
    values = _merge(known)
    if named := [p for p in plugins if isinstance(p, str)]:  # other processes enable them too
        core = values.setdefault("plugins", {})
        core["enable"] = [*_as_list(core.get("enable", ())), *named]
        old = origins.get(("plugins", "enable"))
        origins["plugins", "enable"] = Origin("--plugin" if old is None else f"{old.where} and --plugin")
    settings = _validated(values, origins)
    settings = _choose(settings, registry, hooks, origins)
    check_together(settings, origins)
    return Loaded(settings, origins, registry, hooks)


def find_origin(origins: Mapping[KeyPath, Origin], path: KeyPath) -> str:
    """Where a setting, or the table it is in, was set; "default" if nowhere."""
    for n in range(len(path), 0, -1):
        if path[:n] in origins:
            return origins[path[:n]].where
    return next((o.where for p, o in origins.items() if p[: len(path)] == path), "default")


# ------------------------------------------------------------------------------------------------------- plugins first
def _plugins(
    layers: Sequence[Layer], registry: Registry | None, more: Sequence[str | object]
) -> tuple[Registry, Hooks]:
    """Which names are settings depends on the plugins, and which plugins there are on the settings [plugins]."""
    core = Names(Registry())
    named = [
        Layer(e.style, [x._replace(path=p) for x in e.entries if (p := core.canonical(x.path)) and p[0] == "plugins"])
        for e in layers
    ]
    try:
        wanted = PluginsSettings(**_merge(named).get("plugins", {}))
    except ValidationError as exc:
        raise _invalid(exc, _origins(named), ("plugins",)) from exc
    registry = registry or Registry.scan(
        prefer=wanted.prefer, disable=wanted.disable, bundled_only=wanted.scan == "bundled"
    )
    return registry, Hooks(registry, [*wanted.enable, *more])


def _hook_defaults(hooks: Hooks, layers: Sequence[Layer], names: Names) -> list[Layer]:
    """What config_defaults hooks set. Raises: ConfigError if two disagree or one sets plugins or what is no setting."""
    model = {"path": DEFAULT_MODEL, "device": "auto", **_merge(layers).get("model", {})}
    found: dict[KeyPath, Entry] = {}
    for label, values in hooks.each("config_defaults", model=model["path"], device=model["device"]):
        where = f"config_defaults of {label}"
        (layer,) = _canonical([from_python(values, where, "hook")], names)
        for e in layer.entries:
            other = found.setdefault(e.path, e)
            if other.value != e.value:
                raise ConfigError(
                    f"config: {spell(e.path)} is {other.value!r} by {other.where} and {e.value!r} by {e.where}; "
                    "set it yourself, or enable one of them"
                )
            if e.path[0] == "plugins":
                raise ConfigError(f"config: {where} sets {spell(e.path)}; a hook cannot choose plugins to run")
    return [Layer("hook", list(found.values()))]


# ------------------------------------------------------------------------------------------------------- merging
def _canonical(layers: Iterable[Layer], names: Names) -> list[Layer]:
    """The layers with known paths. Raises: ConfigError for every name that is no setting."""
    unknown: list[str] = []
    result = []
    for layer in layers:
        entries = []
        for e in layer.entries:
            path = names.canonical(e.path)
            if path is None or (len(path) == 1 and e.value != {}):
                unknown.append(_unknown(layer, e, names))
            else:
                entries.append(e._replace(path=path))
        result.append(Layer(layer.style, entries))
    if unknown:
        raise ConfigError("\n".join(unknown))
    return result


def _unknown(layer: Layer, e: Entry, names: Names) -> str:
    head, near = e.path[0].replace("-", "_"), names.nearest(e.path, layer.style)
    hint = f"; did you mean {near}?" if near else ""
    if layer.style == "env":
        return f"config: unknown environment variable {e.where}{hint}"
    if layer.style == "option":
        return f"config: unknown option {e.where}{hint}"
    if head in CORE_SECTIONS and len(e.path) == 1:
        return f"config: {head} = {e.value!r} is not a table; write {head}.{next(iter(CORE_SECTIONS[head].model_fields))} = ...\n        set by {e.where}"
    if head in KIND_SECTIONS and len(e.path) > 1 and e.path[1] != "use":
        plugin = near.split(".")[1] if near.count(".") else ""
        hint = (
            f"; did you mean {plugin!r}?" if plugin else f"; {head} plugins: {', '.join(names.plugins(head)) or 'none'}"
        )
        return f"config: [{head}.{e.path[1]}] in {e.where} names no {head} plugin{hint}"
    return f"config: unknown setting {'.'.join(e.path)} in {e.where}{hint}"


def _origins(layers: Iterable[Layer]) -> dict[KeyPath, Origin]:
    found: dict[KeyPath, Origin] = {}
    for layer in layers:
        for e in reversed(layer.entries):
            old = found.get(e.path)
            found[e.path] = Origin(e.where) if old is None else Origin(old.where, (*old.hides, e.where))
    return found


def _merge(layers: Sequence[Layer]) -> dict[str, Any]:
    """One tree of sections; pydantic-settings merges its sources in their order."""
    from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

    trees = [_tree(layer) for layer in layers]

    class Tree(BaseSettings):
        model_config = SettingsConfigDict(extra="allow")

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(InitSettingsSource(settings_cls, tree) for tree in trees)

    return dict(Tree().model_extra or {})


def _tree(layer: Layer) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for e in layer.entries:
        node = root
        for part in e.path[:-1]:
            below = node.setdefault(part, {})
            if not isinstance(below, dict):
                raise ConfigError(f"config: {spell(e.path)} in {e.where}: {part} is {below!r} there, not a table")
            node = below
        if e.value != {} or e.path[-1] not in node:
            node[e.path[-1]] = e.value
    return root


# ------------------------------------------------------------------------------------------------------- checking
def _validated(values: Mapping[str, Any], origins: Mapping[KeyPath, Origin]) -> Settings:
    kinds: dict[str, Any] = {}
    for kind in KIND_SECTIONS:
        if kind in values:
            options = dict(values[kind])
            use = _use(kind, options.pop("use", "auto"), origins)
            kinds[kind] = {"use": use, "options": options}
    core = {k: v for k, v in values.items() if k not in KIND_SECTIONS}
    try:
        return Settings(**core, kinds=kinds)
    except ValidationError as exc:
        raise _invalid(exc, origins) from exc


def _use(kind: str, use: Any, origins: Mapping[KeyPath, Origin]) -> str | tuple[str, ...]:
    """A name for kinds of which one is used, else a list of names; both may come as text."""
    listed = _as_list(use)
    if not all(isinstance(name, str) for name in listed):
        raise ConfigError(
            f"config: {kind}.use = {use!r} is not valid: give names of {kind} plugins\n        set by {find_origin(origins, (kind, 'use'))}"
        )
    if KINDS[kind].many:
        return "auto" if listed == ["auto"] else tuple(listed)
    most = KINDS[kind].most
    if not 1 <= len(listed) <= most or (len(listed) > 1 and "auto" in listed):
        rule = f"one {kind} plugin is used at a time; give one name"
        if most > 1:
            rule = f"give auto, one name, or {KINDS[kind].names_mean}"
        raise ConfigError(
            f"config: {kind}.use = {use!r} is not valid: {rule}\n        set by {find_origin(origins, (kind, 'use'))}"
        )
    return str(listed[0]) if len(listed) == 1 else tuple(listed)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _invalid(
    exc: ValidationError, origins: Mapping[KeyPath, Origin], prefix: KeyPath = (), known: Iterable[str] = ()
) -> ConfigError:
    """Every error with its origin. ``prefix``: where the validated table is; ``known``: its keys."""
    lines = []
    for path, text in explain_errors(exc, prefix, known):
        path = (path[1], *path[3:]) if path[:1] == ("kinds",) and path[2:3] == ("options",) else path
        lines.append(f"config: {text}\n        set by {find_origin(origins, path)}")
    return ConfigError("\n".join(lines))


def _choose(settings: Settings, registry: Registry, hooks: Hooks, origins: dict[KeyPath, Origin]) -> Settings:
    """Check that what is selected exists and that its options fit; let hooks resolve ``auto`` where that needs no device."""
    kinds = dict(settings.kinds)
    for kind in ("cache", "scheduler"):
        section = settings.kinds.get(kind)
        if section is None or section.use == "auto":
            chosen = hooks.prefer(kind, None, registry.names(kind))
            if chosen is not None:
                kinds[kind] = _section(section, chosen)
                origins[kind, "use"] = Origin("prefer hook of a plugin")
    settings = settings.model_copy(update={"kinds": kinds})
    for kind in KIND_SECTIONS:
        for name in settings.use(kind):
            if name != "auto":
                _require(registry, kind, name, origins)
        if kind in settings.kinds and not KINDS[kind].torch:
            for name, options in settings.kinds[kind].options.items():
                _check_options(registry, kind, name, options, name in settings.use(kind), origins)
    return settings


def _section(old: KindSection | None, use: str) -> KindSection:
    return KindSection(use=use, options=old.options if old is not None else {})


def _require(registry: Registry, kind: str, name: str, origins: Mapping[KeyPath, Origin]) -> None:
    try:
        registry.ref(kind, name)
    except PluginError as exc:
        raise type(exc)(f"{exc}\nIt was selected by: {find_origin(origins, (kind, 'use'))}") from exc


def _check_options(
    registry: Registry, kind: str, name: str, options: Any, selected: bool, origins: Mapping[KeyPath, Origin]
) -> None:
    """Options of torch-free plugins; those of the others are checked by the process that loads them."""
    try:
        cls = registry.load(kind, name)
    except PluginError:
        if selected:
            raise
        return  # nobody uses it
    try:
        cls.Settings(**options)
    except ValidationError as exc:
        raise _invalid(exc, origins, (kind, name), cls.Settings.model_fields) from exc


# ------------------------------------------------------------------------------------------------------- child processes
def settings_to_json(s: Settings) -> str:
    """For child processes: complete, with secrets. Raises: ConfigError for a value that JSON does not have."""
    return json.dumps(s.model_dump(by_alias=True), default=_plain)


def settings_from_json(text: str) -> Settings:
    return Settings(**json.loads(text))


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(
        f"config: {value!r} cannot be handed to other processes; settings are text, numbers, lists and tables"
    )
