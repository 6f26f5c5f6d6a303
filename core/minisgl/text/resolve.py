"""From what the user names (``model.path``) to files on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import ModelError
from minisgl.base.progress import no_progress
from minisgl.base.types import LocalModel
from minisgl.config.schema import DEFAULT_MODEL, default_cache_dir
from minisgl.text.source import SourceContext

if TYPE_CHECKING:
    from minisgl.base.component import PluginSettings
    from minisgl.config.schema import Settings
    from minisgl.plugin.hooks import Hooks
    from minisgl.plugin.registry import Registry

KIND = "model_source"
HUB = "hf"  # the source of ORG/NAME
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9_+.-]*):(?!//)(.+)", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(
    settings: Settings,
    registry: Registry,
    hooks: Hooks | None = None,
    progress: Callable[[str, int, int], None] = no_progress,
    weights: bool = True,
) -> LocalModel:
    """Find, download or convert the configured model.

    The first that applies decides: a scheme (``gguf:FILE``), a ``resolve_model`` hook, the bundled source that claims the
    reference (a folder, a ``*.gguf`` file), the pattern of a hub id (``ORG/NAME``). Other packages' sources are chosen by
    their scheme alone: being installed does not make them active. A hub id is never taken for a folder (fault N6).

    Args: progress: called with (what, done bytes, total bytes) during downloads and conversions. weights: False leaves the
        weight files out, as does ``weights.format = "dummy"``.
    Raises: ModelError, PluginError, ConfigError.
    """
    ref, revision = settings.model.path, settings.model.revision
    weights = weights and settings.weights.format != "dummy"
    name, rest = _split(ref, registry)
    if name is None and hooks is not None:
        found = hooks.first("resolve_model", ref=ref, revision=revision)
        if found is not None:
            return _checked(found, "hook resolve_model")
    if name is None:
        name, rest = _claimant(ref, registry), ref
    source = registry.create(KIND, name, settings.options(KIND, name), lambda s: _context(s, settings, progress))
    return _checked(source.resolve(rest, revision, weights), f"{KIND} {name!r}")


def _split(ref: str, registry: Registry) -> tuple[str | None, str]:
    """(scheme, rest) of ``scheme:rest``, (None, ref) without a scheme."""
    match = _SCHEME.fullmatch(ref)
    if match is None or Path(ref).exists():
        return None, ref
    if match[1] not in registry.names(KIND):
        registry.ref(KIND, match[1])  # raises UnknownPlugin or why it cannot be used
    return match[1], match[2]


def _claimant(ref: str, registry: Registry) -> str:
    """The source of a reference without a scheme."""
    for name in registry.names(KIND):
        if registry.ref(KIND, name).dist in ("minisgl", "<api>") and registry.load(KIND, name).claims(ref):
            return name
    if _HUB_ID.fullmatch(ref) and HUB in registry.names(KIND):
        return HUB
    schemes = ", ".join(f"{n}:" for n in registry.names(KIND))
    raise ModelError(
        f"model.path = {ref!r} names no model: there is no such folder or *.gguf file here ({Path.cwd()}), and it is not a "
        f"hub id (ORG/NAME). Give a folder, a file, a hub id, or a reference with one of the schemes {schemes}; "
        f"{DEFAULT_MODEL!r} is the default"
    )


def _context(
    source_settings: PluginSettings, settings: Settings, progress: Callable[[str, int, int], None]
) -> SourceContext:
    chosen = settings.model.cache_dir
    return SourceContext(
        settings=source_settings,
        cache_dir=(chosen or default_cache_dir()).expanduser().absolute(),
        offline=settings.model.offline,
        progress=progress,
        hub_dir=chosen.expanduser().absolute() / "hub" if chosen is not None else None,
        dtype=settings.model.dtype,
    )


def _checked(found: Any, whose: str) -> LocalModel:
    if not isinstance(found, LocalModel):
        raise ModelError(f"{whose} gave {type(found).__name__}, expected a LocalModel")
    return found
