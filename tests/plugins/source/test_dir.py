from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from minisgl.base.errors import ModelError
from minisgl.base.types import LocalModel
from minisgl.text.tokenizer import TokenizerContext
from minisgl_plugins.tokenizer.hf import HFTokenizer

Resolve = Callable[..., LocalModel]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return path


def weights(folder: Path, *names: str, index: bool = False) -> None:
    for i, name in enumerate(names):
        save_file({f"t{i}": np.zeros(1, np.float32)}, folder / name)
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": n for i, n in enumerate(names)}}))


def names(model: LocalModel) -> list[str]:
    return [f.name for f in model.weights]


def test_a_folder_is_read(folder: Path, resolve: Resolve) -> None:
    weights(folder, "model.safetensors")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    model = resolve(str(folder))
    assert (model.name, model.path, names(model)) == ("model", folder, ["model.safetensors"])
    assert model.config == {"architectures": ["LlamaForCausalLM"]}
    assert model.generation == {"temperature": 0.6}
    assert (model.tokenizer_dir, model.revision) == (None, None)
    assert resolve(f"dir:{folder}") == LocalModel(
        **{k: getattr(model, k) for k in model.__slots__} | {"ref": str(folder)}
    )


def test_relative_paths_and_weightless_folders(folder: Path, resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for ref in ("./model", "model", "dir:model"):
        assert resolve(ref, weights=False).path == folder
    monkeypatch.chdir(folder)
    assert resolve(".", weights=False).name == "model"
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        resolve(".")


def test_m18_index_names_the_only_copy_that_is_taken(folder: Path, resolve: Resolve) -> None:
    weights(folder, "consolidated.safetensors")
    weights(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", index=True)
    assert names(resolve(str(folder))) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_m18_single_file_beside_a_consolidated_one(folder: Path, resolve: Resolve) -> None:
    weights(folder, "consolidated.00.safetensors", "model.safetensors")
    assert names(resolve(str(folder))) == ["model.safetensors"]


def test_m18_consolidated_alone_is_refused(folder: Path, resolve: Resolve) -> None:
    weights(folder, "consolidated.safetensors")
    with pytest.raises(ModelError, match="only consolidated weights"):
        resolve(str(folder))


def test_interrupted_downloads_are_seen(folder: Path, resolve: Resolve) -> None:
    """W2: an incomplete checkpoint must not start."""
    weights(folder, "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors")
    with pytest.raises(ModelError, match="2 of 3 files"):
        resolve(str(folder))
    weights(folder, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", index=True)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files, the first is model-00003.* \(with tensor "):
        resolve(str(folder))


def test_shards_without_an_index_and_odd_names(folder: Path, resolve: Resolve) -> None:
    weights(folder, "pytorch.safetensors")
    assert names(resolve(str(folder))) == ["pytorch.safetensors"]
    weights(folder, "other.safetensors")
    with pytest.raises(ModelError, match="several sets of weights"):
        resolve(str(folder))


def test_index_cannot_point_outside_the_folder(folder: Path, resolve: Resolve) -> None:
    weights(folder, "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t": "../model/model.safetensors"}}))
    with pytest.raises(ModelError, match="lacks"):
        resolve(str(folder))


def test_pickles_are_refused_with_advice(folder: Path, resolve: Resolve) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin.*runs code.*save_pretrained"):
        resolve(str(folder))


def test_typos_show_what_is_there(folder: Path, resolve: Resolve) -> None:
    with pytest.raises(ModelError, match=r"does not exist\. In .* there is: model"):
        resolve(str(folder.parent / "modle"))
    with pytest.raises(ModelError, match=r"no config\.json\. There is one in .*model"):
        resolve(str(folder.parent))
    with pytest.raises(ModelError, match="is a file"):
        resolve(f"dir:{folder / 'config.json'}")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected an object"):
        resolve(str(folder))
    with pytest.raises(ModelError, match=r"model\.revision = 'main'"):
        resolve(str(folder), revision="main")


def test_folder_with_only_a_gguf_file_names_it(folder: Path, resolve: Resolve) -> None:
    (folder / "config.json").unlink()
    (folder / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"give gguf:.*m\.gguf"):
        resolve(str(folder))


def test_tokenizer_of_the_folder(folder: Path, resolve: Resolve) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert resolve(str(folder), weights=False).tokenizer_dir == folder


def test_bpe_files_without_tokenizer_json_are_converted_once(folder: Path, resolve: Resolve, tmp_path: Path) -> None:
    """GPT-2's layout, vocab.json and merges.txt, read by transformers in the converter process."""
    from transformers import GPT2Tokenizer

    from minisgl.text.decode import gpt2_alphabet

    vocab = {c: i for i, c in enumerate([*sorted(gpt2_alphabet()), "he", "hel", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    found = resolve(str(folder), weights=False).tokenizer_dir
    assert found is not None
    assert found.parent == tmp_path / "cache" / "tokenizers"
    ours = HFTokenizer(TokenizerContext(HFTokenizer.Settings(), found))
    text = "hello the 世界"
    assert ours.encode(text, False).tolist() == GPT2Tokenizer.from_pretrained(folder)(text)["input_ids"]
    before = (found / "tokenizer.json").stat().st_mtime_ns
    assert resolve(str(folder), weights=False).tokenizer_dir == found
    assert (found / "tokenizer.json").stat().st_mtime_ns == before


def test_tokenizers_that_cannot_be_converted_say_why(folder: Path, resolve: Resolve) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x00nonsense")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelError, match="could not be converted: transformers does not read its tokenizer"):
        resolve(str(folder), weights=False)
