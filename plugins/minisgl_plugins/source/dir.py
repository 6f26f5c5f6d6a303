"""Models in a folder: ``dir:PATH``, or the path itself."""

from __future__ import annotations

from pathlib import Path

from minisgl.api import LocalModel, ModelError, ModelSource, SourceContext

from .checkpoint import read_checkpoint, tokenizer_folder


class DirSource(ModelSource):
    def __init__(self, ctx: SourceContext) -> None:
        self._ctx = ctx

    @classmethod
    def claims(cls, ref: str) -> bool:
        """What is written as a path, and what is a folder with a model in it. ORG/NAME alone is neither (fault N6)."""
        if ref.endswith(".gguf"):
            return False
        return ref.startswith(("/", "./", "../", "~")) or ref in (".", "..") or (Path(ref) / "config.json").is_file()

    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        if revision is not None:
            raise ModelError(f"model.revision = {revision!r} means nothing for the folder {ref}; it is for hub models")
        path = Path(ref).expanduser()
        if not path.is_dir():
            raise ModelError(f"model folder {ref!r} {'is a file' if path.exists() else 'does not exist'}.{_near(path)}")
        path = path.resolve()
        if not (path / "config.json").is_file():
            return read_checkpoint(path, ref, path.name, weights)  # says what is missing
        tokenizer = tokenizer_folder(path, self._ctx.cache_dir, self._ctx.progress)
        return read_checkpoint(path, ref, path.name, weights, tokenizer_dir=tokenizer)


def _near(path: Path) -> str:
    """The deepest folder that exists and what is in it: a typo shows."""
    parent = next(p for p in path.absolute().parents if p.is_dir())
    names = sorted(p.name for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))[:8]
    return f" In {parent} there is: {', '.join(names) or 'no folder'}"
