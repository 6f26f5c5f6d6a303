"""Models of ModelScope: ``modelscope:ORG/NAME``, through the package ``modelscope`` if it is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from minisgl.api import LocalModel, ModelError, ModelSource, SourceContext

from .checkpoint import read_checkpoint, tokenizer_folder
from .download import Tally, watched
from .hf import IGNORE, ORG_NAME, SMALL


class ModelScopeSource(ModelSource):
    def __init__(self, ctx: SourceContext) -> None:
        self._ctx = ctx

    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        if not ORG_NAME.fullmatch(ref):
            raise ModelError(f"{ref!r} is not a ModelScope id: ORG/NAME of letters, digits, '-', '_' and '.'")
        client = _client()
        at = f"{ref!r}" + (f" at {revision!r}" if revision else "")
        found = watched(
            lambda tally: self._download(client, ref, revision, weights, tally),
            f"downloading {ref} from ModelScope",
            self._ctx.progress,
        )
        if isinstance(found, Exception):
            raise ModelError(self._unreachable(at, ref, found)) from found
        path = Path(found)
        if not (path / "config.json").is_file():
            raise ModelError(f"ModelScope model {at} has no config.json; is it in the transformers layout? (in {path})")
        tokenizer = tokenizer_folder(path, self._ctx.cache_dir, self._ctx.progress)
        return read_checkpoint(path, ref, ref, weights, tokenizer_dir=tokenizer, revision=revision)

    def _download(self, client: Any, ref: str, revision: str | None, weights: bool, tally: Tally) -> str:
        hub = self._ctx.hub_dir
        return str(
            client.snapshot_download(
                ref,
                revision=revision,
                cache_dir=str(hub) if hub is not None else None,
                local_files_only=self._ctx.offline,
                allow_patterns=[*SMALL, *(("*.safetensors",) if weights else ())],
                ignore_patterns=list(IGNORE),
                progress_callbacks=[_counter(tally)],
            )
        )

    def _unreachable(self, at: str, ref: str, e: Exception) -> str:
        where = self._ctx.hub_dir or "the ModelScope client's cache"
        why = "model.offline is set" if self._ctx.offline else (str(e).strip().splitlines() or [type(e).__name__])[0]
        return (
            f"ModelScope model {at} is not in {where} and could not be downloaded: {why}. Where there is a network, run: "
            f"modelscope download {ref} --local_dir FOLDER -- and give the folder as model.path"
        )


def _client() -> Any:
    try:
        return import_module("modelscope.hub.snapshot_download")
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "modelscope":
            raise ModelError(f"package 'modelscope' cannot be imported: {e}") from e
        raise ModelError(
            "model source 'modelscope' needs package 'modelscope': pip install 'minisgl[modelscope]'"
        ) from e


def _counter(tally: Tally) -> type:
    """A ``ProgressCallback``, of which the client makes one for each file."""
    base: Any = import_module("modelscope.hub.callback").ProgressCallback

    class Counter(base):  # type: ignore[misc]
        def __init__(self, filename: str, file_size: int) -> None:
            super().__init__(filename, file_size)
            tally.expect(file_size)

        def update(self, size: int) -> None:
            tally.add(size)

    return Counter
