"""Settings: precedence, origins, refusals and their wording, checks, and the way to child processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.api.hookspec import hookimpl
from minisgl.base.errors import BrokenPlugin, ConfigError, MiniSGLError, UnknownPlugin
from minisgl.config.load import Loaded, load_settings, settings_from_json, settings_to_json
from minisgl.config.schema import CORE_SECTIONS, Settings


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(*argv: str, **kw: Any) -> Loaded:
    return load_settings(argv=argv, **{"environ": {}, **kw})


def refusal(*argv: str, error: type[Exception] = ConfigError, **kw: Any) -> str:
    with pytest.raises(error) as caught:
        load(*argv, **kw)
    assert "pydantic" not in str(caught.value)
    return str(caught.value)


def toml(text: str, name: str = "m.toml") -> list[Path]:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return [Path(name)]


# ---------------------------------------------------------------------------------------------------------- precedence
class Defaults:
    @hookimpl
    def config_defaults(self, model: str, device: str) -> dict[str, Any]:
        return {"server": {"port": 8, "drain_s": 8}}


def test_each_source_overrides_all_below_it() -> None:
    """Strongest first; each step takes away the strongest source that is left."""
    toml("[server]\nport = 6", "minisgl.toml")
    toml("[server]\nport = 7", "home/.config/minisgl/minisgl.toml")
    first, second = toml("[server]\nport = 5", "a.toml"), toml("[server]\nport = 4", "b.toml")
    sources: dict[str, Any] = {
        "overrides": {"server": {"port": 1}},
        "argv": ["--server.port", "2"],
        "environ": {"MINISGL_SERVER__PORT": "3", "HOME": "home"},
        "files": [*first, *second],
        "plugins": [Defaults()],
    }

    def port() -> int:
        return load_settings(**sources).settings.server.port

    assert port() == 1
    del sources["overrides"]
    assert port() == 2
    sources["argv"] = []
    assert port() == 3
    sources["environ"] = {"HOME": "home"}
    assert port() == 4
    sources["files"] = first
    assert port() == 5
    sources["files"] = []
    assert port() == 6
    Path("minisgl.toml").unlink()
    assert port() == 7
    sources["environ"] = {}
    assert port() == 8
    sources["plugins"] = []
    assert port() == 30000


def test_origins_say_what_counts_and_what_it_hides() -> None:
    loaded = load("--port", "2", environ={"MINISGL_SERVER__PORT": "3"}, files=toml("[server]\n\nport = 4\nhost = 'h'"))
    assert loaded.origins["server", "port"].where == "--port"
    assert loaded.origins["server", "port"].hides == ("MINISGL_SERVER__PORT", "m.toml:3")
    assert loaded.origin(("server", "host")) == "m.toml:4"
    assert loaded.origin(("kv", "page_size")) == "default"


def test_xdg_config_home_names_the_users_file() -> None:
    toml("[server]\nport = 7", "xdg/minisgl/minisgl.toml")
    assert load(environ={"XDG_CONFIG_HOME": "xdg", "HOME": "nowhere"}).settings.server.port == 7


def test_tables_merge_per_key_and_lists_replace() -> None:
    files = toml('[plugins]\ndisable = ["a", "b"]\n[plugins.prefer]\n"cache.x" = "p"\n"cache.y" = "p"')
    s = load("--plugins.disable", "c", "--plugins.prefer.cache.x", "q", files=files).settings
    assert s.plugins.disable == ("c",)
    assert s.plugins.prefer == {"cache.x": "q", "cache.y": "p"}


# ---------------------------------------------------------------------------------------------------------- spelling
@pytest.mark.parametrize(
    "argv",
    [
        ["--page-size", "32"],
        ["--page-size=32"],
        ["--page_size=32"],
        ["--kv.page-size", "32"],
        ["--kv.page_size=32"],
        ["--page-size", "8", "--page-size", "32"],
    ],
)
def test_options_have_one_meaning_in_every_spelling(argv: list[str]) -> None:
    assert load(*argv).settings.kv.page_size == 32


@pytest.mark.parametrize("overrides", [{"page_size": 32}, {"kv": {"page_size": 32}}, {"kv.page_size": 32}])
def test_python_spellings(overrides: dict[str, Any]) -> None:
    assert load(overrides=overrides).settings.kv.page_size == 32


@pytest.mark.parametrize(
    "source",
    [
        {"argv": ["--cache", "naive"]},
        {"argv": ["--cache.use=naive"]},
        {"environ": {"MINISGL_CACHE": "naive"}},
        {"environ": {"MINISGL_CACHE__USE": "naive"}},
        {"overrides": {"cache": "naive"}},
        {"overrides": {"cache": {"use": "naive"}}},
    ],
)
def test_a_kind_by_itself_means_its_use(source: dict[str, Any]) -> None:
    argv = source.pop("argv", [])
    assert load(*argv, **source).settings.use("cache") == ("naive",)


def test_kinds_in_files_are_sections_with_a_table_per_plugin() -> None:
    s = load(files=toml("[observer]\nuse = ['log']\n[observer.log]\nevery_s = 3")).settings
    assert s.use("observer") == ("log",)
    assert s.options("observer", "log") == {"every_s": 3}


def test_lists_may_be_comma_text() -> None:
    assert load("--ops", "torch", "--served-name", "a,b").settings.model.served_names == ("a", "b")
    assert load("--observer=").settings.use("observer") == ()
    assert load(environ={"MINISGL_MODEL__SERVED_NAMES": '["a,b", "c"]'}).settings.model.served_names == ("a,b", "c")


def test_yes_or_no_needs_no_value() -> None:
    assert load("--server.access-log", "--port", "1").settings.server.access_log is True
    assert load("--server.access-log", "false").settings.server.access_log is False


def test_none_unsets_an_optional_number() -> None:
    assert load("--max-len", "none", environ={"MINISGL_LIMITS__MAX_LEN": "5"}).settings.limits.max_len is None


def test_plugin_options_reach_plugins_with_dashes_in_their_names(make_dist: Any) -> None:
    make_dist("acme", "1", {"attention": {"my-attn": "m:A"}})
    s = load(
        "--attention.my-attn.workspace-mb", "3", environ={"MINISGL_ATTENTION__MY_ATTN__TENSOR_CORES": "on"}
    ).settings
    assert s.options("attention", "my-attn") == {"workspace_mb": "3", "tensor_cores": "on"}


# ---------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("kw", "text"),
    [
        (
            {"environ": {"MINISGL_SERVR__PORT": "1"}},
            "config: unknown environment variable MINISGL_SERVR__PORT; did you mean MINISGL_SERVER__PORT?",
        ),
        (
            {"argv": ["--attention.troch.workspace-mb", "1"]},
            "config: unknown option --attention.troch.workspace-mb; did you mean --attention.torch.workspace-mb?",
        ),
        ({"argv": ["--server.prot", "1"]}, "config: unknown option --server.prot; did you mean --port?"),
        ({"overrides": {"page_sise": 1}}, "config: unknown setting page_sise in Python; did you mean kv.page_size?"),
        ({"argv": ["--port"]}, "config: option --port needs a value: --port=VALUE"),
        ({"overrides": {"server": 3}}, "config: server = 3 is not a table; write server.host = ..."),
        ({"files": [Path("none.toml")]}, "config: there is no file 'none.toml'; --config takes a TOML file"),
        (
            {"argv": ["--tp", "2"]},
            "config: parallel.tp = '2' is not valid: this version runs a model on one device; only 1 is accepted\n"
            "        set by --tp",
        ),
        (
            {"argv": ["--cache", "radix,naive"]},
            "config: cache.use = 'radix,naive' is not valid: one cache plugin is used at a time; give one name",
        ),
        (
            {"argv": ["--observer.log.every", "3"]},
            "config: unknown option observer.log.every; did you mean observer.log.every_s?\n"
            "        set by --observer.log.every",
        ),
    ],
)
def test_wording_of_refusals(kw: dict[str, Any], text: str) -> None:
    argv = kw.pop("argv", [])
    assert refusal(*argv, **kw).startswith(text)


def test_refusals_name_file_and_line() -> None:
    files = toml("# c\n[servr]\nport = 1\n\n[cache.radx]\n[kv]\npage_sizes = 3")
    assert refusal(files=files).splitlines() == [
        "config: unknown setting servr.port in m.toml:3; did you mean server.port?",
        "config: [cache.radx] in m.toml:5 names no cache plugin; did you mean 'radix'?",
        "config: unknown setting kv.page_sizes in m.toml:7; did you mean kv.page_size?",
    ]
    assert refusal(files=toml("[server]\n\nport = 99999\nhost = 3")).splitlines() == [
        "config: server.host = 3 is not valid: input should be a valid string",
        "        set by m.toml:4",
        "config: server.port = 99999 is not valid: input should be less than or equal to 65535",
        "        set by m.toml:3",
    ]


def test_a_file_that_is_no_toml_is_refused_with_the_place() -> None:
    assert "config: m.toml cannot be read as TOML" in refusal(files=toml("[server\n"))


def test_a_name_that_no_plugin_has_is_refused_with_its_origin() -> None:
    text = refusal("--cache", "radx", error=UnknownPlugin)
    assert text.startswith("no cache plugin is named 'radx'. Did you mean 'radix'?")
    assert text.endswith("It was selected by: --cache")


def test_options_of_a_broken_plugin_matter_only_if_it_is_selected(make_dist: Any) -> None:
    make_dist("acme", "1", {"cache": {"bad": "acme_bad:C"}}, {"acme_bad": "1/0"})
    files = toml("[cache.bad]\nsize = 3")
    assert load(files=files).settings.options("cache", "bad") == {"size": 3}
    assert "ZeroDivisionError" in refusal("--cache", "bad", files=files, error=BrokenPlugin)


def test_options_of_torch_plugins_are_kept_for_the_process_that_loads_them(make_dist: Any) -> None:
    make_dist("acme", "1", {"attention": {"bad": "acme_bad:C"}}, {"acme_bad": "1/0"})
    assert load("--attention", "bad", "--attention.bad.x=1").settings.options("attention", "bad") == {"x": "1"}


def test_secrets_do_not_show() -> None:
    s = load("--api-key", "hunter2").settings
    assert "hunter2" not in repr(s)
    assert s.server.api_key.get_secret_value() == "hunter2"
    assert "hunter2" not in refusal(overrides={"server": {"api_key": ["hunter2"]}})


# ---------------------------------------------------------------------------------------------------------- together
def test_combinations_that_cannot_make_progress_are_refused() -> None:
    """S6: 129-token prompt with chunk 128 hung with health 200; here a bad combination never starts."""
    text = refusal("--max-running", "300", "--limits.batch-tokens", "256")
    assert "limits.batch_tokens = 256 does not fit limits.max_running = 300" in text
    assert "limits.batch_tokens set by --limits.batch-tokens, limits.max_running set by --max-running" in text
    text = refusal("--max-len", "161", "--kv.num-pages", "10")
    assert "limits.max_len = 161 does not fit kv.num_pages = 10: that is 160 tokens" in text
    assert "give at least 11 pages" in text
    assert "kv.page_size set by default" in text
    assert "room for 2 tokens" in refusal("--kv.num-pages", "1", "--page-size", "1")
    assert "kv.grow_pages = 5 does not fit" in refusal("--kv.num-pages", "4", "--kv.grow-pages", "5")
    assert "limits.batch_tokens = '0' is not valid" in refusal("--limits.batch-tokens", "0")


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-running", "1", "--limits.batch-tokens", "1"],
        ["--max-running", "256", "--limits.batch-tokens", "256"],
        ["--max-len", "160", "--kv.num-pages", "10"],
        ["--kv.num-pages", "2", "--page-size", "1"],
        ["--limits.batch-tokens", "128", "--page-size", "1024"],
    ],
)
def test_combinations_that_do_make_progress_are_accepted(argv: list[str]) -> None:
    """S6, the other side: decode rows may fill a step, and a chunk need not be a multiple of the page size."""
    load(*argv)


# ---------------------------------------------------------------------------------------------------------- hooks
def test_hook_defaults_that_disagree_are_refused() -> None:
    class Other:
        @hookimpl
        def config_defaults(self) -> dict[str, Any]:
            return {"server": {"port": 9}}

    text = refusal(plugins=[Defaults(), Other()])
    assert "config: server.port is 8 by config_defaults of plugin 'Defaults'" in text
    assert "and 9 by config_defaults of plugin 'Other'" in text


def test_hook_defaults_may_not_choose_plugins_and_must_be_settings() -> None:
    class Chooses:
        @hookimpl
        def config_defaults(self) -> dict[str, Any]:
            return {"plugins": {"enable": ["x"]}}

    class Unknown:
        @hookimpl
        def config_defaults(self) -> dict[str, Any]:
            return {"server": {"prot": 1}}

    assert "a hook cannot choose plugins to run" in refusal(plugins=[Chooses()])
    assert "unknown setting server.prot in config_defaults of plugin 'Unknown'" in refusal(plugins=[Unknown()])


def test_hooks_see_the_model_and_are_below_the_users_own_settings() -> None:
    seen = []

    class Sees:
        @hookimpl
        def config_defaults(self, model: str, device: str) -> dict[str, Any]:
            seen.append((model, device))
            return {"kv": {"page_size": 32}, "server": {"port": 9}}

    loaded = load("--model", "m", "--port", "1", plugins=[Sees()])
    assert seen == [("m", "auto")]
    assert (loaded.settings.kv.page_size, loaded.settings.server.port) == (32, 1)
    assert loaded.origins["server", "port"].hides == ("config_defaults of plugin 'Sees' (<api>)",)


def test_prefer_resolves_auto_and_yields_to_the_user() -> None:
    class Prefers:
        @hookimpl
        def prefer(self, kind: str, candidates: tuple[str, ...]) -> str | None:
            assert {"naive", "radix"} <= set(candidates) or kind != "cache"
            return "naive" if kind == "cache" else None

    assert load(plugins=[Prefers()]).settings.use("cache") == ("naive",)
    assert load("--cache", "radix", plugins=[Prefers()]).settings.use("cache") == ("radix",)


def test_a_hook_plugin_from_the_command_line_is_enabled_in_the_settings(make_dist: Any) -> None:
    source = "from minisgl.api.hookspec import hookimpl\n@hookimpl\ndef register_cache_policies(add): add('zz', 'm:C')"
    make_dist("acme", "1", modules={"acme_h": source, "acme_i": source.replace("zz", "yy")})
    s = load("--cache", "zz", "--plugins.enable", "acme_h", plugins=["acme_i"]).settings
    assert s.plugins.enable == ("acme_h", "acme_i")


# ---------------------------------------------------------------------------------------------------------- children
def test_child_processes_get_everything_also_secrets() -> None:
    s = load(
        "--api-key", "hunter2", "--observer.log.every-s", "2", "--model.cache-dir", "/tmp/x", "--engine.validate=audit"
    ).settings
    again = settings_from_json(settings_to_json(s))
    assert again == s
    assert again.server.api_key.get_secret_value() == "hunter2"


def test_values_that_json_does_not_have_are_refused() -> None:
    s = load(overrides={"attention": {"torch": {"x": object()}}}).settings
    with pytest.raises(ConfigError, match="cannot be handed to other processes"):
        settings_to_json(s)


def test_plain_settings_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_SERVER__PORT", "1")
    toml("[server]\nport = 2", "minisgl.toml")
    assert Settings().server.port == 30000


def test_every_setting_has_a_description() -> None:
    missing = [f"{s}.{n}" for s, m in CORE_SECTIONS.items() for n, f in m.model_fields.items() if not f.description]
    assert missing == []


words = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), max_size=3), st.dictionaries(words, words, max_size=2))
def test_any_text_is_accepted_or_refused_in_our_words(options: list[tuple[str, str]], env: dict[str, str]) -> None:
    argv = [f"--{name}={value}" for name, value in options]
    environ = {f"MINISGL_{k}": v for k, v in env.items()}
    try:
        load(*argv, environ=environ)
    except MiniSGLError as exc:
        assert str(exc)  # noqa: PT017
