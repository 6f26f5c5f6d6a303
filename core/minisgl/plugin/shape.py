"""What a plugin's class must look like: base class, methods, parameter names, Settings."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import ConfigError
from minisgl.plugin.kinds import API_MAJOR, API_MINOR, Kind

if TYPE_CHECKING:
    from pydantic import ValidationError

    from minisgl.base.component import PluginSettings


def check_shape(kind: Kind, found: Any) -> str | None:
    """None if ``found`` can be a plugin of ``kind``, else what is wrong, to be read after "cache 'lfu' "."""
    from minisgl.base.component import PluginSettings
    from minisgl.plugin.registry import import_target

    assert kind.base is not None, kind
    base = import_target(kind.base)
    if not (isinstance(found, type) and issubclass(found, base)):
        what = f"is {found!r}" if not isinstance(found, type) else f"is class {found.__qualname__}"
        return f"{what}, expected a class that derives from {base.__name__}"
    cls: type[Any] = found
    for name, owner in _interface(cls):
        method = getattr(cls, name)
        if getattr(method, "__isabstractmethod__", False):
            shown = ", ".join(p.name for p in _parameters(owner, name))
            return f"lacks {name}({shown}), which plugin API {API_MAJOR} requires"
        fault = _signature_fault(owner, cls, name)
        if fault:
            return fault
    settings = cls.Settings
    if not (isinstance(settings, type) and issubclass(settings, PluginSettings)):
        return f"has Settings = {settings!r}, expected a class that derives from PluginSettings"
    if cls.needs[0] != API_MAJOR or cls.needs[1] > API_MINOR:
        needs = ".".join(map(str, cls.needs))
        return f"needs plugin API {needs}; this minisgl has {API_MAJOR}.{API_MINOR}"
    return None


def _interface(cls: type) -> Iterator[tuple[str, type]]:
    """Methods that core calls on ``cls``, each with the core class that declares it last (nearest to ``cls``)."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if owner.__module__.split(".")[0] != "minisgl":
            continue
        for name, value in vars(owner).items():
            method = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
            if method and name not in seen and (name == "__init__" or not name.startswith("_")):
                seen.add(name)
                yield name, owner


def _parameters(owner: type, name: str) -> list[inspect.Parameter]:
    """Parameters without ``self``."""
    raw = inspect.getattr_static(owner, name)
    parameters = list(inspect.signature(getattr(owner, name)).parameters.values())
    return parameters if isinstance(raw, (classmethod, staticmethod)) else parameters[1:]


def _signature_fault(owner: type, cls: type, name: str) -> str | None:
    """Whether ``cls.name`` can be called just as ``owner.name``."""
    if getattr(cls, name) is getattr(owner, name):
        return None
    try:
        want, have = _parameters(owner, name), _parameters(cls, name)
    except (ValueError, TypeError):  # implemented in C: nothing to compare
        return None
    kinds = {p.kind for p in have}
    var_positional, var_keyword = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    positional = [p for p in have if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in have if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    fits = True
    for i, p in enumerate(want):
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            fits &= positional[i].name == p.name if i < len(positional) else var_positional
        elif p.kind is p.KEYWORD_ONLY:
            fits &= p.name in by_name or var_keyword
        else:
            fits &= p.kind in kinds
    known = {p.name for p in want}
    fits &= all(
        p.name in known or p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in have
    )
    if fits:
        return None
    return (
        f"has {name}({', '.join(p.name for p in have)}), expected {name}({', '.join(p.name for p in want)}) "
        f"as plugin API {API_MAJOR} declares it"
    )


def checked_settings(kind: str, name: str, cls: type[Any], options: Mapping[str, Any]) -> PluginSettings:
    """The plugin's Settings made from ``options``. Raises: ConfigError that names each wrong option."""
    from pydantic import ValidationError

    try:
        return cls.Settings(**options)  # type: ignore[no-any-return]
    except ValidationError as exc:
        known = cls.Settings.model_fields
        raise ConfigError("\n".join(f"config: {t}" for _, t in explain_errors(exc, (kind, name), known))) from exc


def explain_errors(
    exc: ValidationError, prefix: tuple[str, ...] = (), known: Iterable[str] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, message) of each error, in our words: no URL, and values of secrets hidden. ``known``: what is accepted."""
    for e in exc.errors():
        path = (*prefix, *map(str, e["loc"]))
        if e["type"] == "extra_forbidden":
            near = difflib.get_close_matches(path[-1], list(known), n=1)
            hint = (
                f"did you mean {'.'.join([*path[:-1], *near])}?" if near else f"options: {', '.join(known) or 'none'}"
            )
            yield path, f"unknown option {'.'.join(path)}; {hint}"
            continue
        message = e["msg"].removeprefix("Value error, ")
        shown = "***" if is_secret(path[-1]) else repr(e["input"])
        yield path, f"{'.'.join(path)} = {shown} is not valid: {message[:1].lower()}{message[1:]}"


def is_secret(name: str) -> bool:
    """Whether a setting's name says that its value must not be shown."""
    return name.endswith(("key", "token", "secret", "password"))
