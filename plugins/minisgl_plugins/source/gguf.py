"""Models in one GGUF file: ``gguf:FILE``, or the path of a ``*.gguf`` file. Converted once into the cache."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from minisgl.api import LocalModel, ModelError, ModelSource, SourceContext

from .artifacts import build_once, convert
from .checkpoint import read_checkpoint

VERSION = 2  # of the conversion: a change of what it writes makes new folders
EDGE = 1 << 20


class GGUFSource(ModelSource):
    def __init__(self, ctx: SourceContext) -> None:
        self._ctx = ctx

    @classmethod
    def claims(cls, ref: str) -> bool:
        return ref.endswith(".gguf") and not ref.startswith(("http://", "https://"))

    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        if revision is not None:
            raise ModelError(f"model.revision = {revision!r} means nothing for the file {ref}; it is for hub models")
        path = Path(ref).expanduser()
        if not path.is_file():
            raise ModelError(f"GGUF file {ref!r} {'is a folder' if path.exists() else 'does not exist'}")
        folder = converted(path.resolve(), file_key(path), self._ctx)
        return read_checkpoint(folder, ref, path.stem, weights)


def file_key(path: Path) -> str:
    """What a file is known by without reading gigabytes at each start: its size, its time of change, and a hash of its first
    and last MiB (the first has the metadata and the tokenizer)."""
    stat = path.stat()
    digest = sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode())
    with open(path, "rb") as file:
        digest.update(file.read(EDGE))
        file.seek(max(0, stat.st_size - EDGE))
        digest.update(file.read(EDGE))
    return digest.hexdigest()


def folder_of(key: str, ctx: SourceContext) -> Path:
    """Where the conversion of the file with this key is, or will be."""
    return ctx.cache_dir / "gguf" / f"{key[:32]}-v{VERSION}-{_written(ctx)}"


def converted(path: Path, key: str, ctx: SourceContext) -> Path:
    """The checkpoint folder of a GGUF file, made on first use. Raises: ModelError."""
    what = f"converting {path.name}"
    return build_once(folder_of(key, ctx), lambda new: convert("gguf", path, new, what, ctx.progress, _written(ctx)))


def _written(ctx: SourceContext) -> str:
    """What quantized weights become. With auto all bits are kept: the device, and so what it works in, is not known here."""
    return "float32" if ctx.dtype == "auto" else ctx.dtype
