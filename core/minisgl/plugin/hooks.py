"""Hook plugins: those that the configuration enables, what they register, and calling their hooks.

The specs stand in ``minisgl.api.hookspec``, which is above this layer and therefore met by name, as base classes are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from minisgl.base.errors import BrokenPlugin, MiniSGLError, PluginError, UnknownPlugin
from minisgl.plugin.kinds import API_MAJOR, KINDS
from minisgl.plugin.registry import API_DIST, Ref, Registry, did_you_mean

log = logging.getLogger("minisgl.plugin")
LOCAL_DIST = "<local>"  # the package of a module that no installed package owns


@dataclass(slots=True)
class HookPlugin:
    """An enabled hook plugin. ``added``: (kind, name) of what its register_* hooks added."""

    ref: Ref
    object: Any
    added: list[tuple[str, str]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"plugin {self.ref.name!r} ({self.ref.package})"


class Hooks:
    """The enabled hook plugins of one process, in the order in which they were named; the first named is called first.

    Args: registry: gets what the register_* hooks add. enable: names of entry points in ``minisgl.v1.hooks``, ``module``,
        ``module:attr``, or objects.
    Raises: PluginError for one that cannot be enabled; an enabled plugin is never left out silently.
    """

    def __init__(self, registry: Registry, enable: Sequence[str | object] = ()) -> None:
        specs = import_module("minisgl.api.hookspec")
        self.registry = registry
        self.plugins: list[HookPlugin] = []
        self._isolated: frozenset[str] = specs.ISOLATED
        self._manager = pluggy.PluginManager("minisgl")
        for area in specs.SPECS:
            self._manager.add_hookspecs(area)
        found = [self._find(item) for item in enable]
        for plugin in reversed(found):  # pluggy calls the last registered first
            self._register(plugin)
        self.plugins.reverse()
        registry.ask_hooks = self.prefer if self.plugins else None
        for plugin in self.plugins:
            for hook, kind in specs.REGISTERS.items():
                self._let_register(plugin, hook, kind)

    def picks(self) -> list[tuple[str, str]]:
        """What belongs into the plugin lock."""
        return [("hooks", p.ref.name) for p in self.plugins]

    def implemented(self, plugin: object) -> list[str]:
        """Names of the hooks that an object would implement."""
        names = (n for n in vars(self._manager.hook) if not n.startswith("_"))
        return sorted(n for n in names if self._manager.parse_hookimpl_opts(plugin, n) is not None)

    # ------------------------------------------------------------------------------------------------ enabling
    def _find(self, item: str | object) -> HookPlugin:
        if isinstance(item, str):
            known = [r.name for r in self.registry.refs("hooks")]
            if item not in known:
                self._add_module_ref(item, known)
            ref = self.registry.ref("hooks", item)
            found = self.registry.import_target(ref)
            return HookPlugin(ref, _instance(ref, found))
        if isinstance(item, ModuleType):
            return self._find(item.__name__)
        cls = item if isinstance(item, type) else type(item)
        target = f"{cls.__module__}:{cls.__qualname__}" + ("" if isinstance(item, type) else "()")
        taken = [r.name for r in self.registry.refs("hooks")]
        names = (f"{cls.__name__}-{n}" if n > 1 else cls.__name__ for n in count(1))
        ref = Ref("hooks", next(n for n in names if n not in taken), target, API_DIST, "", door="Python API")
        self.registry.put(ref)
        return HookPlugin(ref, _instance(ref, item))

    def _add_module_ref(self, item: str, known: list[str]) -> None:
        """``module`` or ``module:attr`` becomes a hook plugin of that name."""
        module = item.partition(":")[0]
        try:
            import_module(module)
        except ModuleNotFoundError as exc:
            if exc.name is not None and (module == exc.name or module.startswith(exc.name + ".")):
                raise UnknownPlugin(
                    f"no hook plugin is named {item!r}, and no module {module!r} can be imported.{did_you_mean(item, known)}\n"
                    + self.registry.available("hooks")
                ) from exc
        except (Exception, SystemExit):
            pass  # reported with package and place when the plugin itself is imported, right after this
        dist, version = distribution_of(module)
        self.registry.put(Ref("hooks", item, item, dist, version, door="plugins.enable"))

    def _register(self, plugin: HookPlugin) -> None:
        if any(plugin.object is p.object for p in self.plugins):
            return  # named twice
        try:
            self._manager.register(plugin.object, plugin.ref.name)
        except (pluggy.PluginValidationError, ValueError) as exc:
            raise BrokenPlugin(f"hook {plugin.label} does not fit plugin API {API_MAJOR}: {exc}") from exc
        self.plugins.append(plugin)
        callers = self._manager.get_hookcallers(plugin.object) or []
        if not callers:
            raise BrokenPlugin(
                f"hook {plugin.label} implements no hook; mark functions with @hookimpl from minisgl.api.hookspec"
            )
        for caller in callers:
            if not caller.has_spec():
                known = [name for name in vars(self._manager.hook) if getattr(self._manager.hook, name).has_spec()]
                raise BrokenPlugin(
                    f"hook {plugin.label} implements {caller.name!r}, which is no hook of plugin API {API_MAJOR}."
                    + did_you_mean(caller.name, known)
                )
            if self._walked(caller.name) and any(i.hookwrapper or i.wrapper for i in caller.get_hookimpls()):
                raise BrokenPlugin(f"hook {caller.name!r} of {plugin.label} is a wrapper; this hook cannot be wrapped")

    def _walked(self, name: str) -> bool:
        """Hooks that are called plugin by plugin, not through pluggy."""
        return name in self._isolated or name.startswith("register_") or name == "config_defaults"

    def _let_register(self, plugin: HookPlugin, hook: str, kind: str) -> None:
        def add(name: str, target: type | str) -> None:
            try:
                self.registry.add(
                    kind, name, target, plugin.ref.dist, version=plugin.ref.version, door=f"hook of {plugin.ref.name}"
                )
            except BrokenPlugin as exc:
                base = str(KINDS[kind].base).rpartition(":")[2]
                what = target.__qualname__ if isinstance(target, type) else type(target).__name__
                raise BrokenPlugin(
                    f"hook {hook!r} of {plugin.label} added {what}, expected a {base} class or 'module:attr'"
                ) from exc
            plugin.added.append((kind, name))

        for impl in self._impls(hook, plugin.object):
            try:
                _call(impl, {"add": add})
            except PluginError:
                raise
            except Exception as exc:
                raise BrokenPlugin(f"hook {hook!r} of {plugin.label} failed: {type(exc).__name__}: {exc}") from exc

    # ------------------------------------------------------------------------------------------------ calling
    def _impls(self, name: str, only: object = None) -> Iterator[pluggy.HookImpl]:
        caller: pluggy.HookCaller = getattr(self._manager.hook, name)
        yield from (i for i in reversed(caller.get_hookimpls()) if only is None or i.plugin is only)

    def call(self, name: str, **kw: Any) -> list[Any]:
        """Call a hook of every enabled plugin; the results that are not None. An isolated hook's exception is logged here and
        turns off that plugin's hooks; another's goes to the caller with a note that says whose it is."""
        if name in self._isolated:
            return self._call_isolated(name, kw)
        results = self._call(name, kw)
        assert isinstance(results, list), f"hook {name!r} has one result: use first()"
        return results

    def first(self, name: str, **kw: Any) -> Any | None:
        """The first result of a "first result" hook, or None."""
        return self._call(name, kw)

    def each(self, name: str, **kw: Any) -> list[tuple[str, Any]]:
        """As ``call``, with whose each result is."""
        labels = [(self._label(i.plugin), _call(i, kw)) for i in list(self._impls(name))]
        return [(label, result) for label, result in labels if result is not None]

    def prefer(self, kind: str, facts: Any, candidates: Sequence[str]) -> str | None:
        """What the plugins prefer for ``use = "auto"``. Raises: PluginError if that is not one of ``candidates``."""
        chosen = self.first("prefer", kind=kind, facts=facts, candidates=tuple(candidates))
        if chosen is not None and chosen not in candidates:
            raise PluginError(f"hook 'prefer' answered {chosen!r} for {kind}, expected one of {', '.join(candidates)}")
        return chosen

    def _call(self, name: str, kw: dict[str, Any]) -> Any:
        try:
            return getattr(self._manager.hook, name)(**kw)
        except MiniSGLError:
            raise  # a refusal, worded by the plugin
        except Exception as exc:
            exc.add_note(f"in hook {name!r} of {self._blame(name, exc)}")
            raise

    def _call_isolated(self, name: str, kw: dict[str, Any]) -> list[Any]:
        results = []
        for impl in list(self._impls(name)):
            try:
                results.append(_call(impl, kw))
            except Exception:
                log.exception("hook %r of %s failed; its hooks are off from now on", name, self._label(impl.plugin))
                self._manager.unregister(impl.plugin)
        return [r for r in results if r is not None]

    def _label(self, plugin: object) -> str:
        return next((p.label for p in self.plugins if p.object is plugin), repr(plugin))

    def _blame(self, name: str, exc: BaseException) -> str:
        """Whose implementation raised, by the code objects in the traceback."""
        codes, tb = set(), exc.__traceback__
        while tb is not None:
            codes.add(tb.tb_frame.f_code)
            tb = tb.tb_next
        guilty = (i for i in self._impls(name) if getattr(i.function, "__code__", None) in codes)
        return next((self._label(i.plugin) for i in guilty), "a plugin")


def _call(impl: pluggy.HookImpl, kw: dict[str, Any]) -> Any:
    return impl.function(*(kw[name] for name in impl.argnames))


def _instance(ref: Ref, found: Any) -> Any:
    """Hook methods need an object: a class is made one."""
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as exc:
        raise BrokenPlugin(
            f"hook plugin {ref.name!r} ({ref.package}) could not be made: {found.__qualname__}() raised "
            f"{type(exc).__name__}: {exc}. Give an object, or a class without parameters"
        ) from exc


def distribution_of(module: str) -> tuple[str, str]:
    """(package, version) that owns a module, or ("<local>", "")."""
    top = module.partition(".")[0]
    for dist in metadata.distributions():
        if top in (dist.read_text("top_level.txt") or "").split() or _records(dist, top):
            return dist.metadata["Name"], dist.version
    return LOCAL_DIST, ""


def _records(dist: metadata.Distribution, top: str) -> bool:
    """Whether the package's list of files has the module; only for packages without top_level.txt."""
    if dist.read_text("top_level.txt") is not None:
        return False
    lines = (dist.read_text("RECORD") or "").splitlines()
    return any(Path(line.split(",")[0]).parts[:1] in ((top,), (f"{top}.py",)) for line in lines)
