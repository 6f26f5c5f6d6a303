"""The registry: scan, lookup, loading, and the wording of its errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.errors import BrokenPlugin, ConfigError, PluginConflict, PluginError, UnknownPlugin
from minisgl.plugin.kinds import KINDS
from minisgl.plugin.registry import Registry

LOOPS = """
from minisgl.api import PluginSettings, StepLoop

class Good(StepLoop):
    class Settings(PluginSettings):
        depth_hint: int = 2
        words: tuple[str, ...] = ()
        api_key: str = ""
    def turn(self, e): ...

class Lacks(StepLoop):
    pass

class Renamed(StepLoop):
    def turn(self, ops): ...

class MoreNeeded(StepLoop):
    def turn(self, e, extra): ...

class MoreOptional(StepLoop):
    def turn(self, e, extra=None): ...

class Future(StepLoop):
    needs = (1, 99)
    def turn(self, e): ...

class OtherKind:
    def turn(self, e): ...

class Raises(StepLoop):
    def __init__(self, ctx):
        raise ValueError("no such device")
    def turn(self, e): ...

function = lambda: None
"""


def loops(**names: str) -> dict[str, dict[str, str]]:
    return {"loop": {k: f"acme_loops:{v}" for k, v in names.items()}}


def message(error: type[Exception], call: Any, *args: Any) -> str:
    with pytest.raises(error) as caught:
        call(*args)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- scan
def test_scan_lists_bundled_and_outside_plugins_alike_without_importing_them(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Good"), {"acme_loops": LOOPS})
    registry = Registry.scan()
    ref = registry.ref("loop", "fast")
    assert (ref.target, ref.dist, ref.version, ref.api) == ("acme_loops:Good", "acme-llm", "0.3", 1)
    assert {"fast", "sync"} <= set(registry.names("loop"))
    assert "acme_loops" not in sys.modules


def test_first_distribution_of_a_name_on_the_path_wins(make_dist: Any) -> None:
    make_dist("acme-llm", "0.1", loops(old="Good"), {"acme_loops": LOOPS}, where="behind")
    make_dist("Acme_LLM", "0.2", loops(new="Good"), {"acme_loops": LOOPS}, where="front")
    names = Registry.scan().names("loop")
    assert "new" in names
    assert "old" not in names


def test_dist_info_goes_before_a_stale_egg_info_of_the_same_folder(make_dist: Any) -> None:
    make_dist("acme-llm", "0.1", loops(stale="Good"), info="egg-info")
    make_dist("acme-llm", "0.2", loops(new="Good"))
    names = Registry.scan().names("loop")
    assert "new" in names
    assert "stale" not in names


def test_unknown_groups_are_reported_with_the_nearest_kind(make_dist: Any) -> None:
    make_dist("typo", points={"minisgl.v1.atention": {"a": "m:A"}, "minisgl.cache": {"b": "m:B"}})
    assert Registry.scan().problems == [
        "minisgl.v1.atention in typo: no such kind; did you mean 'attention'?",
        "minisgl.cache in typo: not a group of plugins; did you mean 'minisgl.v1.cache'?",
    ]


def test_other_api_majors_are_listed_as_unusable(make_dist: Any) -> None:
    make_dist("old-attn", "0.3", {"minisgl.v0.attention": {"old": "old:A"}})
    registry = Registry.scan()
    assert "old" not in registry.names("attention")
    text = message(UnknownPlugin, registry.ref, "attention", "olt")
    assert re.search(r"old +old-attn 0.3 +UNUSABLE: written for plugin API v0; this minisgl has v1", text)


def test_requires_dist_is_read_before_import(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Good"), requires=["numpy", "minisgl>=7,<8"])
    text = message(UnknownPlugin, Registry.scan().ref, "loop", "fast")
    assert text.startswith(
        "loop 'fast' cannot be used.\n  from: acme-llm 0.3 (acme_loops:Good)\n  why:  requires minisgl"
    )
    assert "this is 0.1.0" in text


def test_a_requirement_that_is_met_or_of_another_package_changes_nothing(make_dist: Any) -> None:
    requires = ["minisgl>=0.1,<1", "minisgl-extras>=99", 'minisgl>=99; extra == "dev"']
    make_dist("acme-llm", "0.3", loops(fast="Good"), requires=requires)
    assert Registry.scan().ref("loop", "fast").unusable == ""


@pytest.mark.parametrize("what", ["loop.fast", "acme-llm", "Acme_LLM"])
def test_disabled_plugins_cannot_be_selected(make_dist: Any, what: str) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Good"))
    text = message(UnknownPlugin, Registry.scan(disable=[what]).load, "loop", "fast")
    assert "why:  disabled by plugins.disable" in text


def test_bundled_only_ignores_outside_packages(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Good"))
    registry = Registry.scan(bundled_only=True)
    assert {r.dist for r in registry.refs()} == {"minisgl"}


def test_a_folder_with_broken_metadata_does_not_stop_the_scan(make_dist: Any) -> None:
    site: Path = make_dist("acme-llm", "0.3", loops(fast="Good"))
    (site / "acme_llm-0.3.dist-info" / "entry_points.txt").write_text("[minisgl.v1.loop\nthis is = no = ini")
    assert "sync" in Registry.scan().names("loop")


# ---------------------------------------------------------------------------------------------------------- lookup
def test_unknown_names_get_the_nearest_and_the_list() -> None:
    assert message(UnknownPlugin, Registry.scan(bundled_only=True).ref, "cache", "radx") == (
        "no cache plugin is named 'radx'. Did you mean 'radix'?\n"
        "Available cache plugins:\n  naive  minisgl 0.1.0\n  radix  minisgl 0.1.0"
    )


def test_unknown_kinds_get_the_nearest() -> None:
    assert "no plugin kind is named 'cash'. Did you mean 'cache'?" in message(
        UnknownPlugin, Registry.scan().load, "cash", "radix"
    )


def test_hook_plugins_are_enabled_and_not_loaded_by_name() -> None:
    text = message(PluginError, Registry.scan().load, "hooks", "any")
    assert "hooks plugins are not loaded by name" in text
    assert "plugins.enable" in text


def test_a_name_of_two_packages_is_a_conflict_that_prefer_decides(make_dist: Any) -> None:
    make_dist("acme-llm", "2.0", loops(fast="Good"), {"acme_loops": LOOPS})
    make_dist("other", "1.0", {"loop": {"fast": "other_m:T"}})
    text = message(PluginConflict, Registry.scan().ref, "loop", "fast")
    assert text.splitlines()[0] == "loop 'fast' is offered by more than one package:"
    assert {"  acme-llm 2.0 (acme_loops:Good)", "  other 1.0 (other_m:T)"} < set(text.splitlines())
    assert text.splitlines()[-2] == "Choose one:  [plugins.prefer]"
    assert "fast" not in Registry.scan().names("loop")
    assert "fast" in Registry.scan(prefer={"loop.fast": "other"}).names("loop")
    assert Registry.scan(prefer={"loop.fast": "Acme_LLM"}).load("loop", "fast").__name__ == "Good"
    assert "which does not offer it" in message(
        PluginConflict, Registry.scan(prefer={"loop.fast": "no"}).ref, "loop", "fast"
    )


# ---------------------------------------------------------------------------------------------------------- loading
def test_a_plugin_that_does_not_import_is_named_with_package_reason_and_place(make_dist: Any) -> None:
    site = make_dist("acme-llm", "0.3", {"loop": {"fast": "acme_bad:X"}}, {"acme_bad": "\nimport no_such_module_x\n"})
    lines = message(BrokenPlugin, Registry.scan().load, "loop", "fast").splitlines()
    assert lines[:5] == [
        "loop 'fast' could not be loaded.",
        "  from: acme-llm 0.3 (acme_bad:X)",
        "  why:  ModuleNotFoundError: No module named 'no_such_module_x'",
        f"  at:   {site}/acme_bad.py:2",
        "Available loop plugins:",
    ]
    assert not any(line.startswith("  fast") for line in lines[5:])


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "def f(:\n  pass", "1/0"])
def test_whatever_an_import_raises_is_reported(make_dist: Any, source: str) -> None:
    site = make_dist("acme-llm", "0.3", {"loop": {"fast": "acme_bad:X"}}, {"acme_bad": source})
    assert f"  at:   {site}/acme_bad.py:1" in message(BrokenPlugin, Registry.scan().load, "loop", "fast")


def test_a_failure_is_shown_in_the_table_of_later_errors(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", {"loop": {"fast": "acme_bad:X"}}, {"acme_bad": "import no_such_module_x"})
    registry = Registry.scan()
    message(BrokenPlugin, registry.load, "loop", "fast")
    text = message(UnknownPlugin, registry.load, "loop", "nope")
    assert "FAILED: ModuleNotFoundError: No module named 'no_such_module_x'" in text


@pytest.mark.parametrize(
    ("attr", "why"),
    [
        ("Lacks", "lacks turn(e), which plugin API 1 requires"),
        ("Renamed", "has turn(ops), expected turn(e) as plugin API 1 declares it"),
        ("MoreNeeded", "has turn(e, extra), expected turn(e) as plugin API 1 declares it"),
        ("Future", "needs plugin API 1.99; this minisgl has 1.0"),
        ("OtherKind", "is class OtherKind, expected a class that derives from StepLoop"),
        ("function", "expected a class that derives from StepLoop"),
    ],
)
def test_shape_is_checked_at_load(make_dist: Any, attr: str, why: str) -> None:
    make_dist("acme-llm", "0.3", loops(fast=attr), {"acme_loops": LOOPS})
    text = message(BrokenPlugin, Registry.scan().load, "loop", "fast")
    assert why in text
    assert "from: acme-llm 0.3" in text


def test_optional_extra_parameters_are_allowed(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", loops(fast="MoreOptional"), {"acme_loops": LOOPS})
    assert Registry.scan().load("loop", "fast").__name__ == "MoreOptional"


@pytest.mark.parametrize(
    ("kind", "name"),
    [(r.kind, r.name) for r in Registry.scan(bundled_only=True).refs() if KINDS[r.kind].base is not None],
)
def test_every_bundled_plugin_has_the_shape_of_its_kind(kind: str, name: str) -> None:
    assert issubclass(Registry.scan(bundled_only=True).load(kind, name), object)


# ---------------------------------------------------------------------------------------------------------- building
class Ctx:
    def __init__(self, settings: Any) -> None:
        self.settings = settings


def test_create_gives_the_context_the_checked_settings(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Good"), {"acme_loops": LOOPS})
    made = Registry.scan().create("loop", "fast", {"depth_hint": "7", "words": "a, b"}, Ctx)
    assert made.settings.depth_hint == 7
    assert made.settings.words == ("a", "b")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"depht_hint": 1}, "config: unknown option loop.fast.depht_hint; did you mean loop.fast.depth_hint?"),
        ({"depth_hint": "x"}, "config: loop.fast.depth_hint = 'x' is not valid: input should be a valid integer"),
        ({"api_key": 5}, "config: loop.fast.api_key = *** is not valid: input should be a valid string"),
    ],
)
def test_wrong_options_are_refused_in_our_words(make_dist: Any, options: dict[str, Any], text: str) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Good"), {"acme_loops": LOOPS})
    got = message(ConfigError, Registry.scan().create, "loop", "fast", options, Ctx)
    assert got.startswith(text)
    assert "pydantic" not in got


def test_a_constructor_that_raises_is_blamed_on_its_plugin(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", loops(fast="Raises"), {"acme_loops": LOOPS})
    with pytest.raises(ValueError, match="no such device") as caught:
        Registry.scan().create("loop", "fast", {}, Ctx)
    assert caught.value.__notes__ == ["in loop 'fast' (acme-llm 0.3), __init__()"]


# ---------------------------------------------------------------------------------------------------------- adding
def test_added_classes_and_targets_are_selected_like_entry_points(make_dist: Any) -> None:
    make_dist("acme-llm", "0.3", modules={"acme_loops": LOOPS})
    registry = Registry.scan()
    registry.add("loop", "lazy", "acme_loops:Good")
    assert "acme_loops" not in sys.modules
    cls = registry.load("loop", "lazy")
    registry.add("loop", "now", cls)
    assert registry.load("loop", "now") is cls
    assert registry.ref("loop", "now").target == "acme_loops:Good"


def test_an_added_class_of_another_kind_is_refused() -> None:
    assert "expected a class that derives from minisgl.sched.cache:CachePolicy" in message(
        BrokenPlugin, Registry.scan().add, "cache", "x", dict
    )


def test_an_added_class_is_checked_when_it_is_loaded() -> None:
    from minisgl.api import StepLoop

    class Local(StepLoop):
        pass

    registry = Registry()
    registry.add("loop", "mine", Local)
    assert "lacks turn(e)" in message(BrokenPlugin, registry.load, "loop", "mine")


@pytest.mark.parametrize("name", ["a.b", "", "-x", "a b"])
def test_names_that_settings_cannot_spell_are_refused(name: str) -> None:
    assert "use letters, digits, - and _" in message(PluginError, Registry().add, "cache", name, "m:C")
