from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.base.component import PluginSettings
from minisgl.base.errors import ModelError, UnknownPlugin
from minisgl.base.types import LocalModel
from minisgl.config.schema import ModelSettings, Settings, default_cache_dir
from minisgl.plugin.registry import Registry
from minisgl.text.resolve import resolve_model
from minisgl.text.source import ModelSource, SourceContext


class Recorder(ModelSource):
    """Answers with what it was asked and built with."""

    marks: tuple[str, ...] = ()

    def __init__(self, ctx: SourceContext) -> None:
        self.ctx = ctx

    @classmethod
    def claims(cls, ref: str) -> bool:
        return ref.startswith(cls.marks)

    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        config = {"cls": type(self).__name__, "weights": weights, "cache": self.ctx.cache_dir, "hub": self.ctx.hub_dir}
        return LocalModel(ref, "m", Path("/"), config, revision=revision, defaults={"offline": self.ctx.offline})


class Dir(Recorder):
    marks = ("/", "./")


class Hub(Recorder):
    pass


class Other(Recorder):
    marks = ("org/", "/")


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.add("model_source", "dir", Dir, dist="minisgl")
    registry.add("model_source", "hf", Hub, dist="minisgl")
    registry.add("model_source", "acme", Other, dist="acme-models")
    return registry


class FakeHooks:
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []

    def first(self, name: str, **kw: Any) -> Any:
        self.asked.append((name, kw))
        return self.answer


def resolved(registry: Registry, ref: str, hooks: Any = None, weights: bool = True, **model: Any) -> LocalModel:
    return resolve_model(Settings(model=ModelSettings(path=ref, **model)), registry, hooks, weights=weights)


def test_scheme_decides_first(registry: Registry) -> None:
    hooks = FakeHooks(LocalModel("x", "hook", Path("/"), {}))
    model = resolved(registry, "acme:/a:b", hooks)
    assert (model.config["cls"], model.ref, hooks.asked) == ("Other", "/a:b", [])


def test_hook_comes_before_the_claims(registry: Registry) -> None:
    hooks = FakeHooks(LocalModel("x", "hook", Path("/"), {}))
    assert resolved(registry, "/folder", hooks, revision="r").name == "hook"
    assert hooks.asked == [("resolve_model", {"ref": "/folder", "revision": "r"})]
    assert resolved(registry, "/folder", FakeHooks(None)).config["cls"] == "Dir"


def test_n6_hub_id_is_the_pattern_that_is_left(registry: Registry) -> None:
    model = resolved(registry, "org/name-1.5_x", revision="main", weights=False)
    assert (model.config["cls"], model.ref, model.revision, model.config["weights"]) == (
        "Hub",
        "org/name-1.5_x",
        "main",
        False,
    )


def test_installed_sources_of_others_are_not_active_without_their_scheme(registry: Registry) -> None:
    """``Other`` claims "org/..." and "/..." and is asked for neither."""
    assert resolved(registry, "org/name").config["cls"] == "Hub"
    assert resolved(registry, "/folder").config["cls"] == "Dir"


@pytest.mark.parametrize("ref", ["modle", "a/b/c", "https://host/a", "org/"])
def test_what_names_nothing_is_refused_with_what_could(registry: Registry, ref: str) -> None:
    with pytest.raises(ModelError, match=r"names no model.*acme:, dir:, hf:"):
        resolved(registry, ref)


def test_unknown_scheme_is_an_unknown_plugin(registry: Registry) -> None:
    with pytest.raises(UnknownPlugin, match="no model_source plugin is named 'hff'"):
        resolved(registry, "hff:org/name")


def test_existing_path_with_a_colon_is_no_scheme(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1:0").mkdir()
    with pytest.raises(ModelError, match="names no model"):
        resolved(registry, "v1:0")


def test_cache_folder_is_the_setting_or_the_users(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = resolved(registry, "/m", cache_dir=tmp_path)
    assert (chosen.config["cache"], chosen.config["hub"]) == (tmp_path, tmp_path / "hub")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    default = resolved(registry, "/m")
    assert (default.config["cache"], default.config["hub"]) == (tmp_path / "xdg" / "minisgl", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == Path.home() / ".cache" / "minisgl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "minisgl"


def test_offline_is_passed_on(registry: Registry) -> None:
    assert resolved(registry, "/m", offline=True).defaults == {"offline": True}


def test_wrong_answers_of_plugins_are_named(registry: Registry) -> None:
    with pytest.raises(ModelError, match="hook resolve_model gave str"):
        resolved(registry, "/m", FakeHooks("/m"))


def test_source_gets_its_own_settings(registry: Registry) -> None:
    class Options(PluginSettings):
        mirror: str = "m1"

    class Mirror(Recorder):
        Settings = Options

        def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
            return LocalModel(ref, self.ctx.settings.mirror, Path("/"), {})

    registry.add("model_source", "mirror", Mirror)
    assert resolved(registry, "mirror:x").name == "m1"
