"""Hook plugins: enabling, registering, calling, isolation, and their way into other processes."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.api.hookspec import SPECS, hookimpl
from minisgl.base.errors import BrokenPlugin, PluginError, RequestError, UnknownPlugin
from minisgl.config.load import load_settings, settings_from_json, settings_to_json
from minisgl.plugin.hooks import Hooks
from minisgl.plugin.lock import PluginLock
from minisgl.plugin.registry import Registry

ACME = """
from minisgl.api import StepLoop
from minisgl.api.hookspec import hookimpl

@hookimpl
def register_cache_policies(add):
    add("acme-naive", "minisgl_plugins.cache.naive:NaiveCachePolicy")

@hookimpl
def register_schedulers(add):
    add("acme-chunked", "minisgl_plugins.scheduler.chunked:ChunkedScheduler")
"""


def message(error: type[Exception], call: Any, *args: Any) -> str:
    with pytest.raises(error) as caught:
        call(*args)
    return str(caught.value)


def enable_error(*plugins: Any) -> str:
    return message(PluginError, Hooks, Registry.scan(), plugins)


# ---------------------------------------------------------------------------------------------------------- enabling
def test_an_installed_hook_plugin_does_nothing_until_it_is_enabled(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_hooks"}}, {"acme_hooks": ACME})
    registry = Registry.scan()
    Hooks(registry)
    assert "acme_hooks" not in sys.modules
    assert "acme-naive" not in registry.names("cache")


@pytest.mark.parametrize("how", ["acme", "acme_hooks"])
def test_both_names_of_a_hook_module_register_the_same_things(make_dist: Any, how: str) -> None:
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_hooks"}}, {"acme_hooks": ACME})
    registry = Registry.scan()
    hooks = Hooks(registry, [how])
    entries = registry.lock([("cache", "acme-naive")]).entries
    assert entries == (("cache", "acme-naive", "minisgl_plugins.cache.naive:NaiveCachePolicy", "acme-llm", "0.3"),)
    assert hooks.picks() == [("hooks", how)]
    assert registry.lock(hooks.picks()).entries[0][3:] == ("acme-llm", "0.3")
    assert registry.load("cache", "acme-naive").__name__ == "NaiveCachePolicy"


def test_both_doors_give_the_same_lock(make_dist: Any) -> None:
    target = "minisgl_plugins.cache.naive:NaiveCachePolicy"
    make_dist(
        "acme-llm", "0.3", {"hooks": {"acme": "acme_hooks"}, "cache": {"acme-naive": target}}, {"acme_hooks": ACME}
    )
    by_entry_point, by_both = Registry.scan(), Registry.scan()
    Hooks(by_both, ["acme"])
    pick = [("cache", "acme-naive")]
    assert by_entry_point.lock(pick).fingerprint == by_both.lock(pick).fingerprint


def test_module_attr_objects_and_classes_can_be_enabled(make_dist: Any) -> None:
    source = "from minisgl.api.hookspec import hookimpl\nclass P:\n  @hookimpl\n  def process_started(self, role): return role\np = P()"
    make_dist("acme-llm", "0.3", modules={"acme_obj": source})
    module = pytest.importorskip("acme_obj")
    for plugin in ("acme_obj:p", "acme_obj:P", module.p, module.P):
        assert Hooks(Registry.scan(), [plugin]).call("process_started", role="api", rank=0) == ["api"]


def test_an_unknown_name_is_refused_with_the_nearest(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_hooks"}}, {"acme_hooks": ACME})
    text = message(UnknownPlugin, Hooks, Registry.scan(), ["acne"])
    assert text.startswith("no hook plugin is named 'acne', and no module 'acne' can be imported. Did you mean 'acme'?")


def test_a_disabled_hook_plugin_cannot_be_enabled(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_hooks"}}, {"acme_hooks": ACME})
    assert "disabled by plugins.disable" in message(PluginError, Hooks, Registry.scan(disable=["acme-llm"]), ["acme"])


def test_a_hook_module_that_does_not_import_is_blamed(make_dist: Any) -> None:
    site = make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_bad"}}, {"acme_bad": "1/0"})
    for how in ("acme", "acme_bad", "acme_bad:x"):
        text = enable_error(how)
        assert "from: acme-llm 0.3 (acme_bad" in text
        assert f"why:  ZeroDivisionError: division by zero\n  at:   {site}/acme_bad.py:1" in text


def test_objects_that_are_no_hook_plugins_are_refused() -> None:
    class Misspelt:
        @hookimpl
        def register_model(self, add: Any) -> None: ...

    class WrongArgument:
        @hookimpl
        def register_models(self, adds: Any) -> None: ...

    class Wrapper:
        @hookimpl(wrapper=True)
        def process_started(self) -> Any:
            return (yield)

    class Needs:
        def __init__(self, value: int) -> None: ...

    assert "which is no hook of plugin API 1. Did you mean 'register_models'?" in enable_error(Misspelt())
    assert "'adds'" in enable_error(WrongArgument())
    assert "is a wrapper; this hook cannot be wrapped" in enable_error(Wrapper())
    assert "implements no hook; mark functions with @hookimpl" in enable_error(SimpleNamespace())
    assert "Give an object, or a class without parameters" in enable_error(Needs)


# ---------------------------------------------------------------------------------------------------------- registering
def test_what_a_hook_adds_is_checked_like_an_entry_point(make_dist: Any) -> None:
    source = "from minisgl.api.hookspec import hookimpl\n@hookimpl\ndef register_models(add):\n    add('x', {what})"
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_m"}}, {"acme_m": source.format(what="'no target'")})
    assert enable_error("acme") == (
        "hook 'register_models' of plugin 'acme' (acme-llm 0.3) added str, expected a Model class or 'module:attr'"
    )


def test_a_class_of_the_wrong_kind_is_refused_at_once() -> None:
    class Bad:
        @hookimpl
        def register_frontends(self, add: Any) -> None:
            add("x", dict)

    assert "added dict, expected a Frontend class or 'module:attr'" in enable_error(Bad())


def test_a_register_hook_that_raises_is_blamed() -> None:
    class Bad:
        @hookimpl
        def register_frontends(self, add: Any) -> None:
            raise RuntimeError("no licence")

    assert "hook 'register_frontends' of plugin" in (text := enable_error(Bad()))
    assert "failed: RuntimeError: no licence" in text


def test_disable_reaches_what_hooks_add(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_hooks"}}, {"acme_hooks": ACME})
    registry = Registry.scan(disable=["cache.acme-naive"])
    Hooks(registry, ["acme"])
    assert "acme-naive" not in registry.names("cache")
    assert "acme-chunked" in registry.names("scheduler")


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("register_models", "model"),
        ("register_attention_backends", "attention"),
        ("register_cache_policies", "cache"),
        ("register_schedulers", "scheduler"),
        ("register_frontends", "frontend"),
    ],
)
def test_each_area_has_a_hook_that_registers(hook: str, kind: str) -> None:
    plugin = type("P", (), {hook: hookimpl(lambda self, add: add("mine", "some.module:Thing"))})()
    registry = Registry()
    Hooks(registry, [plugin])
    assert registry.ref(kind, "mine").target == "some.module:Thing"


# ---------------------------------------------------------------------------------------------------------- calling
class Recorder:
    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    @hookimpl
    def process_started(self, role: str) -> None:
        self.seen.append(f"{self.name} {role}")

    @hookimpl
    def prefer(self, kind: str) -> str | None:
        return None if kind == "loop" else self.name


class Failing:
    @hookimpl
    def process_started(self) -> None:
        raise ValueError("broken inside")

    @hookimpl
    def engine_ready(self) -> None:
        raise AssertionError("must be off by now")

    @hookimpl
    def check_request(self, request: Any) -> None:
        raise (RequestError("too rude") if request == "rude" else KeyError("x"))


def test_plugins_are_called_in_the_order_in_which_they_were_named() -> None:
    seen: list[str] = []
    hooks = Hooks(Registry(), [Recorder("a", seen), Recorder("b", seen)])
    hooks.call("process_started", role="api", rank=0)
    assert seen == ["a api", "b api"]
    assert hooks.first("prefer", kind="cache", facts=None, candidates=("a", "b")) == "a"
    assert hooks.first("prefer", kind="loop", facts=None, candidates=("a", "b")) is None


def test_a_preference_that_is_no_candidate_is_refused() -> None:
    hooks = Hooks(Registry(), [Recorder("a", [])])
    assert hooks.prefer("cache", None, ["b", "a"]) == "a"
    assert message(PluginError, hooks.prefer, "cache", None, ["b", "c"]) == (
        "hook 'prefer' answered 'a' for cache, expected one of b, c"
    )


def test_an_isolated_hook_that_raises_is_logged_and_turns_off_its_plugin_only(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    hooks = Hooks(Registry(), [Failing(), Recorder("b", seen)])
    with caplog.at_level(logging.ERROR):
        hooks.call("process_started", role="api", rank=0)
        hooks.call("process_started", role="text", rank=0)
        hooks.call("engine_ready", info=None)
    assert seen == ["b api", "b text"]
    assert [r.getMessage() for r in caplog.records] == [
        "hook 'process_started' of plugin 'Failing' (<api>) failed; its hooks are off from now on"
    ]


def test_another_hook_that_raises_goes_to_its_caller_with_blame() -> None:
    hooks = Hooks(Registry(), [Failing()])
    with pytest.raises(KeyError) as caught:
        hooks.call("check_request", request="x", info=None)
    assert caught.value.__notes__ == ["in hook 'check_request' of plugin 'Failing' (<api>)"]
    with pytest.raises(RequestError, match="too rude"):
        hooks.call("check_request", request="rude", info=None)


def test_hooks_that_nobody_implements_give_nothing() -> None:
    hooks = Hooks(Registry())
    assert hooks.call("check_request", request=None, info=None) == []
    assert hooks.first("resolve_model", ref="x", revision=None) is None


def test_every_spec_is_documented() -> None:
    for area in SPECS:
        for name, member in vars(area).items():
            assert name.startswith("_") or member.__doc__, f"{area.__name__}.{name} has no docstring"


# ---------------------------------------------------------------------------------------------------------- processes
def test_a_spawned_process_finds_what_plugin_module_attr_registers(make_dist: Any) -> None:
    """X1: what --plugin module:attr registers in the first process is known in the others, under the same lock."""
    source = ACME + "\nclass Both:\n    register_cache_policies = staticmethod(register_cache_policies)\n"
    site = make_dist("acme-llm", "0.3", modules={"acme_hooks": source})
    loaded = load_settings(argv=["--cache", "acme-naive"], environ={}, plugins=["acme_hooks:Both"])
    lock = loaded.registry.lock([*loaded.hooks.picks(), ("cache", "acme-naive")])
    lock.require_importable()
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from minisgl.config.load import settings_from_json\n"
        "from minisgl.plugin.hooks import Hooks; from minisgl.plugin.registry import Registry\n"
        "from minisgl.plugin.lock import PluginLock\n"
        "s = settings_from_json(sys.argv[1]); registry = Registry.scan(); Hooks(registry, s.plugins.enable)\n"
        "print(PluginLock.from_json(sys.argv[2]).observed(registry).to_json())\n"
        "print(registry.load('cache', s.use('cache')[0]).__name__)"
    )
    child = [sys.executable, "-c", code, settings_to_json(loaded.settings), lock.to_json()]
    out = subprocess.run(child, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lock.explain(PluginLock.from_json(out[0])) == []
    assert out[1] == "NaiveCachePolicy"
    assert settings_from_json(settings_to_json(loaded.settings)) == loaded.settings


def test_an_object_is_refused_where_other_processes_are_needed() -> None:
    registry = Registry()
    hooks = Hooks(registry, [Recorder("a", [])])
    with pytest.raises(PluginError, match="as an object"):
        registry.lock(hooks.picks()).require_importable()


def test_broken_hook_plugins_stop_the_start_but_not_the_listing(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"hooks": {"acme": "acme_bad"}}, {"acme_bad": "1/0"})
    assert "acme" in Registry.scan().names("hooks")
    with pytest.raises(BrokenPlugin):
        load_settings(argv=["--plugins.enable", "acme"], environ={})


def test_a_registry_asks_the_enabled_plugins_what_auto_means() -> None:
    registry = Registry()
    assert registry.preferred("attention", None, ["a", "b"]) is None
    Hooks(registry, [Recorder("b", [])])
    assert registry.preferred("attention", None, ["a", "b"]) == "b"
