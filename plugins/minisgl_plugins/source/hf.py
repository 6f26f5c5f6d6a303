"""Models of the Hugging Face Hub: ``hf:ORG/NAME``, or the id itself."""

from __future__ import annotations

import re
from pathlib import Path

from minisgl.api import LocalModel, ModelError, ModelSource, SourceContext

from .checkpoint import read_checkpoint, tokenizer_folder
from .download import bar_class, watched

SMALL = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "additional_chat_templates/*")
IGNORE = ("original/*", "consolidated*", "onnx/*")  # other copies of the weights (fault M18)
ORG_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubSource(ModelSource):
    def __init__(self, ctx: SourceContext) -> None:
        self._ctx = ctx

    def resolve(self, ref: str, revision: str | None, weights: bool) -> LocalModel:
        if not _ID.fullmatch(ref):
            raise ModelError(f"{ref!r} is not a hub id: ORG/NAME of letters, digits, '-', '_' and '.'")
        path = self._snapshot(ref, revision, weights)
        if not (path / "config.json").is_file():
            raise ModelError(
                f"hub model {ref!r} has no config.json; is it a model in the transformers layout? (in {path})"
            )
        tokenizer = tokenizer_folder(path, self._ctx.cache_dir, self._ctx.progress)
        return read_checkpoint(path, ref, ref, weights, tokenizer_dir=tokenizer, revision=revision or path.name)

    def _snapshot(self, ref: str, revision: str | None, weights: bool) -> Path:
        """The local folder of a snapshot, downloaded as needed. That all weight files are in it, is checked when they are
        listed: without a network the client also gives what an interrupted download left."""
        from huggingface_hub import snapshot_download

        found = watched(
            lambda tally: snapshot_download(
                ref,
                revision=revision,
                cache_dir=self._ctx.hub_dir,
                allow_patterns=[*SMALL, *(("*.safetensors",) if weights else ())],
                ignore_patterns=list(IGNORE),
                local_files_only=self._ctx.offline,
                tqdm_class=bar_class(tally),
            ),
            f"downloading {ref} from the hub",
            self._ctx.progress,
        )
        if isinstance(found, Exception):
            raise ModelError(self._refusal(ref, revision, found)) from found
        return Path(found)

    def _refusal(self, ref: str, revision: str | None, e: Exception) -> str:
        from huggingface_hub import errors

        at = f"{ref!r}" + (f" at {revision!r}" if revision else "")
        if isinstance(e, errors.GatedRepoError):
            return f"hub model {at} needs permission: accept its terms at https://huggingface.co/{ref}, then run: hf auth login"
        if isinstance(e, errors.RepositoryNotFoundError):
            return (
                f"the hub has no model {at} (or it is private: run: hf auth login), and there is no folder {ref!r} here "
                f"({Path.cwd()}) with a config.json"
            )
        if isinstance(e, errors.RevisionNotFoundError):
            return f"hub model {ref!r} has no revision {revision!r}; give a branch, a tag or a commit"
        return self._unreachable(at, ref, e)

    def _unreachable(self, at: str, ref: str, e: Exception) -> str:
        where = self._ctx.hub_dir or "the hub client's cache"
        why = "model.offline is set" if self._ctx.offline else (str(e).strip().splitlines() or [type(e).__name__])[0]
        return (
            f"hub model {at} is not in {where} and could not be downloaded: {why}. Where there is a network, run: "
            f"hf download {ref} --local-dir FOLDER -- and give the folder as model.path"
        )
