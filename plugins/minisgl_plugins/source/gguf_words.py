"""How byte-level BPE cuts text into words before merging, by ``tokenizer.ggml.pre``.

A wrong one gives wrong ids without an error, so an unknown one is refused. Patterns are the ones of the models' own
tokenizer.json; their names, and which take whole words, are those of llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from minisgl.api import ModelError


@dataclass(frozen=True, slots=True)
class Words:
    """``patterns``: each cuts what the ones before it left. ``gpt2``: GPT-2's own pattern follows. ``whole``: a word that is in
    the vocabulary is taken whole, whatever the merges say. ``nfc``: text is composed first. ``bos``: BOS is added unless the
    file says otherwise."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    whole: bool = False
    nfc: bool = False
    bos: bool = False

    def pre_tokenizer(self) -> Any:
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


def _gpt4(digits: str) -> str:
    """The pattern that GPT-4, Llama 3 and Qwen share but for how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = Words((_gpt4(r"\p{N}{1,3}"),), whole=True, bos=True)
_QWEN2 = Words((_gpt4(r"\p{N}"),), nfc=True)

WORDS: Mapping[str, Words] = {
    "gpt-2": Words(gpt2=True),
    "smollm": Words((r"\p{N}",), gpt2=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": Words(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Words((_TEKKEN,), whole=True, bos=True),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),  # llama.cpp's, and no model's own
}
OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}  # of files so old that they do not say


def words_of(meta: Mapping[str, Any]) -> Words:
    """Raises: ModelError for a name that is not known here, and for a file that has none."""
    arch = str(meta.get("general.architecture"))
    pre = meta.get("tokenizer.ggml.pre", OF_ARCHITECTURE.get(arch))
    known = ", ".join(map(repr, WORDS))
    if pre is None:
        raise ModelError(
            f"the file lacks tokenizer.ggml.pre, without which its text cannot be cut into words as the model learned it; "
            f"take a newer conversion of the model. Known are: {known}"
        )
    if pre not in WORDS:
        raise ModelError(
            f"tokenizer.ggml.pre = {pre!r} is not known; known: {known}. Take the model's safetensors files instead"
        )
    return WORDS[pre]
