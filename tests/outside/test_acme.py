"""A package outside minisgl brings a model, an attention backend, a cache policy, a scheduler and a frontend.

It is built and installed offline from its own pyproject.toml into a temporary folder, once with entry points and once with
hooks, and serves the same answers by either door. Another package, a broken one, lies beside it all the time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.testing import contract
from minisgl.testing.bytemodel import BYTE, VOCAB, byte_ids, write_byte_model
from minisgl.testing.server import Server

HERE = Path(__file__).parent
sys.path.append(str(HERE / "acme"))  # the source, for the contracts; the rest of this file uses what is installed

from acme_minisgl.cache import LFUCachePolicy  # noqa: E402
from acme_minisgl.scheduler import ShortestFirstScheduler  # noqa: E402

TestCache = contract("cache", LFUCachePolicy)
TestCacheThatForgets = contract("cache", LFUCachePolicy, {"most_uses": 1})
TestScheduler = contract("scheduler", ShortestFirstScheduler)
TestImpatientScheduler = contract("scheduler", ShortestFirstScheduler, {"patience": 1})

PICKS = {"model": "AcmeForCausalLM", "attention": "acme", "cache": "acme", "scheduler": "acme", "frontend": "acme"}
DOORS = {"entry points": [], "hooks": ["--plugin", "acme"]}  # and the options that each needs
Sites = dict[str, Path]


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """A folder per door with the two packages installed by pip, without network and without touching the environment."""
    made = {}
    for door, pyproject in {"entry points": "pyproject.toml", "hooks": "pyproject.hooks.toml"}.items():
        source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
        shutil.copytree(HERE / "acme", source / "acme")
        shutil.copytree(HERE / "broken", source / "broken")
        shutil.copy(HERE / "acme" / pyproject, source / "acme" / "pyproject.toml")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        packages = [str(source / "acme"), str(source / "broken")]
        subprocess.run([*pip, "--disable-pip-version-check", "--target", str(site), *packages], check=True)
        made[door] = site
    return made


def minisgl(site: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "minisgl_cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


# ---------------------------------------------------------------------------------------------------------- both doors
def test_entry_points_are_listed_without_an_import(sites: Sites) -> None:
    listed = json.loads(minisgl(sites["entry points"], "plugins", "list", "--json").stdout)["plugins"]
    found = {p["kind"]: p["name"] for p in listed if p["package"] == "acme-minisgl 0.3"}
    assert found == PICKS


def test_what_hooks_add_is_listed_once_they_are_enabled(sites: Sites) -> None:
    def acme(*argv: str) -> dict[str, str]:
        listed = json.loads(minisgl(sites["hooks"], "plugins", "list", "--json", *argv).stdout)["plugins"]
        return {p["kind"]: p["name"] for p in listed if p["package"] == "acme-minisgl 0.3"}

    assert acme() == {"hooks": "acme"}
    assert acme("--load", "--plugin", "acme") == {**PICKS, "hooks": "acme"}


@pytest.mark.parametrize("kind", PICKS)
def test_plugins_info_is_the_same_for_both_doors(sites: Sites, kind: str) -> None:
    told = []
    for door, options in DOORS.items():
        done = minisgl(sites[door], "plugins", "info", f"{kind}.{PICKS[kind]}", "--json", *options)
        assert done.returncode == 0, done.stderr
        info = json.loads(done.stdout)
        assert info.pop("door") == ("entry point" if door == "entry points" else "hook of acme")
        assert info.pop("file").startswith(str(sites[door]))
        del info["seconds"]
        told.append(info)
    assert told[0] == told[1]
    assert (told[0]["dist"], told[0]["version"]) == ("acme-minisgl", "0.3")


LOCK = """
import json, sys
from minisgl.config.load import load_settings
loaded = load_settings(environ={}, plugins=sys.argv[2:])
lock = loaded.registry.lock([tuple(pick) for pick in json.loads(sys.argv[1])])
print(json.dumps([lock.fingerprint, lock.entries]))
assert "torch" not in sys.modules
"""


def test_the_lock_is_the_same_for_both_doors(sites: Sites) -> None:
    locks = []
    for door, options in DOORS.items():
        command = [sys.executable, "-c", LOCK, json.dumps(list(PICKS.items())), *options[1:]]
        env = {**os.environ, "PYTHONPATH": str(sites[door])}
        out = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
        locks.append(json.loads(out))
    assert locks[0] == locks[1]
    assert [e[3:] for e in locks[0][1]] == [["acme-minisgl", "0.3"]] * 5


# ---------------------------------------------------------------------------------------------------------- serving
PROMPTS = ("The quick brown fox", "The quick brown fox jumps over the lazy dog. " * 3, "x")
N_NEW = 16


@pytest.fixture(scope="session")
def granite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A small random Granite under the name AcmeForCausalLM, and its greedy continuations by transformers."""
    import torch
    from transformers import GraniteConfig, GraniteForCausalLM

    folder = write_byte_model(tmp_path_factory.mktemp("granite"), max_len=512)
    torch.manual_seed(5)
    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
        embedding_multiplier=1.5, residual_multiplier=0.6, logits_scaling=3.0, attention_multiplier=16**-0.5,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = GraniteForCausalLM(config).eval()
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "architectures": ["AcmeForCausalLM"]}))
    expected = {}
    for prompt in PROMPTS:
        with torch.no_grad():
            out = model.generate(torch.tensor([byte_ids(prompt)]), do_sample=False, max_new_tokens=N_NEW)
        new = [t for t in out[0, len(byte_ids(prompt)) :].tolist() if t >= BYTE]
        expected[prompt] = bytes(t - BYTE for t in new).decode(errors="replace")
    return folder, expected


@pytest.fixture(scope="module", params=DOORS)
def server(request: pytest.FixtureRequest, sites: Sites, granite: tuple[Path, Any]) -> Iterator[Server]:
    picks = [f"--{kind}={name}" for kind, name in PICKS.items() if kind not in ("model", "frontend")]
    options = ["--frontend=openai,acme", "--limits.batch-tokens=48", "--page-size=4", *DOORS[request.param]]
    env = {"PYTHONPATH": str(sites[request.param])}
    with Server("--model", str(granite[0]), *picks, *options, env=env) as s:
        yield s


def test_all_five_kinds_serve_together(server: Server, granite: tuple[Path, dict[str, str]]) -> None:
    """Greedy text equals that of transformers, also for prompts longer than a step, and for cached ones."""
    for _ in range(2):
        for prompt, expected in granite[1].items():
            assert server.post("/acme", {"prompt": prompt}) == (200, {"text": expected})
    body = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": N_NEW}
    status, answer = server.post("/v1/completions", {**body, "model": granite[0].name})
    assert (status, answer["choices"][0]["text"]) == (200, granite[1][PROMPTS[1]])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_frontend_says_what_was_picked(server: Server) -> None:
    status, answer = server.get("/acme")
    assert status == 200
    assert answer["picks"]["model"] == "AcmeForCausalLM"
    assert answer["picks"]["attention"] == "acme"


def test_the_frontend_refuses_in_the_common_envelope(server: Server) -> None:
    status, answer = server.post("/acme", {"prompt": 3})
    assert (status, answer["error"]["param"]) == (400, "prompt")


# ---------------------------------------------------------------------------------------------------------- the broken one
def test_a_broken_plugin_is_named_with_package_and_reason(sites: Sites, granite: tuple[Path, Any]) -> None:
    """The server does not start with it, says why, and falls back to nothing."""
    done = minisgl(sites["entry points"], "serve", "--port", "0", "--model", str(granite[0]), "--attention", "broken")
    assert done.returncode == 78
    for part in (
        "attention 'broken' could not be loaded.",
        "from: broken-minisgl 1.2 (broken_minisgl:BrokenAttention)",
        "why:  ModuleNotFoundError: No module named 'a_library_that_is_not_installed'",
        "broken_minisgl.py:3",
        "Available attention plugins:",
    ):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_that_lacks_a_method_is_refused_before_weights_are_read(
    sites: Sites, granite: tuple[Path, Any]
) -> None:
    done = minisgl(sites["entry points"], "serve", "--port", "0", "--model", str(granite[0]), "--cache", "half")
    assert done.returncode == 78
    assert "cache 'half' lacks match(tokens, namespace), which plugin API 1 requires" in done.stderr
    assert "from: broken-minisgl 1.2" in done.stderr


def test_a_broken_hook_plugin_is_an_error_only_where_it_is_enabled(sites: Sites) -> None:
    site = sites["entry points"]
    assert minisgl(site, "config", "check").returncode == 0
    done = minisgl(site, "config", "check", "--plugin", "broken")
    assert done.returncode == 78
    assert "from: broken-minisgl 1.2 (broken_minisgl)" in done.stderr


def test_a_broken_verb_harms_no_other(sites: Sites) -> None:
    site = sites["entry points"]
    assert "broken" in minisgl(site, "--help").stdout
    assert minisgl(site, "version").returncode == 0
    done = minisgl(site, "broken")
    assert done.returncode == 78
    assert "command 'broken' could not be loaded.\n  from: broken-minisgl 1.2" in done.stderr


def test_plugins_check_tells_the_broken_from_the_good(sites: Sites) -> None:
    done = minisgl(sites["entry points"], "plugins", "check", "broken-minisgl")
    assert done.returncode == 78
    assert done.stdout.count("FAILED") == 4
    assert minisgl(sites["entry points"], "plugins", "check", "acme-minisgl").returncode == 0
