"""What the cost of a step depends on in a model: its sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.base.errors import ConfigError
from minisgl.base.facts import ModelFacts, MoEFacts


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. ``intermediate``: width of the MLP, 0 if every layer has experts. ``experts`` of width
    ``expert_width`` in ``moe_layers`` layers, of which a token uses ``top_k``. ``max_len``: context in tokens. ``tied``: the LM head is the embedding."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    moe_layers: int = 0
    tied: bool = True

    @property
    def dense_values(self) -> int:
        """Weights of the layers that every token goes through; norms and biases are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        routers = self.moe_layers * self.hidden * self.experts
        return self.layers * attention + (self.layers - self.moe_layers) * mlp + routers

    @property
    def expert_values(self) -> int:
        """Weights of one expert in every layer that has experts."""
        return self.moe_layers * 3 * self.hidden * self.expert_width

    @property
    def head_values(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocab

    @property
    def kv_values(self) -> int:
        """Numbers that the KV cache keeps of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """All weights; norms and biases are left out."""
        embedding = 0 if self.tied else self.head_values
        return self.dense_values + self.experts * self.expert_values + self.head_values + embedding


SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192),
        Shape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, 40960),
        Shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072),
        Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072, tied=False),
        Shape("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936, 40960, tied=False),
        Shape("qwen3-30b-a3b", 48, 2048, 0, 32, 4, 128, 151936, 40960, 128, 8, 768, 48, tied=False),
    )
}


def find_shape(text: str) -> Shape:
    """A built-in shape by its name, or that of a config.json or a folder with one. Raises: ConfigError, ModelError."""
    if text in SHAPES:
        return SHAPES[text]
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"--shape {text!r} is neither a built-in shape nor a config.json; built in: {', '.join(SHAPES)}"
        )
    try:
        config: Any = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--shape {path}: it cannot be read as JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"--shape {path}: a JSON object is needed, as in a checkpoint's config.json")
    return from_config(path.parent.name or path.stem, config)


def from_config(name: str, config: dict[str, Any]) -> Shape:
    facts = ModelFacts.from_hf(config, {}, windows=True)
    sparse = config.get("num_experts") or config.get("num_local_experts")
    moe = MoEFacts.from_hf(config) if sparse else None
    return Shape(
        name=name,
        layers=facts.layers,
        hidden=facts.hidden,
        intermediate=facts.intermediate if moe is None or len(moe.layers) < facts.layers else 0,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        vocab=facts.vocab,
        max_len=facts.max_len,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        expert_width=moe.intermediate if moe else 0,
        moe_layers=len(moe.layers) if moe else 0,
        tied=facts.tied,
    )
