"""SmolLM3: the layers of Llama, of which every fourth has no rotary embedding (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from minisgl.api import ModelError, ModelFacts
from minisgl.api.device import ModelContext
from minisgl.nn import DecoderLayer, DecoderLM, GatedMLP, SelfAttention

# What a config means that does not say it; transformers' SmolLM3Config has the same.
DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 2000000.0, "use_sliding_window": False}


class SmolLM3ForCausalLM(DecoderLM):
    @classmethod
    def facts(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelFacts:
        facts = ModelFacts.from_hf({**DEFAULTS, **config}, generation)
        flags = config.get("no_rope_layers")
        if flags is not None and len(flags) < facts.layers:
            raise ModelError(f"config: no_rope_layers has {len(flags)} entries for num_hidden_layers={facts.layers}")
        return facts

    def layer(self, ctx: ModelContext, i: int) -> nn.Module:
        f = ctx.facts
        bias = f.attention_bias
        attention = SelfAttention(ctx, i, qkv_bias=bias, out_bias=bias, rope=has_rope(f.extra, i))
        return DecoderLayer(ctx, attention, GatedMLP(ctx, bias=f.mlp_bias))


def has_rope(config: Mapping[str, Any], layer: int) -> bool:
    """``no_rope_layers`` has, in spite of its name, a 1 for a layer with rotary embedding."""
    flags = config.get("no_rope_layers")
    if flags is not None:
        return bool(flags[layer])
    return (layer + 1) % config.get("no_rope_layer_interval", 4) != 0
