"""What the documentation shows is true: its Python runs, its files are the files, its options exist, its tables are current."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from minisgl.testing.bytemodel import write_byte_model
from minisgl.testing.server import Server
from minisgl_cli.bench import BENCHES
from minisgl_cli.options import parse
from minisgl_cli.simulate.calibrate import calibrate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> Iterator[Any]:
    for page in PAGES:
        for i, (language, code) in enumerate(FENCE.findall(page.read_text())):
            if language in languages:
                yield pytest.param(code, id=f"{page.name}-{i}")


def kind(code: str) -> str:
    if code.startswith("# docs/"):
        return "file"
    return "client" if "127.0.0.1:30000" in code else "script"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.mark.parametrize("code", [p for p in blocks("python") if kind(p.values[0]) == "script"])
def test_python_runs(code: str, smollm2: Any) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [p for p in blocks("python") if kind(p.values[0]) == "client"])
def test_clients_get_an_answer(code: str, smollm2: Any, server: Server) -> None:
    code = code.replace("http://127.0.0.1:30000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "assert" in code or "Paris" in done.stdout


def test_curl_gets_an_answer(smollm2: Any, server: Server) -> None:
    [code] = [p.values[0] for p in blocks("bash") if p.values[0].startswith("curl")]
    done = subprocess.run(
        ["bash", "-c", code.replace("http://127.0.0.1:30000", server.url)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert '"content":"The capital of France is Paris."' in done.stdout, done.stderr


@pytest.mark.parametrize("code", [p for p in blocks("python", "toml") if kind(p.values[0]) == "file"])
def test_quoted_files_are_the_files(code: str) -> None:
    first, _, quoted = code.partition("\n")
    path = first.removeprefix("# ")
    assert (ROOT / path).is_file(), path
    text = (ROOT / path).read_text()
    for paragraph in quoted.strip().split("\n\n"):
        assert paragraph in text, f"{path} has no longer:\n{paragraph}"


def serve_commands() -> list[Any]:
    """Lines of the documentation that start a server or show settings, as arguments."""
    found = []
    for p in blocks("bash"):
        for line in p.values[0].splitlines():
            if not line.startswith(("minisgl serve", "minisgl config")) or "--scheduler=lifo" in line:
                continue
            words = shlex.split(line, comments=True)
            found.append(pytest.param([w for w in words[2:] if w not in ("show", "--diff")], id=line[:60]))
    return found


@pytest.mark.parametrize("words", serve_commands())
def test_options_in_commands_exist(words: list[str]) -> None:
    command = [sys.executable, "-m", "minisgl_cli", "config", "check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def measurements() -> list[Any]:
    """Lines that run a benchmark or generate, as arguments of ``minisgl``."""
    lines = [line for p in blocks("bash") for line in p.values[0].splitlines()]
    found = [
        line[line.index("minisgl ") :]
        for line in lines
        if re.search(r"^(nsys profile )?minisgl (bench|generate)", line)
    ]
    return [pytest.param(shlex.split(line, comments=True)[1:], id=line[8:70]) for line in found]


@pytest.mark.parametrize("words", measurements())
def test_measurements_take_their_options(words: list[str]) -> None:
    module, rest = ("minisgl_cli.generate", words[1:]) if words[0] == "generate" else (BENCHES[words[1]][0], words[2:])
    parse(rest, verb=" ".join(words[:2]), extra=import_module(module).arguments)


def simulations() -> list[Any]:
    lines = [line for p in blocks("bash") for line in p.values[0].splitlines() if line.startswith("minisgl simulate")]
    return [pytest.param(shlex.split(line, comments=True)[1:], id=line[17:60]) for line in lines]


@pytest.mark.parametrize("words", simulations())
def test_simulations_run(words: list[str], tmp_path: Path) -> None:
    """The traces and measured steps that the documentation shows are the files in its commands."""
    for p in blocks("json"):
        for name, key in (("trace.jsonl", '{"timestamp"'), ("steps.jsonl", '{"tokens"')):
            if p.values[0].startswith(key):
                (tmp_path / name).write_text(p.values[0])
    command = [sys.executable, "-m", "minisgl_cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout


def test_measured_steps_example_writes_what_calibrate_reads(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model", 256, weights=True)
    script, steps = ROOT / "docs" / "examples" / "measure_steps.py", tmp_path / "steps.jsonl"
    command = [sys.executable, str(script), str(steps), "--model", str(model), "--engine.threads", "1"]
    subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    fitted = calibrate(steps)
    assert fitted.step_s + fitted.token_s > 0


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_reference_tables_are_current() -> None:
    make = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    page = ROOT / "docs" / "reference.md"
    assert make["filled"](page.read_text()) == page.read_text(), "run: python docs/make_reference.py"


def test_pieces_example_shows_what_sharing_saves() -> None:
    script = ROOT / "docs" / "examples" / "pieces.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    naive, radix = (int(n) for n in re.findall(r"computed (\d+) of 4800", done.stdout))
    assert naive == 4800
    # The first prompt is computed whole; each later one shares the 12 full pages (192 tokens) of the common 200.
    assert radix == 240 + 19 * (240 - 192)


@pytest.mark.parametrize(
    ("example", "kind", "name"), [("lifo", "scheduler", "lifo"), ("smollm3", "model", "SmolLM3ForCausalLM")]
)
def test_example_package_installs_and_passes_its_tests(example: str, kind: str, name: str, tmp_path: Path) -> None:
    source = ROOT / "docs" / "examples" / example
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = tmp_path / "source"
    copy.mkdir()
    for file in ("pyproject.toml", f"minisgl_{example}.py", f"test_{example}.py"):
        (copy / file).write_text((source / file).read_text())
    subprocess.run([*pip, "--disable-pip-version-check", "--target", str(tmp_path / "site"), str(copy)], check=True)
    env_python = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    show = env_python + (f"from minisgl_cli.main import main\nsys.exit(main(['plugins', 'list', '--kind', {kind!r}]))")
    listed = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=False)
    assert re.search(rf"{name}\s+minisgl-{example} 0\.1\s+available", listed.stdout), listed.stdout + listed.stderr
    tests = (
        env_python
        + f"import pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(copy / f'test_{example}.py')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", tests], capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
