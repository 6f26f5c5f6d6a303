"""The registry: which plugins there are, and how one becomes an object. Listing reads metadata and imports nothing.

Two doors lead in: entry points of the groups ``minisgl.v1.<kind>``, found by ``Registry.scan``, and ``Registry.add``, which
the ``register_*`` hooks and the Python API use. What came in through either is checked, locked and loaded alike.
"""

from __future__ import annotations

import difflib
import importlib
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minisgl.base.errors import BrokenPlugin, MiniSGLError, PluginConflict, PluginError, UnknownPlugin
from minisgl.plugin.kinds import API_MAJOR, KINDS, Kind
from minisgl.plugin.lock import LockEntry, PluginLock

if TYPE_CHECKING:
    from minisgl.base.component import PluginSettings

CORE = "minisgl"  # the distribution with the core and the bundled plugins
API_DIST = "<api>"  # the package of what a program adds by itself
_GROUP = re.compile(r"minisgl\.v(\d+)\.(\w+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.<>]*")
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Ref:
    """A plugin that is known and perhaps not imported. ``target``: ``module:attr``. ``api``: major version of the plugin API
    it was written for. ``unusable``: why it cannot be selected, or "". ``door``: how it came in."""

    kind: str
    name: str
    target: str
    dist: str
    version: str
    api: int = API_MAJOR
    unusable: str = ""
    door: str = "entry point"

    @property
    def package(self) -> str:
        """``acme-attn 2.0``"""
        return f"{self.dist} {self.version}".strip()


def normalize(dist: str) -> str:
    """A distribution's name as packages compare it: ``Acme_Attn`` -> ``acme-attn``."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'radix'?"``, or "" if nothing known is near."""
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class Registry:
    """All plugins of this environment. Not shared between processes: each scans its own and compares locks."""

    def __init__(
        self, prefer: Mapping[str, str] = _NOTHING, disable: Collection[str] = (), core_version: str = "0"
    ) -> None:
        self.prefer = dict(prefer)
        self.disable = tuple(disable)
        self.core_version = core_version
        self.problems: list[str] = []  # what the scan found odd, for `plugins list` and `plugins check`
        self.failures: dict[tuple[str, str], str] = {}  # (kind, name) -> why it did not load in this process
        self.ask_hooks: Callable[[str, Any, Sequence[str]], str | None] | None = None  # set by Hooks
        self._refs: dict[tuple[str, str], list[Ref]] = {}
        self._given: dict[Ref, type] = {}  # added as classes
        self._loaded: dict[Ref, type[Any]] = {}  # imported and checked

    # ------------------------------------------------------------------------------------------------ finding
    @classmethod
    def scan(
        cls, prefer: Mapping[str, str] = _NOTHING, disable: Collection[str] = (), bundled_only: bool = False
    ) -> Registry:
        """Read the entry points of the packages on ``sys.path``; imports none of them.

        Args: prefer: ``kind.name`` -> package, where two offer one name. disable: ``kind.name`` or packages that are left out.
            bundled_only: look only at minisgl itself.
        """
        found = list(_distributions())
        version = next((d.version for key, d in found if key == CORE), "0")
        registry = cls(prefer, disable, version)
        for key, dist in found:
            if bundled_only and key != CORE:
                continue
            registry._scan_distribution(dist)
        return registry

    def _scan_distribution(self, dist: metadata.Distribution) -> None:
        try:
            points = [e for e in dist.entry_points if e.group.startswith("minisgl.")]
            if not points:
                return
            name, version, unmet = dist.metadata["Name"], dist.version, _unmet_requirement(dist, self.core_version)
        except Exception as exc:  # one broken folder on sys.path must not stop everything
            self.problems.append(f"the metadata of {dist!r} cannot be read: {type(exc).__name__}: {exc}")
            return
        for e in points:
            match = _GROUP.fullmatch(e.group)
            if match is None or match[2] not in KINDS:
                self.problems.append(_unknown_group(e.group, name))
                continue
            major = int(match[1])
            why = ""
            if major != API_MAJOR:
                why = f"written for plugin API v{major}; this minisgl has v{API_MAJOR}"
            elif not _NAME.fullmatch(e.name):
                why = "a plugin's name is made of letters, digits, - and _"
            self.put(Ref(match[2], e.name, e.value, name, version, major, why or unmet))

    def put(self, ref: Ref) -> None:
        """File a reference. A plugin that comes through both doors is one plugin: it is kept once."""
        if f"{ref.kind}.{ref.name}" in self.disable or normalize(ref.dist) in map(normalize, self.disable):
            ref = replace(ref, unusable=ref.unusable or "disabled by plugins.disable")
        refs = self._refs.setdefault((ref.kind, ref.name), [])
        same = [r for r in refs if (r.target, r.dist, r.api) == (ref.target, ref.dist, ref.api)]
        if not same:
            refs.append(ref)

    def add(
        self,
        kind: str,
        name: str,
        target: type | str,
        dist: str = API_DIST,
        *,
        version: str = "",
        door: str = "Registry.add",
    ) -> None:
        """Register a class, or ``"module:attr"`` that is imported when it is selected.

        Raises: PluginError if kind or name is impossible; BrokenPlugin if ``target`` is neither, or a class of another kind.
        """
        used = _used_kind(kind)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"{kind} plugin name {name!r} is not valid: use letters, digits, - and _")
        if isinstance(target, type):
            if not any(f"{c.__module__}:{c.__qualname__}" == used.base for c in target.__mro__):
                raise BrokenPlugin(f"{kind} {name!r}: expected a class that derives from {used.base}, got {target!r}")
            ref = Ref(kind, name, f"{target.__module__}:{target.__qualname__}", dist, version, door=door)
            self.put(ref)
            self._given[ref] = target
            self._loaded.pop(ref, None)  # a class that was defined anew, as in a notebook
        elif isinstance(target, str) and _TARGET.fullmatch(target):
            self.put(Ref(kind, name, target, dist, version, door=door))
        else:
            raise BrokenPlugin(f"{kind} {name!r}: expected a class or 'module:attr', got {target!r}")

    # ------------------------------------------------------------------------------------------------ looking up
    def refs(self, kind: str | None = None) -> list[Ref]:
        """Everything known, unusable ones too, by kind and name."""
        found = [r for refs in self._refs.values() for r in refs if kind in (None, r.kind)]
        order = {k: i for i, k in enumerate(KINDS)}
        return sorted(found, key=lambda r: (order[r.kind], r.name, r.dist))

    def names(self, kind: str) -> list[str]:
        """Names that can be selected, sorted; not those that several packages offer with no preference set."""
        return sorted({r.name for r in self.refs(kind) if not r.unusable and not self.rivals(r)})

    def rivals(self, ref: Ref) -> list[Ref]:
        """Plugins of other packages with the same name, if plugins.prefer does not decide."""
        if f"{ref.kind}.{ref.name}" in self.prefer:
            return []
        return [r for r in self._refs.get((ref.kind, ref.name), []) if not r.unusable and r != ref]

    def ref(self, kind: str, name: str) -> Ref:
        """Raises: UnknownPlugin, or PluginConflict if packages disagree about the name."""
        every = self._refs.get((kind, name), [])
        usable = [r for r in every if not r.unusable]
        if not usable:
            raise UnknownPlugin(self._unknown(kind, name, every))
        wanted = self.prefer.get(f"{kind}.{name}")
        if wanted is not None:
            chosen = [r for r in usable if normalize(r.dist) == normalize(wanted)]
            if len(chosen) != 1:
                raise PluginConflict(
                    f"{kind} {name!r} is to come from package {wanted!r} (plugins.prefer), which "
                    + ("does not offer it. It is offered by:\n" if not chosen else "offers it twice:\n")
                    + "\n".join(f"  {r.package} ({r.target})" for r in chosen or usable)
                )
            return chosen[0]
        if len(usable) > 1:
            raise PluginConflict(_conflict(kind, name, usable))
        return usable[0]

    def _unknown(self, kind: str, name: str, unusable: list[Ref]) -> str:
        if kind not in KINDS:
            return f"no plugin kind is named {kind!r}.{did_you_mean(kind, KINDS)} Kinds: {', '.join(KINDS)}"
        if unusable:
            why = "\n".join(f"  from: {r.package} ({r.target})\n  why:  {r.unusable}" for r in unusable)
            return f"{kind} {name!r} cannot be used.\n{why}\n{self.available(kind)}"
        hint = did_you_mean(name, self.names(kind))
        return f"no {kind} plugin is named {name!r}.{hint}\n{self.available(kind)}"

    def preferred(self, kind: str, facts: Any, candidates: Sequence[str]) -> str | None:
        """What the enabled hook plugins make of ``use = "auto"``; None if they leave it to core. Raises: PluginError."""
        return self.ask_hooks(kind, facts, candidates) if self.ask_hooks is not None else None

    def available(self, kind: str, without: str = "") -> str:
        """The table at the end of an error message; ``without``: the name that the message is about."""
        rows = [(r.name, r.package, self.status(r)) for r in self.refs(kind) if r.name != without]
        if not rows:
            return f"Available {kind} plugins: none"
        wide, wider = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = (f"  {name:<{wide}}  {package:<{wider}}  {status}".rstrip() for name, package, status in rows)
        return "\n".join([f"Available {kind} plugins:", *lines])

    def status(self, ref: Ref) -> str:
        """ "" if it may be selected, as far as is known without an import."""
        if ref.unusable:
            return f"UNUSABLE: {ref.unusable}"
        failure = self.failures.get((ref.kind, ref.name))
        if failure:
            return f"FAILED: {failure}"
        return "CONFLICT: offered by more than one package" if self.rivals(ref) else ""

    # ------------------------------------------------------------------------------------------------ loading
    def load(self, kind: str, name: str) -> type[Any]:
        """Import a plugin and check that it is what its kind requires.

        Raises: UnknownPlugin, PluginConflict, BrokenPlugin with package, reason and place.
        """
        from minisgl.plugin.shape import check_shape

        used = _used_kind(kind)
        ref = self.ref(kind, name)
        if ref in self._loaded:
            return self._loaded[ref]
        found = self._given.get(ref) or self.import_target(ref)
        fault = check_shape(used, found)
        if fault:
            self.failures[kind, name] = fault
            raise BrokenPlugin(
                f"{kind} {name!r} cannot be used.\n  from: {ref.package} ({ref.target})\n  why:  {kind} {name!r} {fault}\n"
                + self.available(kind, without=name)
            )
        self._loaded[ref] = found
        return found

    def import_target(self, ref: Ref) -> Any:
        """The object that ``ref`` names, unchecked. Raises: BrokenPlugin."""
        try:
            return import_target(ref.target)
        except (Exception, SystemExit) as exc:
            why = f"{type(exc).__name__}: {exc}"
            self.failures[ref.kind, ref.name] = why.splitlines()[0]
            raise BrokenPlugin(
                f"{ref.kind} {ref.name!r} could not be loaded.\n  from: {ref.package} ({ref.target})\n"
                f"  why:  {why}\n  at:   {_place(exc)}\n{self.available(ref.kind, without=ref.name)}"
            ) from exc

    def settings(self, kind: str, name: str, options: Mapping[str, Any]) -> PluginSettings:
        """Check a plugin's options by its Settings. Raises: ConfigError, and what ``load`` raises."""
        from minisgl.plugin.shape import checked_settings

        return checked_settings(kind, name, self.load(kind, name), options)

    def create(
        self, kind: str, name: str, options: Mapping[str, Any], make_ctx: Callable[[PluginSettings], Any]
    ) -> Any:
        """Build a component: load its class, check its options, construct it from the context that ``make_ctx`` makes.

        Raises: what ``settings`` raises; what the constructor raises, with a note that says whose it is.
        """
        settings = self.settings(kind, name, options)
        cls = self.load(kind, name)
        try:
            return cls(make_ctx(settings))
        except Exception as exc:
            if not isinstance(exc, MiniSGLError):
                exc.add_note(f"in {kind} {name!r} ({self.ref(kind, name).package}), __init__()")
            raise

    def lock(self, picks: Iterable[tuple[str, str]]) -> PluginLock:
        """The lock of the selected (kind, name) pairs; imports nothing."""
        refs = [self.ref(kind, name) for kind, name in picks]
        return PluginLock.of(self.core_version, (LockEntry(r.kind, r.name, r.target, r.dist, r.version) for r in refs))


def import_target(target: str) -> Any:
    """``module:attr`` or ``module``."""
    module, _, attr = target.partition(":")
    obj: Any = importlib.import_module(module)
    for part in attr.split(".") if attr else ():
        obj = getattr(obj, part)
    return obj


def _used_kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise UnknownPlugin(f"no plugin kind is named {kind!r}.{did_you_mean(kind, KINDS)} Kinds: {', '.join(KINDS)}")
    if KINDS[kind].base is None:
        raise PluginError(
            f"{kind} plugins are not loaded by name: what they are has no base class. Enable them with plugins.enable or "
            "--plugin. Kinds that are loaded: " + ", ".join(k.name for k in KINDS.values() if k.base)
        )
    return KINDS[kind]


def _distributions() -> Iterator[tuple[str, metadata.Distribution]]:
    """The first distribution of each name on sys.path; in one folder, dist-info before egg-info."""
    found: dict[str, tuple[Any, bool, metadata.Distribution]] = {}
    for dist in metadata.distributions():
        path = getattr(dist, "_path", None)  # None for finders other than the file system's
        folder, info = (path.parent, path.name.endswith(".dist-info")) if path is not None else (None, True)
        stem = path.name.removesuffix(".dist-info").removesuffix(".egg-info").split("-")[0] if path is not None else ""
        try:
            key = normalize(stem or dist.metadata["Name"])
        except Exception:
            continue
        old = found.get(key)
        if old is None or (info and not old[1] and folder == old[0]):
            found[key] = (folder, info, dist)
    return ((key, dist) for key, (_, _, dist) in found.items())


def _unmet_requirement(dist: metadata.Distribution, core_version: str) -> str:
    """Why the package's own ``Requires-Dist: minisgl`` does not fit this minisgl, or "". pip does not check after upgrades."""
    for line in dist.requires or ():
        if not re.match(r"minisgl\b(?![-_.\w])", line, re.IGNORECASE):
            continue
        from packaging.requirements import Requirement

        need = Requirement(line)
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if applies and not need.specifier.contains(core_version, prereleases=True):
            return f"requires minisgl{need.specifier}; this is {core_version}"
    return ""


def _unknown_group(group: str, dist: str) -> str:
    kind = group.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(kind, KINDS, n=1)
    if _GROUP.fullmatch(group):
        return f"{group} in {dist}: no such kind" + (f"; did you mean {near[0]!r}?" if near else "")
    hint = f"; did you mean 'minisgl.v{API_MAJOR}.{near[0]}'?" if near else f"; groups are minisgl.v{API_MAJOR}.<kind>"
    return f"{group} in {dist}: not a group of plugins{hint}"


def _conflict(kind: str, name: str, refs: list[Ref]) -> str:
    offers = "\n".join(f"  {r.package} ({r.target})" for r in refs)
    return (
        f"{kind} {name!r} is offered by more than one package:\n{offers}\n"
        f'Choose one:  [plugins.prefer]\n             "{kind}.{name}" = "{refs[0].dist}"'
    )


def _place(exc: BaseException) -> str:
    """``file:line`` where the import failed: the innermost frame that is not Python's own import machinery."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{exc.filename}:{exc.lineno}"
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if not f.filename.startswith("<frozen")]
    outside = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else "its entry point"
