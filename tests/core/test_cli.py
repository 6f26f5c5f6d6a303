"""The command line: dispatch, help, errors and exit codes, verbs of plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.errors import ConfigError, Fault
from minisgl_cli import main as cli
from minisgl_cli.main import VERBS, main
from minisgl_cli.options import parse

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("MINISGL_", "XDG_"))]:
        monkeypatch.delenv(name)


def fresh(*argv: str, path: Path | None = None, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command in an interpreter of its own; afterwards ``code`` is run."""
    program = f"import sys; from minisgl_cli.main import main; rc = main(sys.argv[1:]); {code or 'sys.exit(rc)'}"
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    return subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, env=env, check=False)


# ---------------------------------------------------------------------------------------------------------- cheapness
@pytest.mark.parametrize(
    "argv", [["--help"], [], ["plugins", "list"], ["plugins", "list", "--json"], ["plugins"], ["version"]]
)
def test_listing_imports_neither_torch_nor_pydantic(argv: list[str]) -> None:
    code = "heavy = {'torch', 'pydantic', 'numpy', 'minisgl_plugins'} & set(sys.modules); sys.exit(str(heavy) if heavy else rc)"
    done = fresh(*argv, code=code)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------------- dispatch
def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)


def test_an_unknown_verb_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 78
    err = capsys.readouterr().err
    assert err.startswith("error: there is no verb 'serv'. Did you mean 'serve'?")
    assert "Traceback" not in err


def test_python_dash_m_runs_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "minisgl_cli", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("minisgl 0.1.0\nPython 3.")


@pytest.mark.parametrize(
    ("raised", "code", "err"),
    [
        (ConfigError("config: no"), 78, "config: no\n"),
        (ConfigError("no"), 78, "error: no\n"),
        (Fault("engine gone"), 70, "error: engine gone\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, err: str
) -> None:
    def fail(args: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "dispatch", fail)
    assert main([]) == code
    assert capsys.readouterr().err == err


def test_other_systems_than_linux_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.sys, "platform", "darwin")
    assert main(["--help"]) == 78
    assert capsys.readouterr().err == "error: minisgl runs on Linux; this is darwin\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    shell = f"{sys.executable} -m minisgl_cli plugins list --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------- verbs of plugins
HELLO = """
from minisgl.api import Command
class Hello(Command):
    help = "say hello"
    def arguments(self, parser):
        parser.add_argument("name")
    def run(self, args):
        print("hello", args.name, "radix" in self.ctx.registry.names("cache"))
        return 3
"""


def test_a_verb_of_a_plugin_is_listed_and_imported_when_called(
    make_dist: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-llm", "0.3", {"command": {"hello": "acme_cli:Hello"}}, {"acme_cli": HELLO})
    assert main(["--help"]) == 0
    assert "  hello     from acme-llm 0.3" in capsys.readouterr().out
    assert "acme_cli" not in sys.modules
    assert main(["hello", "you"]) == 3
    assert capsys.readouterr().out == "hello you True\n"


def test_a_broken_verb_shows_its_own_error_and_harms_no_other(
    make_dist: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-llm", "0.3", {"command": {"hello": "acme_cli:Hello"}}, {"acme_cli": "import no_such_module_x"})
    assert main(["--help"]) == 0
    assert main(["version"]) == 0
    capsys.readouterr()
    assert main(["hello"]) == 78
    err = capsys.readouterr().err
    assert err.startswith("error: command 'hello' could not be loaded.\n  from: acme-llm 0.3 (acme_cli:Hello)")
    assert "Traceback" not in err


def test_built_in_verbs_cannot_be_replaced(make_dist: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """X3: two packages want one console command."""
    make_dist("acme-llm", "0.3", {"command": {"version": "acme_cli:Hello"}}, {"acme_cli": HELLO})
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("minisgl ")


def test_a_verb_that_two_packages_offer_is_refused_by_name(make_dist: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """X3, between two plugins."""
    make_dist("acme-llm", "0.3", {"command": {"hello": "acme_cli:Hello"}}, {"acme_cli": HELLO})
    make_dist("other", "1", {"command": {"hello": "other_cli:Hello"}})
    assert main(["hello"]) == 78
    assert "is offered by more than one package" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- options
def verb_arguments(p: ArgumentParser) -> None:
    p.add_argument("prompt")
    p.add_argument("--seed", type=int)


def test_settings_and_the_verbs_own_arguments_mix_in_any_order() -> None:
    argv = ["--cache", "naive", "hello", "--seed", "3", "--kv.page-size=8", "--server.access-log"]
    loaded, registry, hooks, args = parse(argv, verb="x", extra=verb_arguments)
    assert (args.prompt, args.seed) == ("hello", 3)
    assert loaded.settings.use("cache") == ("naive",)
    assert loaded.settings.kv.page_size == 8
    assert loaded.settings.server.access_log
    assert registry is loaded.registry
    assert hooks is loaded.hooks


def test_a_prompt_after_two_dashes_is_no_option() -> None:
    loaded, *_, args = parse(["--seed", "1", "--", "--cache"], verb="x", extra=verb_arguments)
    assert args.prompt == "--cache"
    assert loaded.settings.use("cache") == ("radix",)


@pytest.mark.parametrize(
    ("option", "near"), [("--prot", "--port"), ("--sead", "--seed"), ("--cach", "--cache"), ("--plugins", "--plugin")]
)
def test_unknown_options_get_the_nearest(option: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"config: unknown option {option}; did you mean {near}\\?"):
        parse(["hi", option, "3"], verb="x", extra=verb_arguments)


def test_config_files_and_plugins_may_be_repeated(make_dist: Any) -> None:
    Path("a.toml").write_text("[kv]\npage_size = 8\n[server]\nport = 1")
    Path("b.toml").write_text("[kv]\npage_size = 32")
    source = "from minisgl.api.hookspec import hookimpl\n@hookimpl\ndef register_cache_policies(add): add('{0}', 'm:C')"
    make_dist("acme", "1", modules={"acme_a": source.format("aa"), "acme_b": source.format("bb")})
    argv = ["--config", "a.toml", "--config=b.toml", "--plugin", "acme_a", "--plugin=acme_b", "--cache", "bb"]
    loaded, registry, _, _ = parse(argv, verb="x")
    assert (loaded.settings.kv.page_size, loaded.settings.server.port) == (32, 1)
    assert {"aa", "bb"} <= set(registry.names("cache"))
    assert loaded.settings.plugins.enable == ("acme_a", "acme_b")
    assert loaded.origin(("plugins", "enable")) == "--plugin"


def test_a_plugin_module_of_the_current_folder_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "from minisgl.api.hookspec import hookimpl\n@hookimpl\ndef register_cache_policies(add): add('here', 'm:C')"
    )
    Path("plugin_of_this_folder.py").write_text(source)
    console_script = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; from minisgl_cli.main import main; sys.exit(main())"
    )
    argv = ["config", "check", "--plugin", "plugin_of_this_folder", "--cache", "here"]
    subprocess.run([sys.executable, "-c", console_script, *argv], check=True, capture_output=True)


def test_help_shows_own_arguments_then_settings_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"], verb="x", extra=verb_arguments)
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert (
        out.index("--seed") < out.index("[server]") < out.index("--port") < out.index("[kv]") < out.index("--page-size")
    )
    assert "tokens per KV page [16]" in out
    assert "cache policies: naive, radix [radix]" in out
    assert "auto | float32 | float16 | bfloat16 [auto]" in out
    assert "--observer.log.every-s" not in out


def test_help_all_shows_options_of_plugins_and_survives_broken_ones(
    make_dist: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-llm", "0.3", {"cache": {"bad": "acme_bad:X"}}, {"acme_bad": "1/0"})
    with pytest.raises(SystemExit):
        parse(["--help-all"], verb="x")
    out = capsys.readouterr().out
    assert "--observer.log.every-s" in out
    assert "[cache.bad]  cannot be loaded: cache 'bad' could not be loaded." in out


# ---------------------------------------------------------------------------------------------------------- config
def test_config_show_has_values_origins_and_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_SERVER__HOST", "0.0.0.0")
    Path("m.toml").write_text("[server]\nport = 1")
    assert main(["config", "show", "--config", "m.toml", "--port", "8000", "--api-key", "hunter2"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["server.host"] == ["server.host", "=", "'0.0.0.0'", "MINISGL_SERVER__HOST"]
    assert lines["server.port"] == ["server.port", "=", "8000", "--port", "(hides", "m.toml:2)"]
    assert lines["server.api_key"] == ["server.api_key", "=", "'***'", "--api-key"]
    assert lines["kv.page_size"] == ["kv.page_size", "=", "16", "default"]
    assert lines["observer.log.every_s"][-1] == "default"


def test_config_show_diff_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--diff", "--port", "8000"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"path": "server.port", "value": 8000, "origin": "--port", "hides": []}
    ]


def test_config_check_exits_0_or_78(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert main(["config", "check", "--port", "x"]) == 78
    assert "config: server.port = 'x' is not valid" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- plugins
def test_plugins_list_says_what_is_unusable_and_what_conflicts(
    make_dist: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("old", "0.1", {"minisgl.v0.cache": {"old": "o:C"}, "minisgl.v1.cash": {"x": "m:X"}})
    make_dist("a", "1", {"cache": {"lfu": "a:C"}})
    make_dist("b", "1", {"cache": {"lfu": "b:C"}})
    assert main(["plugins", "list", "--kind", "cache"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split(maxsplit=4) for line in out.splitlines()]
    assert ["cache", "radix", "minisgl", "0.1.0", "available"] in rows
    assert ["cache", "old", "old", "0.1", "unusable: written for plugin API v0; this minisgl has v1"] in rows
    assert [r[4].startswith("conflict: ") for r in rows if r[1] == "lfu"] == [True, True]
    assert "minisgl.v1.cash in old: no such kind; did you mean 'cache'?" in err


def test_plugins_list_load_shows_what_hooks_add_and_what_is_selected(
    make_dist: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from minisgl.api.hookspec import hookimpl\n@hookimpl\ndef register_cache_policies(add): add('zz', 'm:C')"
    make_dist("acme", "1", {"hooks": {"acme": "acme_h"}}, {"acme_h": source})
    assert main(["plugins", "list", "--json"]) == 0
    assert "zz" not in [p["name"] for p in json.loads(capsys.readouterr().out)["plugins"]]
    assert main(["plugins", "list", "--json", "--load", "--plugin", "acme", "--cache", "zz"]) == 0
    status = {(p["kind"], p["name"]): p["status"] for p in json.loads(capsys.readouterr().out)["plugins"]}
    assert status["cache", "zz"] == status["hooks", "acme"] == "selected"
    assert status["cache", "radix"] == "available"


def test_safe_mode_hides_outside_packages(
    make_dist: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dist("acme", "1", {"cache": {"lfu": "acme:C"}})
    monkeypatch.setenv("MINISGL_PLUGINS__SCAN", "bundled")
    assert main(["plugins", "list"]) == 0
    assert "acme" not in capsys.readouterr().out


CACHE = """
from pydantic import Field
from minisgl.api import PluginSettings
from minisgl_plugins.cache.naive import NaiveCachePolicy
print("noise on standard output")
class LFU(NaiveCachePolicy):
    \"\"\"Least frequently used.

    More.\"\"\"
    class Settings(PluginSettings):
        decay: float = Field(0.9, description="of the counts")
"""


def test_plugins_info_shows_options_in_every_spelling(make_dist: Any) -> None:
    site = make_dist("acme", "1", {"cache": {"lfu": "acme_cache:LFU"}}, {"acme_cache": CACHE})
    done = fresh("plugins", "info", "cache.lfu", path=site)
    assert done.returncode == 0, done.stderr
    for part in (
        "cache 'lfu'\n  Least frequently used.\n",
        "acme 1",
        f"{site}/acme_cache.py",
        "entry point",
        "[cache.lfu] decay: float (default 0.9)",
        "of the counts",
        "--cache.lfu.decay   MINISGL_CACHE__LFU__DECAY",
    ):
        assert part in done.stdout
    told = json.loads(fresh("plugins", "info", "cache.lfu", "--json", path=site).stdout)
    assert (told["dist"], told["version"], told["class"]) == ("acme", "1", "acme_cache:LFU")


def test_plugins_info_of_a_broken_plugin_is_its_error(make_dist: Any) -> None:
    site = make_dist("acme", "1", {"cache": {"bad": "acme_bad:X"}}, {"acme_bad": "import os; os._exit(9)"})
    done = fresh("plugins", "info", "cache.bad", path=site)
    assert done.returncode == 9
    assert done.stderr == "error: cache.bad ended the process that imported it, with exit code 9\n"
    done = fresh("plugins", "info", "cache.radx", path=site)
    assert done.returncode == 78
    assert "Did you mean 'radix'?" in done.stderr


def test_plugins_check_imports_each_in_its_own_process(make_dist: Any) -> None:
    site = make_dist(
        "acme", "1", {"cache": {"bad": "acme_bad:X", "lfu": "acme_cache:LFU"}, "cash": {"x": "y:Z"}},
        {"acme_bad": "import no_such_module_x", "acme_cache": CACHE},
    )  # fmt: skip
    done = fresh("plugins", "check", "acme", path=site)
    assert done.returncode == 78
    assert "cache.bad (acme 1): FAILED\n    error: cache 'bad' could not be loaded." in done.stdout
    assert "cache.lfu (acme 1): ok, imported in " in done.stdout
    assert fresh("plugins", "check", "cache.lfu", path=site).returncode == 0
    assert "no plugin and no package" in fresh("plugins", "check", "nope", path=site).stderr
