from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.errors import ModelError
from minisgl.base.types import LocalModel

Resolve = Callable[..., LocalModel]


def snapshot(cache: Path, files: dict[str, str], commit: str = "c" * 40) -> Path:
    """What the hub's client leaves of a download: huggingface_hub's cache layout."""
    root = cache / "hub" / "models--acme--tiny"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


FILES = {"config.json": "{}", "model.safetensors": "", "tokenizer.json": "{}"}


def test_downloaded_model_is_used_offline(resolve: Resolve, tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "cache", FILES)
    for ref in ("acme/tiny", "hf:acme/tiny"):
        model = resolve(ref, offline=True)
        assert (model.name, model.path, model.revision) == ("acme/tiny", folder, "c" * 40)
        assert [f.name for f in model.weights] == ["model.safetensors"]
        assert model.tokenizer_dir == folder


def test_partial_download_is_not_used(resolve: Resolve, tmp_path: Path) -> None:
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    )
    snapshot(
        tmp_path / "cache",
        {"config.json": "{}", "model.safetensors.index.json": index, "model-00001-of-00002.safetensors": ""},
    )
    with pytest.raises(ModelError, match="lacks 1 of 2 weight files"):
        resolve("acme/tiny", offline=True)
    assert resolve("acme/tiny", offline=True, weights=False).weights == ()


def test_offline_and_not_there_says_what_to_do(resolve: Resolve, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"'acme/tiny' is not in .*hub and could not be downloaded: model\.offline is set"
    ) as e:
        resolve("acme/tiny", offline=True)
    assert "hf download acme/tiny --local-dir FOLDER" in str(e.value)


def test_n6_hub_id_without_a_network_is_an_error_not_a_folder(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the same name, without a model in it, changes nothing."""
    import httpx
    import huggingface_hub

    def no_network(*args: Any, **kw: Any) -> None:
        raise httpx.ConnectError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"could not be downloaded: .*name resolution"):
        resolve("Qwen/Qwen3-0.6B")


def test_hub_refusals_are_told_apart(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    class Answer:
        headers: dict[str, str] = {}
        request = None
        status_code = 404

    for error, words in [
        (errors.GatedRepoError, "needs permission"),
        (errors.RepositoryNotFoundError, "the hub has no model 'acme/tiny'.*no folder 'acme/tiny' here"),
        (errors.RevisionNotFoundError, "has no revision 'v9'"),
    ]:

        def refuse(*args: Any, error: Any = error, **kw: Any) -> None:
            raise error("refused", response=Answer())

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ModelError, match=words):
            resolve("acme/tiny", revision="v9")


def test_m18_only_one_copy_of_the_weights_is_downloaded(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    every = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "README.md",
        "model.safetensors.index.json", "model-00001-of-00001.safetensors", "consolidated.safetensors",
        "original/consolidated.00.pth", "pytorch_model.bin", "onnx/model.onnx",
    ]  # fmt: skip
    asked: dict[str, Any] = {}
    folder = snapshot(tmp_path / "cache", FILES)

    def download(repo: str, **kw: Any) -> str:
        asked.update(kw)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("acme/tiny", revision="v1")

    def wanted() -> list[str]:
        kw = {k: asked[k] for k in ("allow_patterns", "ignore_patterns")}
        return sorted(filter_repo_objects(every, **kw))

    assert wanted() == sorted(every[:5] + every[6:8])
    assert (asked["revision"], asked["cache_dir"]) == ("v1", tmp_path / "cache" / "hub")
    resolve("acme/tiny", weights=False)
    assert "model-00001-of-00001.safetensors" not in wanted()


def test_ids_that_cannot_be_are_refused(resolve: Resolve) -> None:
    with pytest.raises(ModelError, match="is not a hub id"):
        resolve("hf:a/b/c")
