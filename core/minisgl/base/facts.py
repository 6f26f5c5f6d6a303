"""Facts of a model, read from its config without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding. ``kind``: default, linear, dynamic, llama3 or yarn. ``params``: the numbers of that kind as the
    config names them (factor, low_freq_factor, original_max_position_embeddings, ...)."""

    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    rotary_dim: int | None = None  # None: the whole head


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine must know of a model before it is built.

    ``max_len``: context length in tokens, scaled ropes included. ``vocab``: rows of the embedding. ``eos``: union of config
    and generation config (the tokenizer's are added by the text side). ``dtype``: of the checkpoint, "float32",
    "float16" or "bfloat16". ``extra``: the raw config, for a model's own keys.
    """

    arch: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    dtype: str
    tied: bool
    rope: RopeFacts
    norm_eps: float
    eos: frozenset[int]
    act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        """Read a Hugging Face config.json; tolerant of the variants people have on disk (faults M18, W3, A15).

        Raises: ModelError naming the key that is missing or wrong.
        """
        raise NotImplementedError
