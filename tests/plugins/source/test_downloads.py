"""Downloads through a hub's client: progress, a hang that is seen, an end at once, and what was cut off."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.base.errors import ModelError
from minisgl.config.schema import ModelSettings, Settings
from minisgl.plugin.registry import Registry
from minisgl.text.resolve import resolve_model
from minisgl_plugins.source import download

Told = list[tuple[str, int, int]]
FAKE_CLIENT = '''
"""A stand-in for ModelScope's client, with the arguments and the progress callback of modelscope 1.40."""
from pathlib import Path
CALLS = []
def snapshot_download(model_id=None, revision=None, cache_dir=None, user_agent=None, local_files_only=False, cookies=None,
                      ignore_file_pattern=None, allow_file_pattern=None, local_dir=None, allow_patterns=None,
                      ignore_patterns=None, max_workers=None, repo_id=None, repo_type=None, progress_callbacks=None,
                      token=None, endpoint=None):
    CALLS.append(dict(model_id=model_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only,
                      allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    folder = Path(cache_dir) / model_id
    if not folder.is_dir():
        if local_files_only:
            raise ValueError("Cannot find the requested files in the cached path")
        raise ConnectionError("no route to host")
    for callback in progress_callbacks:
        one = callback("model.safetensors", 7)
        one.update(3)
        one.update(4)
        one.end()
    return str(folder)
'''


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def resolve(tmp_path: Path, told: Told) -> Callable[..., Any]:
    def run(ref: str, progress: Any = None, **model: Any) -> Any:
        settings = Settings(model=ModelSettings(path=ref, cache_dir=tmp_path / "cache", **model))
        return resolve_model(
            settings, Registry.scan(bundled_only=True), progress=progress or (lambda *p: told.append(p))
        )

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Put a function in the place of the Hugging Face client's download."""
    import huggingface_hub

    monkeypatch.setattr(download, "POLL_S", 0.001)
    return lambda function: monkeypatch.setattr(huggingface_hub, "snapshot_download", function)


def checkpoint(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ({"config.json": "{}", "model.safetensors": "", "tokenizer.json": "{}"} | files).items():
        (folder / name).write_text(text)
    return folder


# ------------------------------------------------------------------------------------------------ the hub's client


def test_bytes_of_the_client_are_told(resolve: Any, hub: Any, told: Told, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "got")
    seen = threading.Event()

    def client(repo: str, *, tqdm_class: Any, **kw: Any) -> str:
        with tqdm_class(total=2, desc="Fetching 2 files", unit="it") as files, tqdm_class(total=0, unit="B") as bar:
            bar.total = 100
            bar.update(40)
            files.update(1)
            assert seen.wait(30)
            bar.update(60)
        return str(folder)

    def progress(*p: Any) -> None:
        told.append(p)
        if p[1:] == (40, 100):
            seen.set()

    hub(client)
    resolve("acme/tiny", progress)
    assert {what for what, _, _ in told} == {"downloading acme/tiny from the hub"}
    assert told[-1][1:] == (100, 100)


def test_a_hang_is_told(resolve: Any, hub: Any, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SILENCE_S", 0.0)
    folder = checkpoint(tmp_path / "got")
    seen = threading.Event()

    def client(repo: str, **kw: Any) -> str:
        assert seen.wait(30)
        return str(folder)

    def progress(*p: Any) -> None:
        told.append(p)
        if "nothing came for" in p[0]:
            seen.set()

    hub(client)
    resolve("acme/tiny", progress)
    assert told[0] == ("downloading acme/tiny from the hub", 0, 0)


def test_what_is_there_already_is_not_told(
    resolve: Any, hub: Any, told: Told, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(download, "POLL_S", 30.0)
    import huggingface_hub

    folder = checkpoint(tmp_path / "got")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **kw: str(folder))
    resolve("acme/tiny")
    assert told == []


def test_a_server_that_ends_does_not_wait_for_the_download(resolve: Any, hub: Any, tmp_path: Path) -> None:
    """The callback raises; that comes out as it is, and the client stops at its next byte."""
    ended, stopped = threading.Event(), threading.Event()

    def client(repo: str, *, tqdm_class: Any, **kw: Any) -> str:
        bar = tqdm_class(total=100, unit="B")
        assert ended.wait(30)
        try:
            bar.update(1)
        finally:
            stopped.set()
        raise AssertionError("the download went on")

    class End(Exception):
        pass

    def progress(*p: Any) -> None:
        raise End

    hub(client)
    with pytest.raises(End):
        resolve("acme/tiny", progress)
    ended.set()
    assert stopped.wait(30)


def test_an_interrupted_download_is_resumed_and_never_used(resolve: Any, hub: Any, tmp_path: Path) -> None:
    """The client keeps what it has; minisgl asks it again at each start, and takes no folder that lacks files."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
    folder = tmp_path / "got"
    asked: list[str] = []

    def client(repo: str, **kw: Any) -> str:
        asked.append(repo)
        folder.mkdir(exist_ok=True)
        for name, text in (("config.json", "{}"), ("model.safetensors.index.json", index), (names[0], "")):
            (folder / name).write_text(text)
        if len(asked) == 1:
            raise ConnectionError("the connection was reset")
        if len(asked) == 3:
            (folder / names[1]).write_text("")
        return str(folder)

    hub(client)
    with pytest.raises(ModelError, match="could not be downloaded: the connection was reset"):
        resolve("acme/tiny")
    with pytest.raises(ModelError, match="lacks 1 of 2 weight files"):
        resolve("acme/tiny")
    assert [f.name for f in resolve("acme/tiny").weights] == names
    assert len(asked) == 3


def test_the_clients_own_classes_take_the_bar(told: Told) -> None:
    """The bars as huggingface_hub makes them for a snapshot: with its thread map, and its byte bars."""
    from huggingface_hub.utils import tqdm as hub_tqdm
    from tqdm.contrib.concurrent import thread_map

    assert hub_tqdm is not None
    tally = download.Tally()
    bar = download.bar_class(tally)
    assert thread_map(lambda x: x, [1, 2], tqdm_class=bar, desc="Fetching 2 files", max_workers=2) == [1, 2]
    one = bar(
        desc="Downloading", total=0, initial=0, unit="B", unit_scale=True, name="huggingface_hub.snapshot_download"
    )
    one.total = 10
    one.update(10)
    one.set_postfix_str("1 MB/s", refresh=False)
    one.set_description("done")
    one.refresh()
    assert (tally.done, tally.total) == (10, 10)


# ------------------------------------------------------------------------------------------------ ModelScope


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package ``modelscope`` with the parts that are used of it; gone after the test."""
    import importlib
    import sys

    folder = tmp_path / "site" / "modelscope" / "hub"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "snapshot_download.py").write_text(FAKE_CLIENT)
    (folder / "callback.py").write_text(
        "class ProgressCallback:\n"
        "    def __init__(self, filename, file_size): self.filename, self.file_size = filename, file_size\n"
        "    def update(self, size): pass\n"
        "    def end(self): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "modelscope"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("modelscope.hub.snapshot_download")
    for name in [n for n in sys.modules if n.partition(".")[0] == "modelscope"]:
        del sys.modules[name]


def test_a_modelscope_model_is_resolved_through_its_client(
    modelscope: Any, resolve: Any, told: Told, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "cache" / "hub" / "acme" / "tiny")
    model = resolve("modelscope:acme/tiny", revision="v2")
    assert (model.name, model.path, model.revision) == ("acme/tiny", folder, "v2")
    assert [f.name for f in model.weights] == ["model.safetensors"]
    assert model.tokenizer_dir == folder
    [call] = modelscope.CALLS
    assert (call["model_id"], call["revision"], call["local_files_only"]) == ("acme/tiny", "v2", False)
    assert call["cache_dir"] == str(tmp_path / "cache" / "hub")
    assert "*.safetensors" in call["allow_patterns"]
    assert told[-1] == ("downloading acme/tiny from ModelScope", 7, 7)


def test_modelscope_offline_asks_for_local_files_alone(modelscope: Any, resolve: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'acme/tiny' is not in .*hub and .* model\.offline is set"):
        resolve("modelscope:acme/tiny", offline=True)
    checkpoint(tmp_path / "cache" / "hub" / "acme" / "tiny")
    assert resolve("modelscope:acme/tiny", offline=True).weights
    assert [call["local_files_only"] for call in modelscope.CALLS] == [True, True]


def test_modelscope_failures_say_why_and_what_to_do(modelscope: Any, resolve: Any) -> None:
    with pytest.raises(ModelError, match=r"could not be downloaded: no route to host.*modelscope download acme/tiny"):
        resolve("modelscope:acme/tiny")
    with pytest.raises(ModelError, match="is not a ModelScope id"):
        resolve("modelscope:tiny")


def test_a_partial_modelscope_download_is_refused(modelscope: Any, resolve: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "cache" / "hub" / "acme" / "tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="is the download complete"):
        resolve("modelscope:acme/tiny")


def test_without_the_package_its_name_is_said(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelError, match=r"needs package 'modelscope': pip install 'minisgl\[modelscope\]'"):
        resolve("modelscope:acme/tiny")
